#pragma once

// CUTLASS's wgmma products for sm_90a, operands swapped: outputs are the tile's rows, tokens its
// columns, so that few tokens still fill the matrix unit. A tile of more tokens is another width of
// the same instruction family (m64nNk16), with the same steps of k.

#include <cstdint>

#include "device.h"

namespace specrt::cuda {

struct Sm90Product {
  const void* weight = nullptr;  ///< [n, k_stride], row-major
  const void* x = nullptr;       ///< [rows, k_stride]
  std::int64_t k_stride = 0;
  float* y = nullptr;  ///< [batches, rows, y_stride]
  std::int64_t y_stride = 0;
  std::int64_t rows = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;        ///< of a batch
  std::int64_t batches = 1;  ///< parts of k that lie behind each other, each with its own y
  bool onto = false;         ///< y += instead of y =
};

/// Tokens of a tile.
inline constexpr int kSm90Tiles[] = {16, 64, 128};

template <bool kBf16, int kTokens>
void sm90_product(const Sm90Product& args, Stream stream);

#define SPECRT_SM90_UNITS(declare)                                                             \
  declare(true, 16) declare(true, 64) declare(true, 128) declare(false, 16) declare(false, 64) \
      declare(false, 128)
#define SPECRT_DECLARE(bf16, tokens) \
  extern template void sm90_product<bf16, tokens>(const Sm90Product&, Stream);
SPECRT_SM90_UNITS(SPECRT_DECLARE)
#undef SPECRT_DECLARE

}  // namespace specrt::cuda
