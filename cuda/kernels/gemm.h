#pragma once

// y = x W^T on mma.sync (m16n8k16): 16-bit weights, and int8 and int4 expanded to bf16 on the way.
// Outputs stand where the matrix unit has rows, tokens where it has columns, so that a weight is
// read, and expanded, once for all tokens of a tile; more tokens mean a wider tile and nothing
// else. An output element is one accumulator over k in steps of 16, by splits of k that follow from
// (n, k) alone and are added in order: either one block takes them all, or several leave partial
// sums for FinishProduct, with the same bits.
//
// Which of 64 neighbouring k meets which place of the unit's k is free as long as both sides agree:
// lane 4 g + c has k 16 c to 16 c + 15, four a step. So a lane reads 16 bytes at a time.

#include "kernels/finish_product.h"

namespace specrt::cuda {

inline constexpr int kPanelRows = 16;   ///< outputs of a panel: the unit's rows
inline constexpr int kBlockPanels = 4;  ///< of a block of threads, a warp each
inline constexpr int kBlockColumns = 64;

/// How a weight is stored, by panels of 16 outputs, blocks of 64 k, and lanes; see pack.h.
///   plain  [4 steps][32 lanes][8 of T]: a fragment each
///   int8   [2][32 lanes][16]: codes of rows g, then of rows g + 8
///   int4   [32 lanes][2][8]: of rows g and g + 8; two codes a byte, the first one low; then
///          [2 groups of 32 k][16 rows] of scale and minimum (fp16)
enum class Stored : std::uint8_t { plain, int8, int4 };

constexpr int block_bytes(Stored stored) {
  return stored == Stored::plain ? 2048 : stored == Stored::int8 ? 1024 : 512 + 128;
}
constexpr std::int64_t k_blocks(std::int64_t k) { return (k + kBlockColumns - 1) / kBlockColumns; }
constexpr std::int64_t panels_of(std::int64_t n) { return (n + kPanelRows - 1) / kPanelRows; }

/// Into how many parts k is split: enough that a narrow matrix keeps a large GPU busy. Of (n, k)
/// alone, never of the number of tokens or of the GPU at hand.
constexpr std::int64_t splits_of(std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kBlocksWanted = 264;
  constexpr std::int64_t kLeast = 8;  // k blocks of a split
  const std::int64_t blocks = (panels_of(n) + kBlockPanels - 1) / kBlockPanels;
  std::int64_t splits = (kBlocksWanted + blocks - 1) / blocks;
  const std::int64_t most = k_blocks(k) / kLeast;
  if (splits > most) splits = most;
  return splits < 1 ? 1 : splits > 16 ? 16 : splits;
}

struct GemmArgs {
  const void* x = nullptr;  ///< [rows, x_stride] of the kernel's type, zeros from k to whole blocks
  std::int64_t x_stride = 0;
  const void* weight = nullptr;
  const float* scales = nullptr;  ///< int8: of an output; int4: 1 where its minima count scales
  const float* bias = nullptr;    ///< [n] or null
  void* y = nullptr;              ///< as FinishArgs::y
  std::int64_t y_stride = 0;
  float* partials = nullptr;  ///< [splits, rows, n], where `parallel`
  std::int64_t rows = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int32_t splits = 1;
  bool parallel = false;  ///< a block a split, whose sums go to `partials`
  After after = After::store;
};

/// Grid: ceil(n / 64) by ceil(rows / kTokens) by splits, or by 1 where not parallel.
template <typename T, Stored kStored, int kTokens>
struct Gemm {
  static constexpr int kThreads = kBlockPanels * simt::kWarp;
  static constexpr int kStages = 4;
  static constexpr int kRow = kBlockColumns + 8;  // so that rows start in different banks
  using Args = GemmArgs;
  struct Stage {
    alignas(16) unsigned char weight[kBlockPanels][block_bytes(kStored)];
    alignas(16) T x[kTokens][kRow];
  };
  struct Shared {
    Stage stages[kStages];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    Worker<Block>(block, shared, args).run();
  }

 private:
  static constexpr int kTiles = kTokens / 8;
  struct alignas(16) Words {
    std::uint32_t w[4];
  };

  template <class Block>
  class Worker {
   public:
    SPECRT_KERNEL Worker(const Block& block, Shared& shared, const Args& args)
        : block_(block),
          shared_(shared),
          args_(args),
          warp_(block.thread() / simt::kWarp),
          lane_(block.thread() % simt::kWarp),
          g_(lane_ / 4),
          c_(lane_ % 4),
          panel_(block.x() * kBlockPanels + warp_),
          token_(block.y() * kTokens) {}

