// Products on the tile unit (AMX) of weights in the order that it reads: bf16, int8, w8a8. int4:
// amx_int4.cpp; attention: amx_attention.cpp. Everything else is AVX-512's.
//
// A step is one A tile of up to 16 lines of x (rows of bf16, or a row's planes of int8) and, for
// each panel, two B tiles of 16 outputs: 32 of k in bf16, 64 in int8. Every output is one
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
constexpr std::int64_t kBlockSteps = 32;  // steps of a block that is fetched before its use
constexpr std::int64_t kChunk = 32;       // steps that all rows use while they are near
constexpr std::int64_t kTilesHeld = 8;    // tiles of rows whose sums are kept meanwhile
constexpr std::int64_t kSumsStride = kPanel * 4;
constexpr std::int64_t kTileSums = kRowTile * kPanel;  // sums of a tile of rows of a panel

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

/// Lines of 64 bytes of a step's share of the block behind it, in each of four places: one
/// sequential stream gets two thirds of what memory gives. Those who use a step several times ask
/// for a part of them each time: what is asked for in a burst waits for the core's few slots, and
/// all else with it.
struct Ahead {
  static constexpr std::int64_t kStreams = 4;
  static constexpr std::int64_t kShare = kStepBytes / kStreams;
  std::int64_t begin = 0;
  std::int64_t end = kShare / 64;

  static Ahead part(std::int64_t index, std::int64_t parts) {
    return {kShare / 64 * index / parts, kShare / 64 * (index + 1) / parts};
  }
  /// `w` is where the step-th step lies.
  SPECRT_INLINE void fetch(const char* w, std::int64_t step) const {
    const std::int64_t inside = step % kBlockSteps;
    const char* from = w + (kBlockSteps - inside) * kStepBytes + inside * kShare;
    for (std::int64_t line = begin; line < end; ++line) {
      for (std::int64_t stream = 0; stream < kStreams; ++stream) {
        _mm_prefetch(from + stream * kBlockSteps * kShare + line * 64, _MM_HINT_T0);
      }
    }
  }
};

// Kinds of weights. `steps_of(k)` counts their steps; `chunk` gives steps [first, ...) of a panel
// as the tiles read them, in place or in `room`; `kPlanes` lines of x make a row.

