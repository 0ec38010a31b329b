// bf16 products on the tile unit (AMX). Attention: amx_attention.cpp. Everything else is AVX-512's.
//
// A step covers 32 of k: one A tile of up to 16 rows of x, and for each panel two B tiles of 16
// outputs, which the packed layout already holds in the order that the unit reads. Every output is
// one accumulator over the steps in order, so rows, panels and splits change no bit.

#include <immintrin.h>

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kStepK = 32;
constexpr std::int64_t kPairBytes = kPanel * 4;               // a pair of k of a whole panel
constexpr std::int64_t kStepBytes = kStepK / 2 * kPairBytes;  // a step of a panel
constexpr std::int64_t kAhead = 8 * 1024;                     // bytes fetched before their use

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t columns[16] = {};
  std::uint8_t rows[16] = {};
};

/// Tiles 0-3 accumulate, 4-5 hold rows of x, 6-7 weights.
void configure(std::int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.columns[tile] = 64;
    config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : kTileRows);
  }
  _tile_loadconfig(&config);
}

/// Rows of x as the A tiles read them: bf16, [row tiles][steps][16][32], zeros beyond the end.
void prepare(const float* x, std::int64_t rows, std::int64_t x_stride, std::int64_t k,
             std::int64_t row_begin, std::int64_t row_end, void* out) {
  const std::int64_t steps = (k + kStepK - 1) / kStepK;
  auto* base = static_cast<std::uint16_t*>(out);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    std::uint16_t* to = base + (row / kTileRows * steps * kTileRows + row % kTileRows) * kStepK;
    for (std::int64_t step = 0; step < steps; ++step, to += kTileRows * kStepK) {
      __m512 low = _mm512_setzero_ps();
      __m512 high = _mm512_setzero_ps();
      if (row < rows) {
        const float* from = x + row * x_stride + step * kStepK;
        const std::int64_t left = k - step * kStepK;
        const auto mask = [](std::int64_t lanes) {
          return static_cast<__mmask16>(lanes >= 16 ? 0xFFFF : lanes <= 0 ? 0 : (1 << lanes) - 1);
        };
        low = _mm512_maskz_loadu_ps(mask(left), from);
        high = _mm512_maskz_loadu_ps(mask(left - 16), from + 16);
      }
      _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
  }
}

/// The steps of one or two panels, each of 16 outputs twice, for one or two tiles of rows.
struct Block {
  const char* x[2];     ///< prepared rows
  const char* w[2];     ///< panels
  std::int64_t whole;   ///< steps whose 32 of k all exist
  const char* tail[2];  ///< a last step filled up with zeros, or null
  bool ahead;           ///< the weights come from memory and are used once
};

inline void fetch(const char* w) {
  for (std::int64_t line = 0; line < kStepBytes; line += 64) {
    _mm_prefetch(w + kAhead + line, _MM_HINT_T0);
  }
}

// One tile of rows against two panels: accumulators 0 and 1 of the first, 2 and 3 of the second.
inline void two_panels(const Block& b) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char* x = b.x[0];
  const char* w0 = b.w[0];
  const char* w1 = b.w[1];
  for (std::int64_t step = 0; step < b.whole; ++step) {
    if (b.ahead) {
      fetch(w0);
      fetch(w1);
    }
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w0, kPairBytes);
    _tile_loadd(7, w0 + 64, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w1, kPairBytes);
    _tile_loadd(7, w1 + 64, kPairBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
    x += kTileRows * 64;
    w0 += kStepBytes;
    w1 += kStepBytes;
  }
  if (b.tail[0] != nullptr) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, b.tail[0], kPairBytes);
    _tile_loadd(7, b.tail[0] + 64, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b.tail[1], kPairBytes);
    _tile_loadd(7, b.tail[1] + 64, kPairBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// Two tiles of rows against one panel: accumulators 0 and 1 of the first rows, 2 and 3 of the
// second.
inline void two_row_tiles(const Block& b) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char* x0 = b.x[0];
  const char* x1 = b.x[1];
  const char* w = b.w[0];
  const std::int64_t steps = b.whole + (b.tail[0] != nullptr ? 1 : 0);
  for (std::int64_t step = 0; step < steps; ++step) {
    if (step == b.whole) w = b.tail[0];
    if (b.ahead && step < b.whole) fetch(w);
    _tile_loadd(6, w, kPairBytes);
    _tile_loadd(7, w + 64, kPairBytes);
    _tile_loadd(4, x0, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    x0 += kTileRows * 64;
    x1 += kTileRows * 64;
    w += kStepBytes;
  }
}

// Moves [rows][32] sums of a panel to their outputs.
void finish(const GemmArgs& args, const float* sums, std::int64_t row, std::int64_t rows,
            std::int64_t panel) {
  const std::int64_t first = panel * kPanel;
  const std::int64_t count = args.n - first < kPanel ? args.n - first : kPanel;
  const auto low = static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1 << count) - 1);
  const auto high = static_cast<__mmask16>(count >= 32   ? 0xFFFF
                                           : count <= 16 ? 0
                                                         : (1 << (count - 16)) - 1);
  __m512 bias_low = _mm512_setzero_ps();
  __m512 bias_high = _mm512_setzero_ps();
  if (args.bias != nullptr) {
    bias_low = _mm512_maskz_loadu_ps(low, args.bias + first);
    bias_high = _mm512_maskz_loadu_ps(high, args.bias + first + 16);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    float* y = args.y + (row + r) * args.y_stride + first;
    __m512 a = _mm512_load_ps(sums + r * kPanel);
    __m512 b = _mm512_load_ps(sums + r * kPanel + 16);
    if (args.bias != nullptr) {
      a = _mm512_add_ps(a, bias_low);
      b = _mm512_add_ps(b, bias_high);
    }
    if (args.accumulate) {
      a = _mm512_add_ps(_mm512_maskz_loadu_ps(low, y), a);
      b = _mm512_add_ps(_mm512_maskz_loadu_ps(high, y + 16), b);
    }
    _mm512_mask_storeu_ps(y, low, a);
    _mm512_mask_storeu_ps(y + 16, high, b);
  }
}

