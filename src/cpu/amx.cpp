// Products on the tile unit (AMX). Attention: amx_attention.cpp. Everything else is AVX-512's.
//
// A step is one A tile of up to 16 rows of x and, for each panel, two B tiles of 16 outputs: 32 of
// k in bf16, 64 in int8. bf16 and w8a8 weights lie in the order that the unit reads; int8 and int4
// are expanded to bf16 first, a few steps at a time, once for all rows. Every output is one
// accumulator over the steps in order, so rows, panels, splits and chunks change no bit.

#include "cpu/vec_avx512.h"
// After the vectors:
#include "cpu/amx_config.h"
#include "cpu/body_write.h"

namespace specrt::cpu {
namespace {

constexpr std::int64_t kRowTile = 16;
constexpr std::int64_t kPairBytes = kPanel * 4;       // a line of a step: a pair or quad of k
constexpr std::int64_t kStepBytes = 16 * kPairBytes;  // a step of a panel
constexpr std::int64_t kXStepBytes = kRowTile * 64;   // a step of a tile of rows
constexpr std::int64_t kBlockSteps = 16;  // steps of a block that is fetched before its use
constexpr std::int64_t kChunk = 8;        // steps that all rows use while they are near
constexpr std::int64_t kExpandChunk = 2;  // steps expanded at once
constexpr std::int64_t kTilesHeld = 8;    // tiles of rows whose sums are kept meanwhile
constexpr std::int64_t kSumsStride = kPanel * 4;
constexpr std::int64_t kTileSums = kRowTile * kPanel;  // sums of a tile of rows of a panel

/// Tiles 0-3 accumulate, 4-5 hold rows of x, 6-7 weights.
void configure(std::int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.columns[tile] = 64;
    config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : kRowTile);
  }
  _tile_loadconfig(&config);
}

/// Rows of x as the A tiles read them: bf16, [row tiles][steps][16][32], zeros beyond the end.
void prepare(const float* x, std::int64_t rows, std::int64_t x_stride, std::int64_t k,
             std::int64_t row_begin, std::int64_t row_end, void* out) {
  const std::int64_t steps = (k + 31) / 32;
  auto* base = static_cast<std::uint16_t*>(out);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    std::uint16_t* to = base + (row / kRowTile * steps * kRowTile + row % kRowTile) * 32;
    for (std::int64_t step = 0; step < steps; ++step, to += kRowTile * 32) {
      F low = zero();
      F high = zero();
      if (row < rows) {
        const float* from = x + row * x_stride + step * 32;
        const std::int64_t left = k - step * 32;
        const auto mask = [](std::int64_t lanes) {
          return static_cast<__mmask16>(lanes >= 16 ? 0xFFFF : lanes <= 0 ? 0 : (1 << lanes) - 1);
        };
        low = _mm512_maskz_loadu_ps(mask(left), from);
        high = _mm512_maskz_loadu_ps(mask(left - 16), from + 16);
      }
      _mm512_storeu_si512(to, reinterpret_cast<I>(_mm512_cvtne2ps_pbh(high, low)));
    }
  }
}

inline void store_pairs(char* to, F high, F low) {
  _mm512_store_si512(to, reinterpret_cast<I>(_mm512_cvtne2ps_pbh(high, low)));
}

/// Asks for a step's share of the block behind the one whose step-th step lies at `w`: in several
/// places at once, since one sequential stream gets two thirds of what memory gives.
template <std::int64_t kBytes, std::int64_t kStreams>
SPECRT_INLINE void fetch_ahead(const char* w, std::int64_t step) {
  constexpr std::int64_t kShare = kBytes / kStreams;
  static_assert(kShare % 64 == 0);
  const std::int64_t inside = step % kBlockSteps;
  const char* from = w + (kBlockSteps - inside) * kBytes + inside * kShare;
  for (std::int64_t stream = 0; stream < kStreams; ++stream) {
    for (std::int64_t line = 0; line < kShare; line += 64) {
      _mm_prefetch(from + stream * kBlockSteps * kShare + line, _MM_HINT_T0);
    }
  }
}

// Kinds of weights. `steps_of(k)` counts their steps; `chunk` gives steps [first, first + count) of
// a panel as the tiles read them, in place or in `room`.

struct Bf16 {
  static constexpr bool kInteger = false;
  static constexpr bool kExpands = false;
  static std::int64_t steps_of(std::int64_t k) { return packed::steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) { return (k + 1) / 2 * kPairBytes; }
  /// Steps whose 32 of k all exist.
  static std::int64_t whole_steps(std::int64_t k) { return k / 32; }
  static const char* chunk(const char* panel, std::int64_t k, std::int64_t first, std::int64_t,
                           char* room) {
    const char* from = panel + first * kStepBytes;
    if (first < whole_steps(k)) return from;
    // The last step, filled up with zeros.
    const std::int64_t real = (k + 1) / 2 * kPairBytes - first * kStepBytes;
    for (std::int64_t i = 0; i < kStepBytes; i += 64) {
      _mm512_store_si512(room + i, i < real ? _mm512_loadu_si512(from + i) : I{});
    }
    return room;
  }
};

