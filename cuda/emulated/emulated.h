#pragma once

// A device on the host: everything of device.h and ops.h over simt/host.h, so that the library
// itself, from weights to graphs, runs where there is no GPU. It is as unkind as a GPU may be:
//   - nothing that was put on a stream happens before somebody waits for it, so a host buffer that
//     changes too early, or is read too early, shows;
//   - device memory cannot be touched by the host (it is mapped while streams run and not else);
//   - a graph holds arguments, not what they point at.

#include <cstdint>
#include <vector>

#include "device.h"
#include "simt/host.h"

namespace specrt::cuda::emulated {

/// What it is from now on; for tests.
struct Settings {
  int devices = 1;
  int architecture = 80;  ///< 90: plain weights stay row-major, as wgmma reads them
  std::int64_t memory = std::int64_t{256} << 20;
  simt::Order order = simt::Order::forward;
  std::int64_t fail_at = -1;  ///< the launch that fails and takes the device with it; -1: none
};
Settings& settings();

/// What was asked of it since reset().
struct Counts {
  std::int64_t launches = 0;  ///< of kernels, those of graphs included
  std::int64_t calls = 0;     ///< of the host: kernels, captured ones too, and graphs
  std::int64_t to_device = 0;
  std::int64_t to_host = 0;
  std::int64_t waits = 0;  ///< synchronize(), and Event::wait() where there was something to do
  std::int64_t captures = 0;
  std::int64_t graph_launches = 0;
  std::int64_t allocations = 0;
};
Counts& counts();

/// Bytes of device memory in use.
std::int64_t in_use();
/// Settings and counts as they were, and a device that is well.
void reset();

/// What `bytes` of device memory hold, whatever streams have still to do.
std::vector<std::byte> look(const void* from, std::size_t bytes);

}  // namespace specrt::cuda::emulated
