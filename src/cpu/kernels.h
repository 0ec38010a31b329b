#pragma once

// The kernel table: every arithmetic operation of the forward pass and of choosing a token, one
// pointer each, filled once per instruction-set level. Rules every body obeys (same bytes):
//   - An output element is the same sequence of floating-point operations whatever the number of
//     rows, whichever rows share the call, and however [begin, end) splits the work.
//   - Outputs are set, never added to, unless the name says so.
//   - Ties go to the lower token id.
// Bodies allocate nothing. Callers set the floating-point mode (FpMode) on each thread first.

#include <cstdint>

#include "core/kv_dtype.h"
#include "specrt/types.h"

namespace specrt::cpu {

/// Outputs of a packed weight are grouped in panels of this many.
inline constexpr std::int64_t kPanel = 32;
/// Attention reduces over chunks of this many absolute positions, whatever the block size.
inline constexpr std::int64_t kAttentionChunk = 32;
/// Chunks are summed up by segments of this many absolute positions, and segments combined in
/// order, by whichever threads.
inline constexpr std::int64_t kAttentionSegment = 512;
static_assert(kAttentionSegment % kAttentionChunk == 0);
/// Most rows of an attention task.
inline constexpr std::int64_t kAttentionRows = 16;
/// Most query heads of one kv head, and the widest head, that attention takes.
inline constexpr std::int64_t kMaxHeadGroup = 64;
inline constexpr std::int64_t kMaxHeadDim = 512;
/// Vocabulary-wide sums use chunks of this many entries, combined in order.
inline constexpr std::int64_t kVocabChunk = 4096;

// Packed weights, the same bytes for every ISA level (a saved model maps anywhere):
//   f32   [panels][K][32]         element (n, k) at ((n/32 * K + k) * 32 + n%32)
//   bf16  [panels][ceil(K/2)][32][2]  pairs of k beside each other, as AMX and vdpbf16ps read
//         them: element (n, k) at (((n/32 * ceil(K/2) + k/2) * 32 + n%32) * 2 + k%2)
//   int8, w8a8  [panels] of 32 scales (fp32), then [steps of 64 k][16 quads][32][4] of q
//   int4  [panels] of 32 kinds (fp32), then for each group of 32 k: 32 scales and 32 minima (fp16)
//         and 8 lines of 64 bytes. Line 4h + j holds outputs 16h to 16h + 15, four bytes each: byte
//         i has k 4j + i of the group in its low half and k 16 + 4j + i in its high half. Where an
//         output's kind is 1, its minima count scales (a zero point): exactly what GPTQ and AWQ
//         mean; where it is 0, they are what they are.
// N is padded to whole panels and K to whole pairs, steps or groups, with zeros.
namespace packed {
inline constexpr std::int64_t kHeader = kPanel * 4;  ///< of a quantised panel, bytes
inline constexpr std::int64_t kStep = 32;  ///< k of a tile's step of bf16, a group of int4
inline constexpr std::int64_t kInt4Scales = 2 * kPanel * 2;  ///< bytes of a group
inline constexpr std::int64_t kInt4Step = kInt4Scales + kStep * kPanel / 2;
inline constexpr std::int64_t kWide = 64;  ///< k of a step of int8
inline constexpr std::int64_t kInt8Step = kWide * kPanel;
inline constexpr std::int64_t steps_of(std::int64_t k) { return (k + kStep - 1) / kStep; }
inline constexpr std::int64_t wide_steps_of(std::int64_t k) { return (k + kWide - 1) / kWide; }
}  // namespace packed

/// What a product of interleaved panels (gate, up, gate, up ...) makes of each pair of them.
enum class Gate : std::uint8_t {
  none,       ///< panels are not interleaved
  silu,       ///< silu(gate) * up
  gelu_tanh,  ///< gelu(gate) * up, gelu's tanh form
};

struct GemmArgs {
  const float* x = nullptr;  ///< [rows, x_stride]; values already bf16 where the weight is
  std::int64_t rows = 0;
  std::int64_t x_stride = 0;
  const void* weight = nullptr;  ///< packed
  std::int64_t n = 0;            ///< real outputs, not padded
  std::int64_t k = 0;
  const float* bias = nullptr;  ///< [n] or null
  float* y = nullptr;           ///< [rows, y_stride]
  std::int64_t y_stride = 0;
  /// What Kernels::prepare made of x for this precision; where there is such a function, the
  /// product reads only this.
  const void* prepared = nullptr;
  bool accumulate = false;  ///< y += x W^T (the residual stream) instead of y = x W^T
  /// Not none: the work is counted in pairs of panels, n and y in outputs of the gate, bias as the
  /// panels lie; y is set, rounded to bf16 where asked.
  Gate gate = Gate::none;
  bool round = false;
};

/// One query token. Positions [0, table_positions) are found through the block table, the
/// following path_length ones (a draft node's ancestors, then itself) through slots. The token
/// itself is the last of them.
struct AttentionRow {
  const float* q = nullptr;  ///< [q_heads, head_dim], rotated
  float* out = nullptr;      ///< [q_heads, head_dim]
  const std::int32_t* table = nullptr;
  std::int64_t table_positions = 0;
  const std::int32_t* path = nullptr;  ///< slots less AttentionArgs::path_base
  std::int64_t path_length = 0;
  /// Where the row's first segment goes in AttentionArgs::partials, the next ones behind it; -1:
  /// one task takes all segments and sets `out`.
  std::int64_t partial = -1;
};

/// Rows [first_row, first_row + rows), all of one block table: what they all read is read once.
struct AttentionUnit {
  std::int64_t first_row = 0;
  std::int64_t rows = 0;      ///< at most attention_rows_at_once()
  std::int64_t segment = -1;  ///< the only one to do, for rows that have partials; -1: all
};

struct AttentionArgs {
  const void* k = nullptr;  ///< [slots, kv_heads, head_dim] of kv_dtype
  const void* v = nullptr;
  const float* k_scales = nullptr;  ///< [slots, kv_heads], for int8
  const float* v_scales = nullptr;
  KvDType kv_dtype = KvDType::f32;
  std::int64_t block_size =
      0;  ///< slot of position p: table[p / block_size] * block_size + p % block_size
  std::int64_t path_base = 0;  ///< slot of a path entry = path_base + entry
  std::int64_t q_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  float scale = 0.0f;
  float softcap = 0.0f;       ///< > 0: scores become softcap * tanh(score / softcap)
  std::int64_t window = 0;    ///< > 0: only the last `window` positions, the token itself included
  bool round_output = false;  ///< out rounded to bf16 values
  const AttentionRow* rows = nullptr;
  const AttentionUnit* units = nullptr;
  /// Segments' results, partial_floats() each: the heads' outputs, maxima and sums.
  float* partials = nullptr;
};

/// The random stream of one choice; see core/philox.h for how it maps to Philox.
struct NoiseKey {
  std::uint64_t seed = 0;
  std::uint32_t sample_index = 0;
  std::uint32_t position = 0;
  std::uint32_t purpose = 0;
};

struct ArgMax {
  std::int64_t index = 0;
  float value = 0.0f;
  bool finite = true;  ///< false where any entry is NaN or +inf, or all are -inf
};

struct Race {
  std::int64_t token = -1;  ///< -1 where no weight is positive
  double key = 0.0;         ///< -log1p(-u) / weight of the winner: the smallest
};

/// What the entries from some value up come to.
struct Share {
  double sum = 0.0;
  std::int64_t count = 0;
};

using Prepare = void (*)(const float* x, std::int64_t rows, std::int64_t x_stride, std::int64_t k,
                         std::int64_t row_begin, std::int64_t row_end, void* out);
using Gemm = void (*)(const GemmArgs& args, std::int64_t panel_begin, std::int64_t panel_end);

struct Kernels {
  const char* name;

