#pragma once

#include <cstdint>

namespace specrt::simt {

/// The order of threads, between barriers, and of blocks, where a block runs on the host.
enum class Order : std::uint8_t { forward, backward, shuffled };

}  // namespace specrt::simt
