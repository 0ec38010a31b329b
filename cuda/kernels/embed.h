#pragma once

// Rows of the embedding table become the residual stream.

#include "kernels/gemm.h"

namespace specrt::cuda {

struct EmbedArgs {
  const void* table = nullptr;           ///< [vocab, stride] of the kernel's type
  const std::int32_t* tokens = nullptr;  ///< [rows]; outside [0, vocab): a row of zeros
  float* out = nullptr;                  ///< [rows, width]
  std::int64_t vocab = 0;
  std::int64_t stride = 0;
  std::int64_t width = 0;
  float scale = 1.0f;
};

/// out[row] = scale * table[tokens[row]]. Grid: rows.
template <typename T>
struct Embed {
  static constexpr int kThreads = 256;
  using Args = EmbedArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t token = args.tokens[block.x()];
    const bool known = token >= 0 && token < args.vocab;
    const T* from = static_cast<const T*>(args.table) + (known ? token : 0) * args.stride;
    float* out = args.out + block.x() * args.width;
    for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
      out[i] = known ? to_float(from[i]) * args.scale : 0.0f;
    }
  }
};

struct EmbedPackedArgs {
  const void* table = nullptr;           ///< [vocab, width], packed (pack.h)
  const float* scales = nullptr;         ///< int8: [vocab]
  const std::int32_t* tokens = nullptr;  ///< [rows]; outside [0, vocab): a row of zeros
  float* out = nullptr;                  ///< [rows, width]
  std::int64_t vocab = 0;
  std::int64_t width = 0;
  float scale = 1.0f;
};

/// The same out of an output head that doubles as the table. Grid: rows.
template <typename T, Stored kStored>
struct EmbedPacked {
  static_assert(kStored != Stored::int4, "output heads are int8 there");
  static constexpr int kThreads = 256;
  using Args = EmbedPackedArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t token = args.tokens[block.x()];
    const bool known = token >= 0 && token < args.vocab;
    const std::int64_t row = known ? token : 0;
    const int inside = static_cast<int>(row % kPanelRows);
    const int upper = inside / 8;
    const auto* panel = static_cast<const unsigned char*>(args.table) +
                        row / kPanelRows * k_blocks(args.width) * block_bytes(kStored);
    float* out = args.out + block.x() * args.width;
    for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
      const unsigned char* from = panel + i / kBlockColumns * block_bytes(kStored);
      const int column = static_cast<int>(i % kBlockColumns);
      const int lane = inside % 8 * 4 + column / 16;
      const int at = column % 16;
      float value;
      if constexpr (kStored == Stored::plain) {
        const int word = at % 4 / 2 * 2 + upper;
        value = to_float(*reinterpret_cast<const T*>(from + (at / 4 * simt::kWarp + lane) * 16 +
                                                     word * 4 + at % 2 * 2));
      } else {
        const auto code = static_cast<signed char>(from[(upper * simt::kWarp + lane) * 16 + at]);
        value = simt::rounded<T>(static_cast<float>(code) * args.scales[row]);
      }
      out[i] = known ? value * args.scale : 0.0f;
    }
  }
};

}  // namespace specrt::cuda