    SPECRT_KERNEL void run() {
      if constexpr (kStored != Stored::plain) {
        SPECRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const std::int64_t row = panel_ * kPanelRows + g_ + 8 * i;
          scale_[i] = row < args_.n ? args_.scales[row] : 0.0f;
        }
      }
      if (args_.parallel) {
        sum(block_.z());
        each([&](std::int64_t row, std::int64_t token, float sum, float&) {
          args_.partials[(block_.z() * args_.rows + token) * args_.n + row] = sum;
        });
        return;
      }
      const bool onto = args_.after == After::add;
      each([&](std::int64_t row, std::int64_t token, float, float& total) {
        total = onto ? static_cast<const float*>(args_.y)[token * args_.y_stride + row] : 0.0f;
      });
      for (int split = 0; split < args_.splits; ++split) {
        sum(split);
        SPECRT_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          SPECRT_UNROLL
          for (int i = 0; i < 4; ++i) {
            total_[t][i] = split == 0 && !onto ? acc_[t][i] : total_[t][i] + acc_[t][i];
          }
        }
      }
      each([&](std::int64_t row, std::int64_t, float, float& total) {
        if (args_.bias != nullptr) total = total + args_.bias[row];
      });
      if (args_.after == After::store || onto) {
        each([&](std::int64_t row, std::int64_t token, float, float& total) {
          static_cast<float*>(args_.y)[token * args_.y_stride + row] = total;
        });
      } else {
        store_gated();
      }
    }

