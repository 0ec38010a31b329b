// int4 products on the tile unit. A group of 32 k is one tile product of whole numbers, for sixteen
// rows and outputs: x = 16 high + low meets 16 q and q, side by side along k. Its sums leave the
// tile to be scaled, since every group has scales of its own. From there on it is body_codes.h,
// operation by operation, so few rows can take that way from the start.

#include <utility>

#include "cpu/vec_avx512.h"
// After the vectors:
#include "cpu/amx_config.h"
#include "cpu/body_codes.h"

namespace specrt::cpu {
namespace {

constexpr std::int64_t kRowTile = kPreparedTile;
constexpr std::int64_t kFewRows = 6;    // that AVX-512 does as fast
constexpr int kChunk = 4;               // groups expanded at once, for all rows
constexpr std::int64_t kTilesHeld = 4;  // tiles of rows whose sums are kept meanwhile
constexpr std::int64_t kTileSums = kRowTile * kPanel;
constexpr std::int64_t kHalfBytes = 16 * 64;  // of a group, expanded, for 16 outputs

/// A few groups of a panel, as products take them.
struct Expanded {
  alignas(64) char codes[kChunk][2][kHalfBytes];  ///< 16 q and q: [2][8 quads][16][4]
  F scales[kChunk][2];
  F minima[kChunk][2];

  void fill(const char* panel, const char* group, std::int64_t count) {
    const auto* kinds = reinterpret_cast<const float*>(panel);
    for (std::int64_t g = 0; g < count; ++g, group += packed::kInt4Step) {
      for (int half = 0; half < 2; ++half) {
        const char* lines = group + packed::kInt4Scales + half * 256;
        for (int line = 0; line < 4; ++line) {
          const I both = load_pairs(lines + line * 64);
          char* to = codes[g][half] + line * 64;
          const I upper = _mm512_set1_epi8(-16);
          const I low = low_nibbles(both);
          _mm512_store_si512(to, _mm512_slli_epi16(low, 4));
          _mm512_store_si512(to + 256, _mm512_and_si512(both, upper));
          _mm512_store_si512(to + 512, low);
          _mm512_store_si512(to + 768, high_nibbles(both));
        }
        group_scales(kinds, group, half * 16, scales[g][half], minima[g][half]);
      }
    }
  }
};

// The compiler's own names for tile operations are macros that want plain numbers.
#define SPECRT_GROUP(sum, x_tile, w_tile) \
  _tile_zero(sum);                        \
  _tile_loadd(x_tile, x, kLineBytes);     \
  _tile_loadd(w_tile, w, 64);             \
  _tile_dpbsud(sum, x_tile, w_tile);      \
  _tile_stored(sum, out, 64)

/// Sums of a group, rows by outputs; neighbours in turn use other tiles.
template <int kTurn>
SPECRT_INLINE void sum_group(const char* x, const char* w, std::int32_t* out) {
  if constexpr (kTurn % 4 == 0) {
    SPECRT_GROUP(0, 4, 6);
  } else if constexpr (kTurn % 4 == 1) {
    SPECRT_GROUP(1, 5, 7);
  } else if constexpr (kTurn % 4 == 2) {
    SPECRT_GROUP(2, 4, 6);
  } else {
    SPECRT_GROUP(3, 5, 7);
  }
}

#undef SPECRT_GROUP

/// A tile of rows and a few groups of a panel, whose two halves take turns: first one, then the
/// other.
struct Turns {
  const char* x;       ///< the first group's
  const float* codes;  ///< sums of x, [groups][16]
  const Expanded& w;
  const char* stored;  ///< the groups as they lie: what follows is asked for meanwhile
  std::int64_t first;
  std::int64_t tile;  ///< of `tiles` that use these groups
  std::int64_t tiles;
  bool start;  ///< sums start at zero
  float* out;  ///< [16][kPanel]

  template <int kTurn>
  SPECRT_INLINE void sum(std::int32_t* sums) const {
    constexpr int kGroup = kTurn % kChunk;
    sum_group<kTurn>(x + kGroup * kLineStep, w.codes[kGroup][kTurn / kChunk], sums);
  }

  SPECRT_INLINE void open(int side, F (&acc)[kRowTile]) const {
#pragma GCC unroll 16
    for (int r = 0; r < kRowTile; ++r) acc[r] = start ? zero() : load(out + r * kPanel + side * 16);
  }
  SPECRT_INLINE void close(int side, const F (&acc)[kRowTile]) const {
#pragma GCC unroll 16
    for (int r = 0; r < kRowTile; ++r) store(out + r * kPanel + side * 16, acc[r]);
  }
  SPECRT_INLINE void scale(int side, std::int64_t g, const std::int32_t* sums,
                           F (&acc)[kRowTile]) const {
    const F scale = w.scales[g][side];
    const F minimum = w.minima[g][side];
#pragma GCC unroll 16
    for (int r = 0; r < kRowTile; ++r) {
      const F sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + r * 16));
      acc[r] = fma(minimum, set1(codes[g * kPreparedTile + r]), fma(scale, sum, acc[r]));
    }
  }

