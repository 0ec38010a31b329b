#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "specrt/cpu.h"

namespace specrt {

/// Calls body(begin, end) for shares of `n` rows that end at whole panels, on as many threads as
/// the work is worth. The first exception is thrown again.
template <typename Body>
void parallel_rows(std::int64_t n, std::int64_t work, const Body& body) {
  const std::int64_t panels = (n + cpu::kPanel - 1) / cpu::kPanel;
  const std::int64_t count =
      std::min({std::int64_t{default_thread_count()}, panels, work / (std::int64_t{1} << 20) + 1});
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  const auto share = [&](std::int64_t index) {
    const auto edge = [&](std::int64_t i) { return std::min(n, panels * i / count * cpu::kPanel); };
    try {
      body(edge(index), edge(index + 1));
    } catch (...) {
      errors[static_cast<std::size_t>(index)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::int64_t i = 1; i < count; ++i) threads.emplace_back(share, i);
  } catch (const std::system_error&) {
    // What no thread could be had for is done here.
  }
  share(0);
  for (std::int64_t i = static_cast<std::int64_t>(threads.size()) + 1; i < count; ++i) share(i);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
}

}  // namespace specrt