   private:
    // Sums of the blocks of a split.
    SPECRT_KERNEL void sum(std::int64_t split) {
      const std::int64_t blocks = k_blocks(args_.k);
      const std::int64_t begin = split * blocks / args_.splits;
      const std::int64_t end = (split + 1) * blocks / args_.splits;
      SPECRT_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        SPECRT_UNROLL
        for (int i = 0; i < 4; ++i) acc_[t][i] = 0.0f;
      }
      block_.sync();  // nobody reads a stage of the split before
      for (int ahead = 0; ahead < kStages - 1; ++ahead) load(begin + ahead, end, ahead);
      for (std::int64_t at = begin; at < end; ++at) {
        const int stage = static_cast<int>((at - begin) % kStages);
        block_.template copy_wait<kStages - 2>();
        block_.sync();
        // The stage that was multiplied last is free now.
        const std::int64_t next = at + kStages - 1;
        load(next, end, static_cast<int>((next - begin) % kStages));
        multiply(shared_.stages[stage]);
      }
      block_.template copy_wait<0>();
    }

    SPECRT_KERNEL void load(std::int64_t at, std::int64_t end, int stage) {
      if (at < end) {
        Stage& to = shared_.stages[stage];
        constexpr int kPieces = block_bytes(kStored) / 16;
        const std::int64_t blocks = k_blocks(args_.k);
        for (int p = block_.thread(); p < kBlockPanels * kPieces; p += kThreads) {
          const std::int64_t panel = block_.x() * kBlockPanels + p / kPieces;
          const bool there = panel < panels_of(args_.n);
          const auto* from = static_cast<const unsigned char*>(args_.weight) +
                             ((there ? panel : 0) * blocks + at) * block_bytes(kStored) +
                             p % kPieces * 16;
          block_.copy_async(&to.weight[p / kPieces][p % kPieces * 16], from, there ? 16 : 0);
        }
        for (int p = block_.thread(); p < kTokens * 8; p += kThreads) {
          const std::int64_t token = token_ + p / 8;
          const bool there = token < args_.rows;
          const T* from = static_cast<const T*>(args_.x) + (there ? token : 0) * args_.x_stride +
                          at * kBlockColumns + p % 8 * 8;
          block_.copy_async(&to.x[p / 8][p % 8 * 8], from, there ? 16 : 0);
        }
      }
      block_.copy_commit();  // an empty group where there is nothing, so that all count alike
    }

    SPECRT_KERNEL void multiply(const Stage& stage) {
      std::uint32_t a[4][4];
      fragments(stage.weight[warp_], a);
      SPECRT_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        const T* row = stage.x[8 * t + g_] + 16 * c_;
        const Words x[2] = {words(row), words(row + 8)};
        SPECRT_UNROLL
        for (int s = 0; s < 4; ++s) {
          const std::uint32_t b[2] = {x[s / 2].w[s % 2 * 2], x[s / 2].w[s % 2 * 2 + 1]};
          block_.template mma<T>(acc_[t], a[s], b);
        }
      }
    }

    // The weights of four steps, as the unit takes them.
    SPECRT_KERNEL void fragments(const unsigned char* weight, std::uint32_t (&a)[4][4]) const {
      if constexpr (kStored == Stored::plain) {
        SPECRT_UNROLL
        for (int s = 0; s < 4; ++s) {
          const Words step = words(weight + (s * simt::kWarp + lane_) * 16);
          SPECRT_UNROLL
          for (int i = 0; i < 4; ++i) a[s][i] = step.w[i];
        }
      } else if constexpr (kStored == Stored::int8) {
        SPECRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const Words codes = words(weight + (i * simt::kWarp + lane_) * 16);
          SPECRT_UNROLL
          for (int s = 0; s < 4; ++s) {
            float w[4];
            SPECRT_UNROLL
            for (int j = 0; j < 4; ++j) {
              const std::uint32_t code = (codes.w[s] >> (8 * j) & 0xFFu) ^ 0x80u;
              w[j] = whole(code, 128.0f) * scale_[i];
            }
            a[s][i] = simt::pack2<T>(w[0], w[1]);
            a[s][2 + i] = simt::pack2<T>(w[2], w[3]);
          }
        }
      } else {
        const Words codes = words(weight + lane_ * 16);
        SPECRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const auto* pair = reinterpret_cast<const std::uint32_t*>(weight + 512) +
                             c_ / 2 * kPanelRows + g_ + 8 * i;
          const float scale = to_float(Half{static_cast<std::uint16_t>(*pair)});
          const float low = to_float(Half{static_cast<std::uint16_t>(*pair >> 16)});
          const float minimum = scale_[i] != 0.0f ? low * scale : low;
          SPECRT_UNROLL
          for (int s = 0; s < 4; ++s) {
            const std::uint32_t four = codes.w[2 * i + s / 2] >> (16 * (s % 2));
            float w[4];
            SPECRT_UNROLL
            for (int j = 0; j < 4; ++j) {
              w[j] = fused(whole(four >> (4 * j) & 15u, 0.0f), scale, minimum);
            }
            a[s][i] = simt::pack2<T>(w[0], w[1]);
            a[s][2 + i] = simt::pack2<T>(w[2], w[3]);
          }
        }
      }
    }

    // A small whole number less `zero`, without a conversion.
    SPECRT_KERNEL static float whole(std::uint32_t code, float zero) {
      return simt::float_of(0x4B000000u | code) - (8388608.0f + zero);
    }

    // Calls use(output, token, sum, total) for what this thread holds of the matrix.
    template <typename Use>
    SPECRT_KERNEL void each(const Use& use) {
      SPECRT_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        SPECRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const std::int64_t row = panel_ * kPanelRows + g_ + i / 2 * 8;
          const std::int64_t token = token_ + 8 * t + 2 * c_ + i % 2;
          if (row < args_.n && token < args_.rows) use(row, token, acc_[t][i], total_[t][i]);
        }
      }
    }

    // Rows g hold gates, rows g + 8 what belongs to them.
    SPECRT_KERNEL void store_gated() {
      const Activation activation =
          args_.after == After::gate_silu ? Activation::silu : Activation::gelu_tanh;
      const std::int64_t output = panel_ * kGateRows + g_;
      if (output >= args_.n / 2) return;
      SPECRT_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        SPECRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const std::int64_t token = token_ + 8 * t + 2 * c_ + i;
          if (token >= args_.rows) continue;
          static_cast<T*>(args_.y)[token * args_.y_stride + output] =
              from_float<T>(activate(activation, total_[t][i], total_[t][2 + i]));
        }
      }
    }

    template <typename U>
    SPECRT_KERNEL static Words words(const U* from) {
      return *reinterpret_cast<const Words*>(from);
    }

    const Block& block_;
    Shared& shared_;
    const Args& args_;
    const int warp_;
    const int lane_;
    const int g_;
    const int c_;
    const std::int64_t panel_;
    const std::int64_t token_;  // the first
    float scale_[2];
    float acc_[kTiles][4];
    float total_[kTiles][4];
  };
};

}  // namespace specrt::cuda