void gemm(const GemmArgs& args, std::int64_t panel_begin, std::int64_t panel_end) {
  if (args.rows <= 0 || panel_begin >= panel_end) return;
  const std::int64_t steps = (args.k + kStepK - 1) / kStepK;
  const std::int64_t whole = args.k / kStepK;
  const std::int64_t pairs = (args.k + 1) / 2;
  const std::int64_t panel_bytes = pairs * kPairBytes;
  const std::int64_t tail_pairs = pairs - whole * (kStepK / 2);
  const char* x = static_cast<const char*>(args.prepared);
  const char* weight = static_cast<const char*>(args.weight);
  const std::int64_t x_tile_bytes = steps * kTileRows * 64;
  const std::int64_t row_tiles = (args.rows + kTileRows - 1) / kTileRows;
  alignas(64) char tails[2][kStepBytes];
  alignas(64) float sums[2][kTileRows * kPanel];

  const auto load_tail = [&](int which, std::int64_t panel) -> const char* {
    if (tail_pairs == 0) return nullptr;
    const char* from = weight + panel * panel_bytes + whole * kStepBytes;
    for (std::int64_t i = 0; i < kStepBytes; i += 64) {
      const bool real = i < tail_pairs * kPairBytes;
      const __m512i line = real ? _mm512_loadu_si512(from + i) : _mm512_setzero_si512();
      _mm512_store_si512(tails[which] + i, line);
    }
    return tails[which];
  };
  constexpr std::int64_t kSumsStride = kPanel * 4;

  configure(args.rows < kTileRows ? args.rows : kTileRows);
  if (row_tiles == 1) {
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += 2) {
      // An odd last panel is done twice over, which costs less than another body.
      const std::int64_t second = panel + 1 < panel_end ? panel + 1 : panel;
      Block b = {};
      b.x[0] = x;
      b.w[0] = weight + panel * panel_bytes;
      b.w[1] = weight + second * panel_bytes;
      b.whole = whole;
      b.tail[0] = load_tail(0, panel);
      b.tail[1] = load_tail(1, second);
      b.ahead = true;
      two_panels(b);
      _tile_stored(0, sums[0], kSumsStride);
      _tile_stored(1, sums[0] + 16, kSumsStride);
      finish(args, sums[0], 0, args.rows, panel);
      if (second == panel) break;
      _tile_stored(2, sums[1], kSumsStride);
      _tile_stored(3, sums[1] + 16, kSumsStride);
      finish(args, sums[1], 0, args.rows, second);
    }
  } else {
    for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const char* tail = load_tail(0, panel);
      for (std::int64_t tile = 0; tile < row_tiles; tile += 2) {
        const std::int64_t other = tile + 1 < row_tiles ? tile + 1 : tile;
        Block b = {};
        b.x[0] = x + tile * x_tile_bytes;
        b.x[1] = x + other * x_tile_bytes;
        b.w[0] = weight + panel * panel_bytes;
        b.whole = whole;
        b.tail[0] = tail;
        b.ahead = tile == 0;
        two_row_tiles(b);
        const auto rows_of = [&](std::int64_t t) {
          const std::int64_t left = args.rows - t * kTileRows;
          return left < kTileRows ? left : kTileRows;
        };
        _tile_stored(0, sums[0], kSumsStride);
        _tile_stored(1, sums[0] + 16, kSumsStride);
        finish(args, sums[0], tile * kTileRows, rows_of(tile), panel);
        if (other == tile) break;
        _tile_stored(2, sums[1], kSumsStride);
        _tile_stored(3, sums[1] + 16, kSumsStride);
        finish(args, sums[1], other * kTileRows, rows_of(other), panel);
      }
    }
  }
  _tile_release();
}

}  // namespace

void fill_amx_attention(Kernels& table);

void fill_amx(Kernels& table) {
  fill_amx_attention(table);
  table.name = "amx";
  table.prepare_bf16 = prepare;
  table.gemm_bf16 = gemm;
}

bool has_amx_unit() { return true; }

}  // namespace specrt::cpu
