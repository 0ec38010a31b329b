#include "cpu/pack.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/quantise.h"
#include "specrt/error.h"

namespace specrt::cpu {
namespace {

std::int64_t panel_bytes(std::int64_t k, Precision precision) {
  switch (precision) {
    case Precision::f32:
      return kPanel * k * 4;
    case Precision::bf16:
    case Precision::f16:
      return kPanel * ((k + 1) / 2 * 2) * 2;
    case Precision::int8:
    case Precision::w8a8:
      return packed::kHeader + packed::wide_steps_of(k) * packed::kInt8Step;
    case Precision::int4:
      return packed::kHeader + packed::steps_of(k) * packed::kInt4Step;
  }
  return 0;
}

/// Where an element of a panel is, in elements (f32, bf16, f16) or bytes (int8, w8a8).
std::int64_t place(std::int64_t lane, std::int64_t column, Precision precision) {
  switch (precision) {
    case Precision::f32:
      return column * kPanel + lane;
    case Precision::bf16:
    case Precision::f16:
      return (column / 2 * kPanel + lane) * 2 + column % 2;
    case Precision::int8:
    case Precision::w8a8:
      return packed::kHeader + (column / 4 * kPanel + lane) * 4 + column % 4;
    case Precision::int4:
      break;
  }
  return 0;
}

/// int4: the byte that holds an element, and whether it is in the high half.
std::int64_t place4(std::int64_t lane, std::int64_t column, bool& high) {
  const std::int64_t line = lane / 16 * 4 + column % 16 / 4;
  high = column % kGroup >= 16;
  return packed::kHeader + column / kGroup * packed::kInt4Step + packed::kInt4Scales + line * 64 +
         lane % 16 * 4 + column % 4;
}

/// int4: where a group's scale is; its minimum is kPanel halves behind.
std::int64_t scale_place4(std::int64_t lane, std::int64_t group) {
  return packed::kHeader + group * packed::kInt4Step + lane * 2;
}

/// Bits of a half.
struct Half {
  std::uint16_t bits;
};

void convert(float x, float& out) { out = x; }
void convert(float x, std::uint16_t& out) { out = float_to_bf16(x); }
void convert(std::uint16_t x, float& out) { out = bf16_to_float(x); }
void convert(std::uint16_t x, std::uint16_t& out) { out = x; }
void convert(float x, Half& out) { out.bits = weight_to_half(x); }
void convert(std::uint16_t x, Half& out) { convert(bf16_to_float(x), out); }

template <typename From, typename To>
void pack(const void* source, std::int64_t n, std::int64_t k, Precision to, const PackedRows& rows,
          void* packed) {
  // Tiles of a few columns, so that a panel's cache lines are written while they are near.
  constexpr std::int64_t kColumns = 32;
  const char* from = static_cast<const char*>(source);
  const std::int64_t panel_size = panel_bytes(k, to) / static_cast<std::int64_t>(sizeof(To));
  for (std::int64_t first = 0; first < n;) {
    const std::int64_t row = rows.row(first);
    const std::int64_t last = std::min(n, first + kPanel - row % kPanel);
    To* panel = static_cast<To*>(packed) + row / kPanel * panel_size;
    for (std::int64_t column = 0; column < k; column += kColumns) {
      const std::int64_t end = std::min(k, column + kColumns);
      for (std::int64_t r = first; r < last; ++r) {
        const std::int64_t lane = row % kPanel + r - first;
        for (std::int64_t c = column; c < end; ++c) {
          From value;  // a mapped file's tensors may lie unaligned
          std::memcpy(&value, from + (r * k + c) * static_cast<std::int64_t>(sizeof(From)),
                      sizeof value);
          convert(value, panel[place(lane, c, to)]);
        }
      }
    }
    first = last;
  }
}

/// One row of codes into its lane of a panel.
void pack_row_codes(const QuantisedTensor& row, std::int64_t k, std::int64_t lane, char* panel) {
  const std::int64_t groups = packed::steps_of(k);
  const auto set_float = [&](float value) { std::memcpy(panel + lane * 4, &value, sizeof value); };
  if (row.precision != Precision::int4) {
    set_float(row.scales[0]);
    for (std::int64_t c = 0; c < k; ++c) {
      panel[place(lane, c, row.precision)] = static_cast<char>(row.codes[c]);
    }
    return;
  }
  set_float(row.zero_points ? 1.0f : 0.0f);
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::uint16_t scale = float_to_half(row.scales[group]);
    const std::uint16_t minimum = float_to_half(row.minima[group]);
    char* at = panel + scale_place4(lane, group);
    std::memcpy(at, &scale, sizeof scale);
    std::memcpy(at + kPanel * 2, &minimum, sizeof minimum);
  }
  for (std::int64_t c = 0; c < k; ++c) {
    bool high = false;
    char& byte = panel[place4(lane, c, high)];
    const int code = row.codes[c] & 15;
    byte = static_cast<char>(high ? (byte & 0x0F) | code << 4 : (byte & 0xF0) | code);
  }
}

void quantise_rows(const void* source, DType from, std::int64_t n, std::int64_t k, Precision to,
                   const PackedRows& rows, std::span<const float> importance, void* packed) {
  const std::int64_t groups = packed::steps_of(k);
  std::vector<float> weights(static_cast<std::size_t>(k));
  std::vector<std::int8_t> codes(static_cast<std::size_t>(k));
  std::vector<float> scales(static_cast<std::size_t>(groups));
  std::vector<float> minima(static_cast<std::size_t>(groups));
  QuantisedTensor row;
  row.precision = to;
  row.codes = codes.data();
  row.scales = scales.data();
  row.minima = minima.data();
  const char* bytes = static_cast<const char*>(source);
  for (std::int64_t r = 0; r < n; ++r) {
    if (from == DType::f32) {
      std::memcpy(weights.data(), bytes + r * k * 4, static_cast<std::size_t>(k) * 4);
    } else {
      for (std::int64_t c = 0; c < k; ++c) {
        std::uint16_t value;
        std::memcpy(&value, bytes + (r * k + c) * 2, sizeof value);
        weights[static_cast<std::size_t>(c)] = bf16_to_float(value);
      }
    }
    const bool good =
        to == Precision::int4
            ? quantise_int4(weights.data(), k, importance.empty() ? nullptr : importance.data(),
                            codes.data(), scales.data(), minima.data())
            : quantise_int8(weights.data(), k, codes.data(), scales[0]);
    if (!good) {
      const std::string what = "finite weights that " + std::string(name_of(to)) + " can hold";
      throw InvalidArgument(expected_got("weights", what, "others"));
    }
    const std::int64_t at = rows.row(r);
    pack_row_codes(row, k, at % kPanel,
                   static_cast<char*>(packed) + at / kPanel * panel_bytes(k, to));
  }
}

}  // namespace

