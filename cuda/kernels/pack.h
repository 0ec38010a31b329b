#pragma once

// Weights in the order in which gemm.h reads them. Host only, row by row, once at load.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/gemm.h"

namespace specrt::cuda {

/// Bytes of an [n, k] matrix, panels and blocks filled up with zeros.
std::int64_t packed_bytes(std::int64_t n, std::int64_t k, Stored stored);

/// Rows [first, first + n) of a matrix of k columns, from row-major 16-bit values. `packed` was
/// zeroed before its first call.
void pack_plain(std::span<const std::uint16_t> values, std::int64_t first, std::int64_t n,
                std::int64_t k, std::span<std::byte> packed);
/// From row-major codes; their scales go to GemmArgs::scales as they are.
void pack_int8(std::span<const std::int8_t> codes, std::int64_t first, std::int64_t n,
               std::int64_t k, std::span<std::byte> packed);
/// From row-major codes 0 to 15 and [n, ceil(k / 32)] scales and minima as fp16.
void pack_int4(std::span<const std::int8_t> codes, std::span<const std::uint16_t> scales,
               std::span<const std::uint16_t> minima, std::int64_t first, std::int64_t n,
               std::int64_t k, std::span<std::byte> packed);

}  // namespace specrt::cuda