struct W8a8 {
  static constexpr bool kInteger = true;
  static constexpr bool kExpands = false;
  static std::int64_t steps_of(std::int64_t k) { return packed::w8a8_steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) {
    return packed::kHeader + steps_of(k) * kStepBytes;
  }
  static std::int64_t whole_steps(std::int64_t k) { return steps_of(k); }
  static const char* chunk(const char* panel, std::int64_t, std::int64_t first, std::int64_t,
                           char*) {
    return panel + packed::kHeader + first * kStepBytes;
  }
};

struct Int8 {
  static constexpr bool kInteger = false;
  static constexpr bool kExpands = true;
  static constexpr std::int64_t kStored = packed::kInt8Step;
  static std::int64_t steps_of(std::int64_t k) { return packed::steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) {
    return packed::kHeader + steps_of(k) * kStored;
  }
  static std::int64_t whole_steps(std::int64_t k) { return steps_of(k); }
  static const char* chunk(const char* panel, std::int64_t, std::int64_t first, std::int64_t count,
                           char* room) {
    const auto* scales = reinterpret_cast<const float*>(panel);
    const char* from = panel + packed::kHeader + first * kStored;
    const F s0 = load_twice(scales), s1 = load_twice(scales + 8);
    const F s2 = load_twice(scales + 16), s3 = load_twice(scales + 24);
    char* to = room;
    for (std::int64_t step = 0; step < count; ++step) {
      fetch_ahead<kStored, 4>(from, first + step);
      for (int pair = 0; pair < 16; ++pair, from += 64, to += kPairBytes) {
        const auto* codes = reinterpret_cast<const std::int8_t*>(from);
        store_pairs(to, mul(load_i8(codes + 16), s1), mul(load_i8(codes), s0));
        store_pairs(to + 64, mul(load_i8(codes + 48), s3), mul(load_i8(codes + 32), s2));
      }
    }
    return room;
  }
};

struct Int4 {
  static constexpr bool kInteger = false;
  static constexpr bool kExpands = true;
  static constexpr std::int64_t kStored = packed::kInt4Step;
  static std::int64_t steps_of(std::int64_t k) { return packed::steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) {
    return packed::kHeader + steps_of(k) * kStored;
  }
  static std::int64_t whole_steps(std::int64_t k) { return steps_of(k); }

  /// Scale and minimum of the eight outputs from 8 * group on, each for two lanes.
  static SPECRT_INLINE void scales_of(const float* kinds, const char* step, int group, F& scale,
                                      F& minimum) {
    const auto eight = [&](const char* at) {
      const I twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
      return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(x));
    };
    scale = eight(step + group * 16);
    const F kind = load_twice(kinds + group * 8);
    minimum = mul(eight(step + kPanel * 2 + group * 16), fma(kind, scale, sub(set1(1.0f), kind)));
  }

  static const char* chunk(const char* panel, std::int64_t, std::int64_t first, std::int64_t count,
                           char* room) {
    const auto* kinds = reinterpret_cast<const float*>(panel);
    const char* from = panel + packed::kHeader + first * kStored;
    char* to = room;
    for (std::int64_t step = 0; step < count; ++step, from += kStored, to += kStepBytes) {
      fetch_ahead<kStored, 2>(from, first + step);
      for (int tile = 0; tile < 2; ++tile) {
        F s0, s1, m0, m1;
        scales_of(kinds, from, 2 * tile, s0, m0);
        scales_of(kinds, from, 2 * tile + 1, s1, m1);
        for (int half = 0; half < 2; ++half) {
          const char* lines = from + packed::kInt4Scales + (4 * tile + half) * 64;
          const I w0 = load_pairs(lines);
          const I w1 = load_pairs(lines + 128);
          char* out = to + half * 8 * kPairBytes + tile * 64;
#pragma GCC unroll 8
          for (int pair = 0; pair < 8; ++pair) {
            store_pairs(out + pair * kPairBytes, fma(nibble(w1, 4 * pair), s1, m1),
                        fma(nibble(w0, 4 * pair), s0, m0));
          }
        }
      }
    }
    return room;
  }
};

// The compiler's own names for tile operations are macros that want plain numbers.
#define SPECRT_MULTIPLY(to, x, w) \
  do {                            \
    if constexpr (kInteger) {     \
      _tile_dpbssd(to, x, w);     \
    } else {                      \
      _tile_dpbf16ps(to, x, w);   \
    }                             \
  } while (false)

