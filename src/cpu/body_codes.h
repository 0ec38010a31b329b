#pragma once

// Products of int8 and int4 weights with activations as whole numbers (body_prepare.h). Whole
// numbers are summed exactly, so their order is free; what follows is one sequence of operations
// for each output. Include after a vec_*.h.

#include "cpu/body_prepare.h"
#include "cpu/body_write.h"
#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr int kPanelVectors = static_cast<int>(kPanel) / kWidth;  // of a panel

/// Where the parts of a call's activations and of a panel are.
struct CodeRows {
  CodeRows(const GemmArgs& args, Precision precision)
      : at(args.rows, args.k, precision), prepared(static_cast<const char*>(args.prepared)) {}
  PreparedCodes at;
  const char* prepared;
  const char* line(std::int64_t index) const { return prepared + at.line(index); }
  const float* scales() const { return reinterpret_cast<const float*>(prepared + at.scales()); }
  const std::int32_t* sums() const {
    return reinterpret_cast<const std::int32_t*>(prepared + at.sums());
  }
  const float* groups(std::int64_t row) const {
    return reinterpret_cast<const float*>(prepared + at.groups()) + at.group(row);
  }
};

/// int8 weights: R rows of one tile.
template <int kPlanes, int R>
SPECRT_INLINE void int8_rows(const char* panel, const CodeRows& rows, std::int64_t row,
                             std::int64_t steps, float* sums) {
  constexpr int kLines = R * kPlanes;
  const std::int64_t line = row * kPlanes;
  const char* x = rows.line(line);
  const auto* output_scales = reinterpret_cast<const float*>(panel);
  const auto* w = reinterpret_cast<const std::int8_t*>(panel + packed::kHeader);
  Dot acc[kLines][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kLines; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = dot_start(rows.sums()[line + r]);
  }
  for (std::int64_t step = 0; step < steps; ++step, x += kLineStep) {
    for (std::int64_t quad = 0; quad < packed::kWide; quad += 4, w += kPanel * 4) {
      __builtin_prefetch(w + 4096);
      __builtin_prefetch(w + 4096 + 64);
      Dot weights[kPanelVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) weights[v] = dot_weights(w + v * kWidth * 4);
#pragma GCC unroll 8
      for (int r = 0; r < kLines; ++r) {
        const I four = dot_row(x + r * kLineBytes + quad);
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = dot_add(acc[r][v], weights[v], four);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      F sum = dot_sum(acc[r * kPlanes][v]);
      if constexpr (kPlanes == 2) {
        sum = fma(sum, set1(256.0f), dot_sum(acc[r * kPlanes + 1][v]));
      }
      const F scaled = mul(sum, load(output_scales + v * kWidth));
      store(sums + r * kPanel + v * kWidth, mul(scaled, set1(rows.scales()[row + r])));
    }
  }
}

/// Scale and minimum of kWidth outputs in a group: where their kind is 1, minima count scales.
SPECRT_INLINE void group_scales(const float* kinds, const char* group, std::int64_t lane, F& scale,
                                F& minimum) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(group);
  const F kind = load(kinds + lane);
  scale = load_half(halves + lane);
  // Times 1, or times the scale: both exactly.
  minimum = mul(load_half(halves + kPanel + lane), fma(kind, scale, sub(set1(1.0f), kind)));
}

/// Asks for one of `parts` shares of a group's share of the block behind it: in two places, since
/// one sequential stream gets less than what memory gives, and evenly, since a burst would fill the
/// core's few slots for misses. `w` is where the group lies.
SPECRT_INLINE void fetch_int4(const char* w, std::int64_t group, std::int64_t part,
                              std::int64_t parts) {
  constexpr std::int64_t kBlock = 16;  // groups
  constexpr std::int64_t kShare = packed::kInt4Step / 2;
  const std::int64_t inside = group % kBlock;
  const char* from = w + (kBlock - inside) * packed::kInt4Step + inside * kShare;
  for (std::int64_t line = part; line < packed::kInt4Step / 64; line += parts) {
    constexpr std::int64_t kLines = kShare / 64;
    __builtin_prefetch(from + line / kLines * kBlock * kShare + line % kLines * 64);
  }
}

/// int4 weights: R rows of one tile.
template <int R>
SPECRT_INLINE void int4_rows(const char* panel, const CodeRows& rows, std::int64_t row,
                             std::int64_t groups, float* sums) {
  const auto* kinds = reinterpret_cast<const float*>(panel);
  const char* x = rows.line(row);
  const float* codes = rows.groups(row);
  const char* w = panel + packed::kHeader;
  F acc[R][kPanelVectors];
#pragma GCC unroll 8
  for (int i = 0; i < R * kPanelVectors; ++i) acc[i / kPanelVectors][i % kPanelVectors] = zero();
  for (std::int64_t group = 0; group < groups; ++group, w += packed::kInt4Step) {
    fetch_int4(w, group, 0, 1);
    const char* step = x + group * kLineStep;
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      // The lines of the sixteen outputs that these belong to.
      const char* lines = w + packed::kInt4Scales + v * kWidth / 16 * 256 + v * kWidth % 16 * 4;
      Nibbles high[R];
      Nibbles low[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) high[r] = low[r] = no_nibbles();
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const I both = load_pairs(lines + j * 64);
        const I first = low_nibbles(both);
        const I second = high_nibbles(both);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const char* at = step + r * kLineBytes + 4 * j;
          high[r] = nibbles_add(high[r], first, four_bytes(at));
          low[r] = nibbles_add(low[r], first, four_bytes(at + packed::kStep));
          high[r] = nibbles_add(high[r], second, four_bytes(at + 16));
          low[r] = nibbles_add(low[r], second, four_bytes(at + packed::kStep + 16));
        }
      }
      F scale, minimum;
      group_scales(kinds, w, v * kWidth, scale, minimum);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const F sum = nibbles_sum(high[r], low[r]);
        const F all = set1(codes[group * kPreparedTile + r]);
        acc[r][v] = fma(minimum, all, fma(scale, sum, acc[r][v]));
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const F scale = set1(rows.scales()[row + r]);
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      store(sums + r * kPanel + v * kWidth, mul(acc[r][v], scale));
    }
  }
}