struct Bf16 {
  static constexpr bool kInteger = false;
  static constexpr Precision kPrecision = Precision::bf16;
  static constexpr std::int64_t kPlanes = 1;
  static std::int64_t steps_of(std::int64_t k) { return packed::steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) { return (k + 1) / 2 * kPairBytes; }
  /// Steps whose 32 of k all exist.
  static std::int64_t whole_steps(std::int64_t k) { return k / 32; }
  static const char* chunk(const char* panel, std::int64_t k, std::int64_t first, char* room) {
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

template <Precision kOfX>
struct Int8 {
  static constexpr bool kInteger = true;
  static constexpr Precision kPrecision = kOfX;
  static constexpr std::int64_t kPlanes = kOfX == Precision::int8 ? 2 : 1;
  static std::int64_t steps_of(std::int64_t k) { return packed::wide_steps_of(k); }
  static std::int64_t panel_bytes(std::int64_t k) {
    return packed::kHeader + steps_of(k) * kStepBytes;
  }
  static std::int64_t whole_steps(std::int64_t k) { return steps_of(k); }
  static const char* chunk(const char* panel, std::int64_t, std::int64_t first, char*) {
    return panel + packed::kHeader + first * kStepBytes;
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
template <bool kInteger>
inline void two_panels(const char* x, const char* w0, const char* w1, std::int64_t steps) {
  for (std::int64_t step = 0; step < steps; ++step) {
    Ahead().fetch(w0, step);
    Ahead().fetch(w1, step);
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
                          const Ahead& ahead) {
  for (std::int64_t step = 0; step < steps; ++step) {
    ahead.fetch(w, step);
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

/// Whole numbers of one tile of lines to what its rows stand for, in the rows' places.
template <std::int64_t kPlanes>
inline void scale_sums(const float* output_scales, const float* row_scales, std::int64_t rows,
                       float* sums) {
  const F scales[2] = {load(output_scales), load(output_scales + 16)};
  for (std::int64_t r = 0; r < rows; ++r) {
    const F row = set1(row_scales[r]);
    const float* line = sums + r * kPlanes * kPanel;
    for (int v = 0; v < 2; ++v) {
      F sum = _mm512_cvtepi32_ps(_mm512_load_si512(line + v * 16));
      if constexpr (kPlanes == 2) {
        const F low = _mm512_cvtepi32_ps(_mm512_load_si512(line + kPanel + v * 16));
        sum = fma(sum, set1(256.0f), low);
      }
      store(sums + r * kPanel + v * 16, mul(mul(sum, scales[v]), row));
    }
  }
}

/// One call's share of a product: panels [begin, end), and up to kTilesHeld tiles of rows.
template <typename W>
struct Product {
  static constexpr std::int64_t kTileRows = kRowTile / W::kPlanes;

  Product(const GemmArgs& all, std::int64_t first_tile, std::int64_t count)
      : args(all),
        row(first_tile * kTileRows),
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
  alignas(64) char room[2][kStepBytes];
  alignas(64) float sums[2][kTilesHeld * kTileSums];

  std::int64_t rows_of(std::int64_t tile) const {
    const std::int64_t left = args.rows - row - tile * kTileRows;
    return left < kTileRows ? left : kTileRows;
  }

  /// Calls body(first, count) over the steps, always the padded last one of bf16 alone.
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
    for_chunks(steps, [&](std::int64_t first, std::int64_t count) {
      const char* w0 = W::chunk(first_panel, args.k, first, room[0]);
      const char* w1 = W::chunk(second_panel, args.k, first, room[1]);
      two_panels<W::kInteger>(x + first * kXStepBytes, w0, w1, count);
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
    for_chunks(keep ? steps : kChunk, [&](std::int64_t first, std::int64_t count) {
      const char* w = W::chunk(at, args.k, first, room[0]);
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
                                   Ahead::part(tile / 2, (tiles + 1) / 2));
        if (keep && first + count < steps) continue;
        _tile_stored(0, sums0, kSumsStride);
        _tile_stored(1, sums0 + 16, kSumsStride);
        _tile_stored(2, sums1, kSumsStride);
        _tile_stored(3, sums1 + 16, kSumsStride);
      }
    });
  }

  void finish(std::int64_t panel, std::int64_t panels) {
    const PreparedCodes codes(args.rows, args.k, W::kPrecision);
    const auto* row_scales =
        reinterpret_cast<const float*>(static_cast<const char*>(args.prepared) + codes.scales());
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t first = row + tile * kTileRows;
      const std::int64_t rows = rows_of(tile);
      float* at[2] = {sums[0] + tile * kTileSums, sums[1] + tile * kTileSums};
      if constexpr (W::kInteger) {
        for (std::int64_t p = 0; p < panels; ++p) {
          scale_sums<W::kPlanes>(reinterpret_cast<const float*>(weight + (panel + p) * panel_bytes),
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
  const std::int64_t lines = args.rows * W::kPlanes;
  const std::int64_t row_tiles = (lines + kRowTile - 1) / kRowTile;
  configure(lines < kRowTile ? lines : kRowTile);
  for (std::int64_t tile = 0; tile < row_tiles; tile += kTilesHeld) {
    const std::int64_t tiles = row_tiles - tile < kTilesHeld ? row_tiles - tile : kTilesHeld;
    Product<W>(args, tile, tiles).run(begin * unit, end * unit);
  }
  _tile_release();
}

}  // namespace

void fill_amx_attention(Kernels& table);
void fill_amx_int4(Kernels& table);

void fill_amx(Kernels& table) {
  fill_amx_attention(table);
  fill_amx_int4(table);
  table.name = "amx";
  table.prepare[static_cast<int>(Precision::bf16)] = prepare;
  table.gemm[static_cast<int>(Precision::bf16)] = gemm<Bf16>;
  table.gemm[static_cast<int>(Precision::int8)] = gemm<Int8<Precision::int8>>;
  table.gemm[static_cast<int>(Precision::w8a8)] = gemm<Int8<Precision::w8a8>>;
}

bool has_amx_unit() { return true; }

}  // namespace specrt::cpu
