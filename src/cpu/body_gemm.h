#pragma once

// y (+)= x W^T + bias over packed panels. One accumulator per output runs over k in order, so how
// many rows, panels or k a tile covers changes no bit. Include after a vec_*.h.

#include "cpu/body_write.h"
#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

// Blocks of weights this long are used by every row while they are near, and the next one is asked
// for meanwhile, in several places at once: one sequential stream gets half of what memory gives.
constexpr std::int64_t kWeightBlock = 32 * 1024;
constexpr int kStreams = 4;
// Rows whose partial sums are held at once; weights stream from memory once per so many rows.
constexpr std::int64_t kRowsHeld = 96;
// One step of a panel, a k of floats or a pair of k of bf16, is as long for both formats.
constexpr std::int64_t kStepBytes = kPanel * 4;
constexpr std::int64_t kBlockSteps = kWeightBlock / kStepBytes;

struct FloatWeight {
  static constexpr std::int64_t kPerStep = 1;
};
struct PairWeight {
  static constexpr std::int64_t kPerStep = 2;
};

/// Part of a product: `steps` steps of a weight and the matching columns of some rows of x.
struct Tile {
  const char* x;
  std::int64_t x_stride;  ///< bytes
  const char* w;
  std::int64_t w_stride;  ///< bytes between panels
  std::int64_t steps;
  bool half;    ///< the last step has one k, not two
  bool first;   ///< sums start at zero
  float* sums;  ///< [panels][sums_rows][kPanel]
  std::int64_t sums_rows;
  const char* next;        ///< where prefetching starts
  std::int64_t next_step;  ///< bytes per step
  std::int64_t apart;      ///< bytes between the streams that prefetching follows at once
};

/// sums[p][r] += w[p] * x[r] for one k: its weights are w[p * V + v].
template <int R, int PV>
SPECRT_INLINE void multiply_add(F (&sums)[R][PV], const F (&w)[PV], const char* x,
                                std::int64_t x_stride) {
  // Rows in fours, so that few addresses are live.
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const char* four = x + (r / 4) * 4 * x_stride;
    const F value = set1(*reinterpret_cast<const float*>(four + (r % 4) * x_stride));
#pragma GCC unroll 16
    for (int i = 0; i < PV; ++i) sums[r][i] = fma(value, w[i], sums[r][i]);
  }
}

template <typename Weight, int R, int P, int V>
SPECRT_INLINE void run_tile(const Tile& t, int column) {
  F sums[R][P * V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < P * V; ++i) {
      const float* from = t.sums + (i / V * t.sums_rows + r) * kPanel + (column + i % V) * kWidth;
      sums[r][i] = t.first ? zero() : load(from);
    }
  }

  const char* x = t.x;
  const char* w = t.w + column * kWidth * 4;
  const std::int64_t x_stride = t.x_stride;
  const std::int64_t w_stride = t.w_stride;
  const char* next = t.next;
  const std::int64_t next_step = t.next_step;
  const std::int64_t apart = t.apart;
  const std::int64_t whole = t.steps - (t.half ? 1 : 0);
  for (std::int64_t step = 0; step < whole; ++step) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
      for (int i = 0; i < kStreams; ++i) __builtin_prefetch(next + p * w_stride + i * apart);
    }
    next += next_step;
    if constexpr (Weight::kPerStep == 1) {
      F k0[P * V];
#pragma GCC unroll 16
      for (int i = 0; i < P * V; ++i) {
        k0[i] = load(reinterpret_cast<const float*>(w + i / V * w_stride + i % V * kWidth * 4));
      }
      multiply_add<R, P * V>(sums, k0, x, x_stride);
    } else {
      I pairs[P * V];
      F k[P * V];
#pragma GCC unroll 16
      for (int i = 0; i < P * V; ++i) {
        pairs[i] = load_pairs(w + i / V * w_stride + i % V * kWidth * 4);
        k[i] = pair_first(pairs[i]);
      }
      multiply_add<R, P * V>(sums, k, x, x_stride);
#pragma GCC unroll 16
      for (int i = 0; i < P * V; ++i) k[i] = pair_second(pairs[i]);
      multiply_add<R, P * V>(sums, k, x + 4, x_stride);
    }
    w += kStepBytes;
    x += Weight::kPerStep * 4;
  }
  if (t.half) {
    F k[P * V];
#pragma GCC unroll 16
    for (int i = 0; i < P * V; ++i) {
      k[i] = pair_first(load_pairs(w + i / V * w_stride + i % V * kWidth * 4));
    }
    multiply_add<R, P * V>(sums, k, x, x_stride);
  }

#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < P * V; ++i) {
      store(t.sums + (i / V * t.sums_rows + r) * kPanel + (column + i % V) * kWidth, sums[r][i]);
    }
  }
}