SPECRT_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// One tile of rows against two panels: accumulators 0 and 1 of the first, 2 and 3 of the second.
template <bool kInteger, bool kAheadOfUse>
inline void two_panels(const char* x, const char* w0, const char* w1, std::int64_t steps) {
  for (std::int64_t step = 0; step < steps; ++step) {
    if constexpr (kAheadOfUse) {
      fetch_ahead<kStepBytes, 4>(w0, step);
      fetch_ahead<kStepBytes, 4>(w1, step);
    }
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w0, kPairBytes);
    _tile_loadd(7, w0 + 64, kPairBytes);
    SPECRT_MULTIPLY(0, 4, 6);
    SPECRT_MULTIPLY(1, 4, 7);
    _tile_loadd(6, w1, kPairBytes);
    _tile_loadd(7, w1 + 64, kPairBytes);
    SPECRT_MULTIPLY(2, 4, 6);
    SPECRT_MULTIPLY(3, 4, 7);
    x += kXStepBytes;
    w0 += kStepBytes;
    w1 += kStepBytes;
  }
}

// Two tiles of rows against one panel: accumulators 0 and 1 of the first rows, 2 and 3 of the
// second.
template <bool kInteger>
inline void two_row_tiles(const char* x0, const char* x1, const char* w, std::int64_t steps,
                          bool ahead) {
  for (std::int64_t step = 0; step < steps; ++step) {
    if (ahead) fetch_ahead<kStepBytes, 4>(w, step);
    _tile_loadd(6, w, kPairBytes);
    _tile_loadd(7, w + 64, kPairBytes);
    _tile_loadd(4, x0, 64);
    SPECRT_MULTIPLY(0, 4, 6);
    SPECRT_MULTIPLY(1, 4, 7);
    _tile_loadd(5, x1, 64);
    SPECRT_MULTIPLY(2, 5, 6);
    SPECRT_MULTIPLY(3, 5, 7);
    x0 += kXStepBytes;
    x1 += kXStepBytes;
    w += kStepBytes;
  }
}

/// Whole numbers of one tile of rows to what they stand for.
inline void scale_sums(const float* output_scales, const float* row_scales, std::int64_t rows,
                       float* sums) {
  const F low = load(output_scales), high = load(output_scales + 16);
  for (std::int64_t r = 0; r < rows; ++r, sums += kPanel) {
    const F row = set1(row_scales[r]);
    const F a = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
    const F b = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 16));
    store(sums, mul(mul(a, low), row));
    store(sums + 16, mul(mul(b, high), row));
  }
}

/// One call's share of a product: panels [begin, end), and up to kTilesHeld tiles of rows.
template <typename W>
struct Product {
  Product(const GemmArgs& all, std::int64_t first_tile, std::int64_t count)
      : args(all),
        row(first_tile * kRowTile),
        tiles(count),
        steps(W::steps_of(all.k)),
        panel_bytes(W::panel_bytes(all.k)),
        x_tile_bytes(steps * kXStepBytes),
        x(static_cast<const char*>(all.prepared) + first_tile * x_tile_bytes),
        weight(static_cast<const char*>(all.weight)) {}

  const GemmArgs& args;
  std::int64_t row;  // the first
  std::int64_t tiles;
  std::int64_t steps;
  std::int64_t panel_bytes;
  std::int64_t x_tile_bytes;
  const char* x;
  const char* weight;
  alignas(64) char room[2][kExpandChunk * kStepBytes];
  alignas(64) float sums[2][kTilesHeld * kTileSums];

  std::int64_t rows_of(std::int64_t tile) const {
    const std::int64_t left = args.rows - row - tile * kRowTile;
    return left < kRowTile ? left : kRowTile;
  }

  /// Calls body(first, count) over the steps: few at a time where they are expanded or used by
  /// many rows, and always the padded last one of bf16 alone.
  template <typename Body>
  SPECRT_INLINE void for_chunks(std::int64_t chunk, const Body& body) const {
    const std::int64_t whole = W::whole_steps(args.k);
    for (std::int64_t first = 0; first < whole; first += chunk) {
      body(first, whole - first < chunk ? whole - first : chunk);
    }
    if (whole < steps) body(whole, steps - whole);
  }

  /// One tile of rows, panels `panel` and `second`.
  void small(std::int64_t panel, std::int64_t second) {
    const char* first_panel = weight + panel * panel_bytes;
    const char* second_panel = weight + second * panel_bytes;
    clear_sums();
    for_chunks(W::kExpands ? kExpandChunk : steps, [&](std::int64_t first, std::int64_t count) {
      const char* w0 = W::chunk(first_panel, args.k, first, count, room[0]);
      const char* w1 = W::chunk(second_panel, args.k, first, count, room[1]);
      two_panels<W::kInteger, !W::kExpands>(x + first * kXStepBytes, w0, w1, count);
    });
    _tile_stored(0, sums[0], kSumsStride);
    _tile_stored(1, sums[0] + 16, kSumsStride);
    _tile_stored(2, sums[1], kSumsStride);
    _tile_stored(3, sums[1] + 16, kSumsStride);
  }