std::uint16_t weight_to_half(float value) {
  const std::uint16_t half = float_to_half(value);
  if (std::isfinite(value) && !std::isfinite(half_to_float(half))) {
    throw InvalidArgument(
        expected_got("weights", "values of at most 65504 in float16", std::to_string(value)));
  }
  return half;
}

std::int64_t PackedRows::row(std::int64_t r) const {
  const std::int64_t at = first + r;
  return (at / kPanel * panel_step + panel_offset) * kPanel + at % kPanel;
}

std::int64_t packed_bytes(std::int64_t n, std::int64_t k, Precision precision) {
  return (n + kPanel - 1) / kPanel * panel_bytes(k, precision);
}

void pack_rows(const void* source, DType from, std::int64_t n, std::int64_t k, Precision to,
               const PackedRows& rows, void* packed, std::span<const float> importance) {
  const bool from_float = from == DType::f32;
  if (to == Precision::f32) {
    (from_float ? pack<float, float> : pack<std::uint16_t, float>)(source, n, k, to, rows, packed);
  } else if (to == Precision::bf16) {
    (from_float ? pack<float, std::uint16_t> : pack<std::uint16_t, std::uint16_t>)(source, n, k, to,
                                                                                   rows, packed);
  } else if (to == Precision::f16) {
    (from_float ? pack<float, Half> : pack<std::uint16_t, Half>)(source, n, k, to, rows, packed);
  } else {
    quantise_rows(source, from, n, k, to, rows, importance, packed);
  }
}