  /// By Precision; null, or: turns rows [row_begin, row_end) of x into the form that the product
  /// reads. Row numbers go up to prepared_rows(rows); what lies beyond becomes zeros. out has
  /// prepared_bytes().
  ///   bf16  as tiles read it: [tiles of 16 rows][steps of 32 k][16][32]
  ///   w8a8, int8, int4  whole numbers: codes = round(x / scale), with a row's scale max |x| / most
  ///         (NaN where x has no finite maximum). w8a8: one plane of int8, most = 127. int8: 256
  ///         high + low, two planes, most = 32639. That is finer than bf16, over a row, as long as
  ///         max |x| stays below some 250 times the root mean square, which up to 60,000 inputs it
  ///         cannot exceed. int4: 16 high + low, most = 2039.
  Prepare prepare[5];

  /// y (+)= x W^T + bias for outputs of panels [panel_begin, panel_end), by Precision.
  Gemm gemm[5];

  /// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, rounded to bf16 where asked.
  void (*rms_norm)(const float* x, std::int64_t x_stride, const float* weight, float eps,
                   std::int64_t rows, std::int64_t width, bool round, float* out,
                   std::int64_t out_stride);

  /// Rotates `heads` vectors of head_dim at x in place: pairs (i, i + head_dim/2), with
  /// cos and sin [head_dim / 2] of the row's position.
  void (*rope)(float* x, std::int64_t heads, std::int64_t head_dim, const float* cos,
               const float* sin);