  // Sums that a tile has stored can be loaded only some time later: three turns lie between.
  template <int kTurn>
  SPECRT_INLINE void step(std::int32_t (&sums)[4][kRowTile * 16], F (&acc)[kRowTile]) const {
    constexpr int kLater = kTurn + 3;
    if constexpr (kLater < 2 * kChunk) sum<kLater>(sums[kLater % 4]);
    if constexpr (kTurn >= 0) {
      constexpr int kSide = kTurn / kChunk;
      constexpr int kGroup = kTurn % kChunk;
      if constexpr (kGroup == 0) open(kSide, acc);
      fetch_int4(stored + kGroup * packed::kInt4Step, first + kGroup, 2 * tile + kSide, 2 * tiles);
      scale(kSide, kGroup, sums[kTurn % 4], acc);
      if constexpr (kGroup == kChunk - 1) close(kSide, acc);
    }
  }
};

/// One tile of rows, `count` groups from `first` on.
inline void multiply(const Expanded& w, const CodeRows& rows, std::int64_t row, std::int64_t first,
                     std::int64_t count, const char* stored, std::int64_t tile, std::int64_t tiles,
                     float* out) {
  const Turns turns = {rows.line(row) + first * kLineStep,
                       rows.groups(row) + first * kPreparedTile,
                       w,
                       stored,
                       first,
                       tile,
                       tiles,
                       first == 0,
                       out};
  alignas(64) std::int32_t sums[4][kRowTile * 16];
  F acc[kRowTile];
  if (count == kChunk) {
    [&]<int... kTurns>(std::integer_sequence<int, kTurns...>) __attribute__((always_inline)) {
      (turns.step<kTurns - 3>(sums, acc), ...);
    }(std::make_integer_sequence<int, 2 * kChunk + 3>());
    return;
  }
  for (int side = 0; side < 2; ++side) {
    turns.open(side, acc);
    for (std::int64_t g = 0; g < count; ++g) {
      sum_group<0>(turns.x + g * kLineStep, w.codes[g][side], sums[0]);
      turns.scale(side, g, sums[0], acc);
    }
    turns.close(side, acc);
  }
}

/// Panels [begin, end), up to kTilesHeld tiles of rows from `row` on.
void gemm_tiles(const GemmArgs& args, std::int64_t row, std::int64_t tiles, std::int64_t begin,
                std::int64_t end) {
  const std::int64_t groups = packed::steps_of(args.k);
  const std::int64_t panel_bytes = Int4Product::panel_bytes(args.k);
  const std::int64_t unit = args.gate == Gate::none ? 1 : 2;
  const CodeRows rows(args, Precision::int4);
  Expanded expanded;
  alignas(64) float sums[2][kTilesHeld * kTileSums];
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t p = 0; p < unit; ++p) {
      const char* panel = static_cast<const char*>(args.weight) + (i * unit + p) * panel_bytes;
      for (std::int64_t first = 0; first < groups; first += kChunk) {
        const std::int64_t count = groups - first < kChunk ? groups - first : kChunk;
        const char* group = panel + packed::kHeader + first * packed::kInt4Step;
        expanded.fill(panel, group, count);
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
          multiply(expanded, rows, row + tile * kRowTile, first, count, group, tile, tiles,
                   sums[p] + tile * kTileSums);
        }
      }
      for (std::int64_t r = 0; r < tiles * kRowTile && row + r < args.rows; ++r) {
        const F scale = set1(rows.scales()[row + r]);
        for (int v = 0; v < 2; ++v) {
          float* at = sums[p] + r * kPanel + v * 16;
          store(at, mul(load(at), scale));
        }
      }
    }
    const std::int64_t left = args.rows - row;
    const std::int64_t count = left < tiles * kRowTile ? left : tiles * kRowTile;
    if (unit == 2) {
      write_gated(args, row, count, i, sums[0], sums[1]);
    } else {
      write_panel(args, row, count, i, sums[0]);
    }
  }
}

void gemm_int4(const GemmArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.rows <= kFewRows) {
    gemm_codes<Int4Product>(args, begin, end);
    return;
  }
  configure(args.rows < kRowTile ? args.rows : kRowTile);
  const std::int64_t row_tiles = (args.rows + kRowTile - 1) / kRowTile;
  for (std::int64_t tile = 0; tile < row_tiles; tile += kTilesHeld) {
    const std::int64_t tiles = row_tiles - tile < kTilesHeld ? row_tiles - tile : kTilesHeld;
    gemm_tiles(args, tile * kRowTile, tiles, begin, end);
  }
  _tile_release();
}

}  // namespace

void fill_amx_int4(Kernels& table) { table.gemm[static_cast<int>(Precision::int4)] = gemm_int4; }

}  // namespace specrt::cpu