void pack_codes(const QuantisedTensor& tensor, std::int64_t n, std::int64_t k,
                const PackedRows& rows, void* packed) {
  const std::int64_t groups =
      tensor.precision == Precision::int4 ? packed::steps_of(k) : std::int64_t{1};
  for (std::int64_t r = 0; r < n; ++r) {
    QuantisedTensor row = tensor;
    row.codes += r * k;
    row.scales += r * groups;
    if (row.minima != nullptr) row.minima += r * groups;
    const std::int64_t at = rows.row(r);
    pack_row_codes(row, k, at % kPanel,
                   static_cast<char*>(packed) + at / kPanel * panel_bytes(k, tensor.precision));
  }
}

void unpack_row(const void* packed, Precision precision, std::int64_t k, std::int64_t row,
                float* out) {
  const char* panel = static_cast<const char*>(packed) + row / kPanel * panel_bytes(k, precision);
  const std::int64_t lane = row % kPanel;
  const auto half_at = [&](std::int64_t at) {
    std::uint16_t value;
    std::memcpy(&value, panel + at, sizeof value);
    return half_to_float(value);
  };
  float first = 0.0f;  // a scale, or an int4 row's kind
  std::memcpy(&first, panel + lane * 4, sizeof first);
  for (std::int64_t c = 0; c < k; ++c) {
    switch (precision) {
      case Precision::f32:
        out[c] = reinterpret_cast<const float*>(panel)[place(lane, c, precision)];
        break;
      case Precision::bf16:
        out[c] =
            bf16_to_float(reinterpret_cast<const std::uint16_t*>(panel)[place(lane, c, precision)]);
        break;
      case Precision::f16:
        out[c] = half_at(place(lane, c, precision) * 2);
        break;
      case Precision::int8:
      case Precision::w8a8: {
        const auto code = static_cast<std::int8_t>(panel[place(lane, c, precision)]);
        out[c] = first * static_cast<float>(code);
        break;
      }
      case Precision::int4: {
        bool high = false;
        const auto byte = static_cast<unsigned char>(panel[place4(lane, c, high)]);
        const auto code = static_cast<float>(high ? byte >> 4 : byte & 15);
        const std::int64_t at = scale_place4(lane, c / kGroup);
        const float scale = half_at(at);
        const float minimum = half_at(at + kPanel * 2) * (first != 0.0f ? scale : 1.0f);
        out[c] = code * scale + minimum;
        break;
      }
    }
  }
}

void unpack_codes(const void* packed, Precision precision, std::int64_t k, std::int64_t row,
                  std::int8_t* codes, std::uint16_t* scales, std::uint16_t* minima) {
  const char* panel = static_cast<const char*>(packed) + row / kPanel * panel_bytes(k, precision);
  const std::int64_t lane = row % kPanel;
  if (precision != Precision::int4) {
    for (std::int64_t c = 0; c < k; ++c) {
      codes[c] = static_cast<std::int8_t>(panel[place(lane, c, precision)]);
    }
    return;
  }
  for (std::int64_t group = 0; group < specrt::cpu::packed::steps_of(k); ++group) {
    const char* at = panel + scale_place4(lane, group);
    std::memcpy(scales + group, at, sizeof *scales);
    std::memcpy(minima + group, at + kPanel * 2, sizeof *minima);
  }
  for (std::int64_t c = 0; c < k; ++c) {
    bool high = false;
    const auto byte = static_cast<unsigned char>(panel[place4(lane, c, high)]);
    codes[c] = static_cast<std::int8_t>(high ? byte >> 4 : byte & 15);
  }
}

float unpack_scale(const void* packed, Precision precision, std::int64_t k, std::int64_t row) {
  const char* panel = static_cast<const char*>(packed) + row / kPanel * panel_bytes(k, precision);
  float scale = 0.0f;
  std::memcpy(&scale, panel + row % kPanel * 4, sizeof scale);
  return scale;
}

float bf16_to_float(std::uint16_t value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits | 0x400000u) >> 16);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

float half_to_float(std::uint16_t value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000u) << 16;
  const std::uint32_t rest = value & 0x7FFFu;
  if (rest >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  // The exponent's bias differs by 112; multiplying also puts subnormals right.
  const float magnitude = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
  if (rest >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the multiple of 2^-24 in the low bits, rounded to even.
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u));
  }
  const std::uint32_t rounded = rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}

}  // namespace specrt::cpu