  /// x[i] = cap * tanh(x[i] / cap).
  void (*softcap)(float* x, std::int64_t n, float cap);
  /// x[i] *= scale.
  void (*scale)(float* x, std::int64_t n, float scale);
  /// x[i] += scale * y[i].
  void (*add_scaled)(float* x, const float* y, std::int64_t n, float scale);

  /// Stores floats as dtype (round to nearest even).
  void (*store)(const float* x, std::int64_t n, DType dtype, void* out);
  /// Loads dtype as floats.
  void (*load)(const void* x, std::int64_t n, DType dtype, float* out);

  /// Stores `heads` vectors of head_dim as the KV cache has them. scales: [heads], for int8; a
  /// vector with NaN or infinity in it reads as NaN, one with nothing above 2^-100 as zeros.
  void (*store_kv)(const float* x, std::int64_t heads, std::int64_t head_dim, KvDType dtype,
                   void* out, float* scales);

  /// Softmax attention for tasks [begin, end); task = unit * kv_heads + kv_head, covering that
  /// head's q_heads / kv_heads query heads. Online softmax by chunks of kAttentionChunk inside a
  /// segment; segments are combined in order.
  void (*attention)(const AttentionArgs& args, std::int64_t task_begin, std::int64_t task_end);
  /// Sets `out` of those rows in [begin, end) that have partials, all of them done by now.
  void (*attention_combine)(const AttentionArgs& args, std::int64_t row_begin,
                            std::int64_t row_end);

  ArgMax (*arg_max)(const float* x, std::int64_t n);

  /// sum over i of exp((x[i] - max) * inv_temperature), by kVocabChunk; double between chunks.
  double (*exp_sum)(const float* x, std::int64_t n, float max, float inv_temperature);
  /// out[i] = exp((x[i] - max) * inv_temperature); returns exp_sum of the same, bit for bit.
  double (*exp_weights)(const float* x, std::int64_t n, float max, float inv_temperature,
                        float* out);

  /// Of the entries with x[i] >= floor: how many, and the sum of their weights in the order of
  /// exp_sum (the same bits where all are). No NaN in x. Null weights: the count alone.
  Share (*share_from)(const float* x, const float* weights, std::int64_t n, float floor);
  /// Writes every i with low <= x[i] < high to out, ascending, and returns how many. NaN is never
  /// between.
  std::int64_t (*ids_between)(const float* x, std::int64_t n, float low, float high,
                              std::int32_t* out);
  /// x[i] = -inf where bit i % 32 of bits[i / 32] is clear.
  void (*keep_bits)(float* x, std::int64_t n, const std::uint32_t* bits);

