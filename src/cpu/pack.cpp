#include "cpu/pack.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

/// Elements of one panel.
std::int64_t panel_size(std::int64_t k, DType dtype) {
  return kPanel * (dtype == DType::bf16 ? (k + 1) / 2 * 2 : k);
}

std::int64_t place(std::int64_t row, std::int64_t column, std::int64_t k, DType dtype) {
  const std::int64_t base = row / kPanel * panel_size(k, dtype);
  const std::int64_t lane = row % kPanel;
  return dtype == DType::bf16 ? base + (column / 2 * kPanel + lane) * 2 + column % 2
                              : base + column * kPanel + lane;
}

void convert(float x, float& out) { out = x; }
void convert(float x, std::uint16_t& out) { out = float_to_bf16(x); }
void convert(std::uint16_t x, float& out) { out = bf16_to_float(x); }
void convert(std::uint16_t x, std::uint16_t& out) { out = x; }

template <typename From, typename To>
void pack(const void* source, std::int64_t n, std::int64_t k, DType to, std::int64_t row,
          void* packed) {
  // Tiles of a few columns, so that a panel's cache lines are written while they are near.
  constexpr std::int64_t kColumns = 32;
  const char* from = static_cast<const char*>(source);
  To* out = static_cast<To*>(packed);
  for (std::int64_t first = 0; first < n;) {
    const std::int64_t last = std::min(n, first + kPanel - (row + first) % kPanel);
    for (std::int64_t column = 0; column < k; column += kColumns) {
      const std::int64_t end = std::min(k, column + kColumns);
      for (std::int64_t r = first; r < last; ++r) {
        for (std::int64_t c = column; c < end; ++c) {
          From value;  // a mapped file's tensors may lie unaligned
          std::memcpy(&value, from + (r * k + c) * static_cast<std::int64_t>(sizeof(From)),
                      sizeof value);
          convert(value, out[place(row + r, c, k, to)]);
        }
      }
    }
    first = last;
  }
}

}  // namespace

std::int64_t packed_bytes(std::int64_t n, std::int64_t k, DType dtype) {
  const std::int64_t panels = (n + kPanel - 1) / kPanel;
  return panels * panel_size(k, dtype) * static_cast<std::int64_t>(size_of(dtype));
}

void pack_rows(const void* source, DType from, std::int64_t n, std::int64_t k, DType to,
               std::int64_t row, void* packed) {
  if (from == DType::f32) {
    if (to == DType::f32) {
      pack<float, float>(source, n, k, to, row, packed);
    } else {
      pack<float, std::uint16_t>(source, n, k, to, row, packed);
    }
  } else {
    if (to == DType::f32) {
      pack<std::uint16_t, float>(source, n, k, to, row, packed);
    } else {
      pack<std::uint16_t, std::uint16_t>(source, n, k, to, row, packed);
    }
  }
}

void unpack_row(const void* packed, DType dtype, std::int64_t k, std::int64_t row, float* out) {
  if (dtype == DType::f32) {
    const float* from = static_cast<const float*>(packed);
    for (std::int64_t c = 0; c < k; ++c) out[c] = from[place(row, c, k, dtype)];
  } else {
    const std::uint16_t* from = static_cast<const std::uint16_t*>(packed);
    for (std::int64_t c = 0; c < k; ++c) out[c] = bf16_to_float(from[place(row, c, k, dtype)]);
  }
}

float bf16_to_float(std::uint16_t value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits | 0x400000u) >> 16);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace specrt::cpu