template <typename Weight, int R, int P>
void tile(const Tile& t) {
  constexpr int vectors = tile_vectors(R);
  constexpr int columns = static_cast<int>(kPanel) / kWidth;
  if constexpr (vectors == columns) {
    run_tile<Weight, R, P, vectors>(t, 0);
  } else {
    static_assert(P == 1);
    Tile part = t;
    part.next_step = t.next_step * vectors / columns;
    for (int column = 0; column < columns; column += vectors) {
      run_tile<Weight, R, 1, vectors>(part, column);
      part.next += t.steps * part.next_step;
    }
  }
}

template <typename Weight>
struct TileOf {
  using Function = void (*)(const Tile&);
  template <int R>
  static constexpr Function one() {
    if constexpr (R <= kTileRows) return tile<Weight, R, 1>;
    return nullptr;
  }
  template <int R>
  static constexpr Function many() {
    if constexpr (R <= kTileRows) return tile<Weight, R, tile_panels(R)>;
    return nullptr;
  }
  static constexpr Function kOne[13] = {nullptr,   one<1>(),  one<2>(), one<3>(), one<4>(),
                                        one<5>(),  one<6>(),  one<7>(), one<8>(), one<9>(),
                                        one<10>(), one<11>(), one<12>()};
  static constexpr Function kMany[13] = {nullptr,    many<1>(),  many<2>(), many<3>(), many<4>(),
                                         many<5>(),  many<6>(),  many<7>(), many<8>(), many<9>(),
                                         many<10>(), many<11>(), many<12>()};
};

/// Blocks of weights outside, tiles of rows inside; each tile asks for its share of the block that
/// follows.
template <typename Weight>
SPECRT_INLINE void gemm_rows(const GemmArgs& args, std::int64_t row, std::int64_t rows,
                             std::int64_t begin, std::int64_t end) {
  const std::int64_t steps = (args.k + Weight::kPerStep - 1) / Weight::kPerStep;
  const bool half = args.k % Weight::kPerStep != 0;
  const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const std::int64_t panel_size = steps * kStepBytes;
  const std::int64_t unit = args.gate == Gate::none ? 1 : 2;  // panels that finish together
  const std::int64_t last = end * unit;
  const char* weight = static_cast<const char*>(args.weight);
  alignas(64) float sums[2 * kRowsHeld * kPanel];
  Tile t = {};
  t.x_stride = args.x_stride * 4;
  t.sums_rows = rows;
  t.next_step = kStepBytes / kStreams / tiles;
  for (std::int64_t panel = begin * unit; panel < last;) {
    std::int64_t side = tiles == 1 ? tile_panels(static_cast<int>(rows)) : 1;
    if (panel + side > last) side = 1;
    const std::int64_t together = side > unit ? side : unit;
    const auto& tile_of = side == 1 ? TileOf<Weight>::kOne : TileOf<Weight>::kMany;
    for (std::int64_t p = 0; p < together; p += side) {
      const char* at = weight + (panel + p) * panel_size;
      for (std::int64_t step = 0; step < steps; step += kBlockSteps) {
        t.steps = steps - step < kBlockSteps ? steps - step : kBlockSteps;
        t.half = half && step + t.steps == steps;
        t.first = step == 0;
        t.apart = t.steps * kStepBytes / kStreams;
        t.w = at + step * kStepBytes;
        t.w_stride = panel_size;
        // Prefetching follows with what comes next.
        t.next = step + t.steps < steps ? t.w + t.steps * kStepBytes : at + side * panel_size;
        for (std::int64_t i = 0, r = 0; i < tiles; ++i) {
          const std::int64_t end_row = rows * (i + 1) / tiles;
          t.x = reinterpret_cast<const char*>(args.x + (row + r) * args.x_stride +
                                              step * Weight::kPerStep);
          t.sums = sums + (p * rows + r) * kPanel;
          tile_of[end_row - r](t);
          t.next += t.steps * t.next_step;
          r = end_row;
        }
      }
    }
    if (unit == 2) {
      write_gated(args, row, rows, panel / 2, sums, sums + rows * kPanel);
    } else {
      for (std::int64_t p = 0; p < together; ++p) {
        write_panel(args, row, rows, panel + p, sums + p * rows * kPanel);
      }
    }
    panel += together;
  }
}

template <typename Weight>
void gemm(const GemmArgs& args, std::int64_t panel_begin, std::int64_t panel_end) {
  for (std::int64_t row = 0; row < args.rows; row += kRowsHeld) {
    const std::int64_t rows = args.rows - row < kRowsHeld ? args.rows - row : kRowsHeld;
    gemm_rows<Weight>(args, row, rows, panel_begin, panel_end);
  }
}

}  // namespace
}  // namespace specrt::cpu
