#pragma once

#include <cstdint>
#include <span>

#include "specrt/model.h"
#include "specrt/types.h"

namespace specrt::cpu {

/// Bytes of an [n, k] matrix packed as kernels.h describes.
std::int64_t packed_bytes(std::int64_t n, std::int64_t k, Precision precision);

/// Where the rows of a tensor go in a packed matrix: one behind the other, or by whole panels in
/// turn with another tensor's (gate and up).
struct PackedRows {
  std::int64_t first = 0;         ///< row of the matrix, or of the panels taken in turn
  std::int64_t panel_step = 1;    ///< 2: every second panel
  std::int64_t panel_offset = 0;  ///< the first of them
  std::int64_t row(std::int64_t r) const;
};

/// Packs row-major [n, k] of dtype `from` into a matrix whose rows have k columns, quantising where
/// the precision asks for it. The destination was zeroed before its first call. Throws
/// InvalidArgument where a weight to quantise is not finite or beyond what its scales can hold.
/// `importance` is quantise_int4's, or empty.
void pack_rows(const void* source, DType from, std::int64_t n, std::int64_t k, Precision to,
               const PackedRows& rows, void* packed, std::span<const float> importance = {});

/// Packs rows that are quantised already; their values are not checked.
void pack_codes(const QuantisedTensor& tensor, std::int64_t n, std::int64_t k,
                const PackedRows& rows, void* packed);

/// Reads row `row` of a packed matrix back as the k floats that it stands for.
void unpack_row(const void* packed, Precision precision, std::int64_t k, std::int64_t row,
                float* out);

/// Reads row `row` of a packed matrix of int8, w8a8 or int4 back as it is: codes [k] and, of int4,
/// scales and minima [steps_of(k)] as fp16.
void unpack_codes(const void* packed, Precision precision, std::int64_t k, std::int64_t row,
                  std::int8_t* codes, std::uint16_t* scales, std::uint16_t* minima);
/// The row's scale, or an int4 row's kind (kernels.h).
float unpack_scale(const void* packed, Precision precision, std::int64_t k, std::int64_t row);

/// bf16 <-> f32; rounding is to nearest even, NaN stays NaN.
float bf16_to_float(std::uint16_t value);
std::uint16_t float_to_bf16(float value);

/// The same for fp16; beyond its range is infinity.
float half_to_float(std::uint16_t value);
std::uint16_t float_to_half(float value);
/// Throws InvalidArgument for a finite value that a half cannot hold.
std::uint16_t weight_to_half(float value);

}  // namespace specrt::cpu