/// Kinds of products: `most` rows at once and their sums for one panel.
template <Precision kPrecision_>
struct Int8Product {
  static constexpr Precision kPrecision = kPrecision_;
  static constexpr int kPlanes = kPrecision == Precision::int8 ? 2 : 1;
  static constexpr int kRows = kDotLines / kPlanes > 0 ? kDotLines / kPlanes : 1;
  static std::int64_t steps_of(std::int64_t k) { return packed::wide_steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) {
    return packed::kHeader + steps_of(k) * packed::kInt8Step;
  }
  template <int R>
  static SPECRT_INLINE void run(const char* panel, const CodeRows& rows, std::int64_t row,
                                std::int64_t steps, float* sums) {
    int8_rows<kPlanes, R>(panel, rows, row, steps, sums);
  }
};

struct Int4Product {
  static constexpr Precision kPrecision = Precision::int4;
  static constexpr int kPlanes = 1;
  static constexpr int kRows = kNibbleRows;
  static std::int64_t steps_of(std::int64_t k) { return packed::steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) {
    return packed::kHeader + steps_of(k) * packed::kInt4Step;
  }
  template <int R>
  static SPECRT_INLINE void run(const char* panel, const CodeRows& rows, std::int64_t row,
                                std::int64_t steps, float* sums) {
    int4_rows<R>(panel, rows, row, steps, sums);
  }
};

/// Some rows that share a tile, against one panel. Not inlined: a few shapes, large bodies.
template <typename Kind, int R>
__attribute__((noinline)) void code_rows(const char* panel, const CodeRows& rows, std::int64_t row,
                                         std::int64_t steps, float* sums) {
  Kind::template run<R>(panel, rows, row, steps, sums);
}

using CodeFunction = void (*)(const char*, const CodeRows&, std::int64_t, std::int64_t, float*);
struct CodeFunctions {
  CodeFunction of[9] = {};  ///< by rows
};
template <typename Kind, int R = Kind::kRows>
constexpr CodeFunctions code_functions() {
  CodeFunctions all;
  if constexpr (R > 1) all = code_functions<Kind, R - 1>();
  all.of[R] = code_rows<Kind, R>;
  return all;
}

template <typename Kind>
void gemm_codes(const GemmArgs& args, std::int64_t begin, std::int64_t end) {
  constexpr auto kSome = code_functions<Kind>();
  constexpr std::int64_t kRowsOfTile = kPreparedTile / Kind::kPlanes;
  static_assert(Kind::kRows <= 8);
  const std::int64_t steps = Kind::steps_of(args.k);
  const std::int64_t panel_size = Kind::panel_bytes(args.k);
  const std::int64_t unit = args.gate == Gate::none ? 1 : 2;
  const char* weight = static_cast<const char*>(args.weight);
  const CodeRows rows(args, Kind::kPrecision);
  alignas(64) float sums[2][kPreparedTile * kPanel];
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t row = 0; row < args.rows; row += kRowsOfTile) {
      const std::int64_t left = args.rows - row;
      const std::int64_t count = left < kRowsOfTile ? left : kRowsOfTile;
      for (std::int64_t p = 0; p < unit; ++p) {
        const char* panel = weight + (i * unit + p) * panel_size;
        for (std::int64_t r = 0; r < count;) {
          const std::int64_t some = count - r < Kind::kRows ? count - r : Kind::kRows;
          kSome.of[some](panel, rows, row + r, steps, sums[p] + r * kPanel);
          r += some;
        }
      }
      if (unit == 2) {
        write_gated(args, row, count, i, sums[0], sums[1]);
      } else {
        write_panel(args, row, count, i, sums[0]);
      }
    }
  }
}

constexpr void fill_codes(Kernels& table) {
  const auto set = [&](Precision precision, Prepare prepare, Gemm gemm) {
    table.prepare[static_cast<int>(precision)] = prepare;
    table.gemm[static_cast<int>(precision)] = gemm;
  };
  set(Precision::int8, prepare_codes<Precision::int8>, gemm_codes<Int8Product<Precision::int8>>);
  set(Precision::int4, prepare_codes<Precision::int4>, gemm_codes<Int4Product>);
  set(Precision::w8a8, prepare_codes<Precision::w8a8>, gemm_codes<Int8Product<Precision::w8a8>>);
}

}  // namespace
}  // namespace specrt::cpu
