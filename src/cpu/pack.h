#pragma once

#include <cstdint>

#include "specrt/types.h"

namespace specrt::cpu {

/// Bytes of an [n, k] matrix packed as kernels.h describes.
std::int64_t packed_bytes(std::int64_t n, std::int64_t k, DType dtype);

/// Packs row-major [n, k] of dtype `from` into rows [row, row + n) of a packed matrix of
/// dtype `to` whose rows have k columns. The destination was zeroed before its first call.
void pack_rows(const void* source, DType from, std::int64_t n, std::int64_t k, DType to,
               std::int64_t row, void* packed);

/// Reads row `row` of a packed matrix back as k floats.
void unpack_row(const void* packed, DType dtype, std::int64_t k, std::int64_t row, float* out);

/// bf16 <-> f32; rounding is to nearest even, NaN stays NaN.
float bf16_to_float(std::uint16_t value);
std::uint16_t float_to_bf16(float value);

}  // namespace specrt::cpu