  /// The exponential race, which draws from weights / sum(weights): the id with the smallest
  /// -log1p(-u(id)) / weights[i], u from the Philox stream of `key` with counter id. ids null
  /// means id = i. Weights <= 0 never win. The result does not depend on how it is searched.
  Race (*race)(const float* weights, const std::int32_t* ids, std::int64_t n, const NoiseKey& key);
};

/// Lines of codes that lie side by side, as the tile unit reads them, and bytes of a line's step.
inline constexpr std::int64_t kPreparedTile = 16;
inline constexpr std::int64_t kLineBytes = 64;

/// Where the parts of activations as whole numbers lie, in bytes: [tiles of 16
/// lines][steps][16][64] of int8, and behind them what belongs to rows and lines. int8 has two
/// lines a row, one a plane; int4 has one, with 32 of each plane in a step.
struct PreparedCodes {
  /// k of a step, and the largest code.
  static constexpr std::int64_t span(Precision precision) {
    return precision == Precision::int4 ? packed::kStep : packed::kWide;
  }
  static constexpr float most(Precision precision) {
    return precision == Precision::w8a8   ? 127.0f
           : precision == Precision::int8 ? 127.0f * 256.0f + 127.0f
                                          : 127.0f * 16.0f + 7.0f;
  }
  PreparedCodes(std::int64_t rows, std::int64_t k, Precision precision)
      : planes(precision == Precision::int8 ? 2 : 1),
        lines((rows * planes + kPreparedTile - 1) / kPreparedTile * kPreparedTile),
        steps((k + span(precision) - 1) / span(precision)) {}
  std::int64_t planes;  ///< lines of a row
  std::int64_t lines;   ///< whole tiles
  std::int64_t steps;
  /// A line's first step.
  std::int64_t line(std::int64_t index) const {
    return (index / kPreparedTile * steps * kPreparedTile + index % kPreparedTile) * kLineBytes;
  }
  std::int64_t scales() const { return lines * steps * kLineBytes; }  ///< [rows], fp32
  std::int64_t sums() const { return scales() + lines * 4; }  ///< [lines], int32: of the codes
  std::int64_t groups() const { return sums() + lines * 4; }  ///< int4: [tiles][steps][16], fp32
  /// Where a row's first group's sum is among those; the next one is kPreparedTile behind.
  std::int64_t group(std::int64_t row) const {
    return row / kPreparedTile * steps * kPreparedTile + row % kPreparedTile;
  }
};

inline std::int64_t prepared_rows(std::int64_t rows) {
  return (rows + kPreparedTile - 1) / kPreparedTile * kPreparedTile;
}
/// Enough for every precision.
inline std::int64_t prepared_bytes(std::int64_t rows, std::int64_t k) {
  return PreparedCodes(prepared_rows(rows), k, Precision::int8).groups() +
         prepared_rows(rows) * packed::steps_of(k) * 4;
}

/// Bounds what a task of attention() keeps on its stack.
inline std::int64_t attention_rows_at_once(std::int64_t head_group, std::int64_t head_dim) {
  const std::int64_t fit = kMaxHeadGroup * kMaxHeadDim / (head_group * head_dim);
  return fit < 1 ? 1 : fit < kAttentionRows ? fit : kAttentionRows;
}

inline std::int64_t partial_floats(std::int64_t q_heads, std::int64_t head_dim) {
  return q_heads * (head_dim + 2);
}

const Kernels& scalar_kernels();
const Kernels* avx2_kernels();  ///< null where the build has none
const Kernels* avx512_kernels();
/// AVX-512's table with the products that the tile unit does better; null where the build has none.
const Kernels* amx_kernels();

}  // namespace specrt::cpu