  /// All tiles of rows, one panel.
  void large(std::int64_t panel, float* out) {
    const char* at = weight + panel * panel_bytes;
    const bool keep = tiles <= 2;  // in the accumulators
    const std::int64_t chunk = W::kExpands ? kExpandChunk : keep ? steps : kChunk;
    for_chunks(chunk, [&](std::int64_t first, std::int64_t count) {
      const char* w = W::chunk(at, args.k, first, count, room[0]);
      for (std::int64_t tile = 0; tile < tiles; tile += 2) {
        const std::int64_t other = tile + 1 < tiles ? tile + 1 : tile;
        float* sums0 = out + tile * kTileSums;
        float* sums1 = out + (tile + 1) * kTileSums;  // beyond the last where that is alone: unread
        if (first == 0) {
          clear_sums();
        } else if (!keep) {
          _tile_loadd(0, sums0, kSumsStride);
          _tile_loadd(1, sums0 + 16, kSumsStride);
          _tile_loadd(2, sums1, kSumsStride);
          _tile_loadd(3, sums1 + 16, kSumsStride);
        }
        two_row_tiles<W::kInteger>(x + tile * x_tile_bytes + first * kXStepBytes,
                                   x + other * x_tile_bytes + first * kXStepBytes, w, count,
                                   !W::kExpands && tile == 0);
        if (keep && first + count < steps) continue;
        _tile_stored(0, sums0, kSumsStride);
        _tile_stored(1, sums0 + 16, kSumsStride);
        _tile_stored(2, sums1, kSumsStride);
        _tile_stored(3, sums1 + 16, kSumsStride);
      }
    });
  }

  void finish(std::int64_t panel, std::int64_t panels) {
    const auto* row_scales = reinterpret_cast<const float*>(
        static_cast<const char*>(args.prepared) + prepared_scales(args.rows, args.k));
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t first = row + tile * kRowTile;
      const std::int64_t rows = rows_of(tile);
      float* at[2] = {sums[0] + tile * kTileSums, sums[1] + tile * kTileSums};
      if constexpr (W::kInteger) {
        for (std::int64_t p = 0; p < panels; ++p) {
          scale_sums(reinterpret_cast<const float*>(weight + (panel + p) * panel_bytes),
                     row_scales + first, rows, at[p]);
        }
      }
      if (args.gate != Gate::none) {
        write_gated(args, first, rows, panel / 2, at[0], at[1]);
        continue;
      }
      for (std::int64_t p = 0; p < panels; ++p) write_panel(args, first, rows, panel + p, at[p]);
    }
  }

  void run(std::int64_t begin, std::int64_t end) {
    for (std::int64_t panel = begin; panel < end; panel += 2) {
      const std::int64_t panels = panel + 1 < end ? 2 : 1;
      if (tiles == 1) {
        // An odd last panel is done twice over, which costs less than another body.
        small(panel, panel + panels - 1);
      } else {
        for (std::int64_t p = 0; p < panels; ++p) large(panel + p, sums[p]);
      }
      finish(panel, panels);
    }
  }
};

template <typename W>
void gemm(const GemmArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.rows <= 0 || begin >= end) return;
  const std::int64_t unit = args.gate == Gate::none ? 1 : 2;
  const std::int64_t row_tiles = (args.rows + kRowTile - 1) / kRowTile;
  configure(args.rows < kRowTile ? args.rows : kRowTile);
  for (std::int64_t tile = 0; tile < row_tiles; tile += kTilesHeld) {
    const std::int64_t tiles = row_tiles - tile < kTilesHeld ? row_tiles - tile : kTilesHeld;
    Product<W>(args, tile, tiles).run(begin * unit, end * unit);
  }
  _tile_release();
}

}  // namespace

void fill_amx_attention(Kernels& table);

void fill_amx(Kernels& table) {
  fill_amx_attention(table);
  table.name = "amx";
  table.prepare_bf16 = prepare;
  table.gemm[static_cast<int>(Precision::bf16)] = gemm<Bf16>;
  table.gemm[static_cast<int>(Precision::int8)] = gemm<Int8>;
  table.gemm[static_cast<int>(Precision::int4)] = gemm<Int4>;
  table.gemm[static_cast<int>(Precision::w8a8)] = gemm<W8a8>;
}

bool has_amx_unit() { return true; }

}  // namespace specrt::cpu
