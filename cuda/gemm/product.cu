// Which kernel makes a product. The choice between instruction families follows from the matrix
// and the architecture, never from the number of rows.

#include "gemm/mma_product.cuh"
#include "gemm/sm90.h"

namespace specrt::cuda {
namespace {

// wgmma's splits have k of equal length.
std::int64_t sm90_splits(std::int64_t n, std::int64_t k) {
  std::int64_t splits = splits_of(n, k);
  while (k_blocks(k) % splits != 0) --splits;
  return splits;
}

void sm90(Type type, const Sm90Product& args, Stream stream) {
  const bool bf16 = type == Type::bf16;
  if (args.rows <= kSm90Tiles[0]) {
    bf16 ? sm90_product<true, 16>(args, stream) : sm90_product<false, 16>(args, stream);
  } else if (args.rows <= kSm90Tiles[1]) {
    bf16 ? sm90_product<true, 64>(args, stream) : sm90_product<false, 64>(args, stream);
  } else {
    bf16 ? sm90_product<true, 128>(args, stream) : sm90_product<false, 128>(args, stream);
  }
  count_launch();  // which CUTLASS made
}

void finish(Type type, const FinishArgs& args, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { finish_product<decltype(t)>(OnGpu{stream}, args); });
}

// Few rows: every split at once, each with sums of its own, which FinishProduct adds up. Many:
// split after split onto the same sums, which is the same additions.
void product_sm90(Type type, const DeviceMatrix& matrix, const Product& args, Stream stream) {
  const std::int64_t splits = sm90_splits(matrix.n, matrix.k);
  Sm90Product p;
  p.weight = matrix.data;
  p.x = args.x;
  p.k_stride = padded_columns(matrix.k);
  p.rows = args.rows;
  p.n = matrix.n;
  p.k = p.k_stride / splits;
  p.y = args.workspace;
  p.y_stride = matrix.n;
  FinishArgs end{args.workspace, args.bias,     args.y, args.rows,
                 matrix.n,       args.y_stride, 1,      args.after};
  if (splits > 1 && args.rows <= kMostParallel) {
    p.batches = splits;
    sm90(type, p, stream);
    end.splits = static_cast<std::int32_t>(splits);
    finish(type, end, stream);
    return;
  }
  const bool gated = is_gated(args.after);
  if (!gated) {
    p.y = static_cast<float*>(args.y);
    p.y_stride = args.y_stride;
  }
  const auto* weight = static_cast<const std::uint16_t*>(matrix.data);
  const auto* x = static_cast<const std::uint16_t*>(args.x);
  for (std::int64_t split = 0; split < splits; ++split) {
    p.weight = weight + split * p.k;
    p.x = x + split * p.k;
    p.onto = split > 0 || args.after == After::add;
    sm90(type, p, stream);
  }
  if (gated) {
    finish(type, end, stream);
  } else if (args.bias != nullptr) {
    end.splits = 0;  // the sums are in y: only the bias is left to add
    end.after = After::add;
    finish(type, end, stream);
  }
}

}  // namespace

bool wants_row_major(int architecture, std::int64_t n, std::int64_t) {
  // TMA writes rows of y whose length in bytes is a multiple of 16.
  return architecture == 90 && n % 4 == 0;
}

std::int64_t workspace_bytes(const DeviceMatrix& matrix, std::int64_t rows) {
  return bytes_of_sums(matrix, rows);
}

void product(Type type, const DeviceMatrix& matrix, const Product& args, Stream stream) {
  if (args.rows == 0) return;
  if (matrix.row_major) {
    product_sm90(type, matrix, args, stream);
    return;
  }
  const GemmArgs gemm = gemm_args(matrix, args);
  if (matrix.stored == Stored::plain) {
    type == Type::bf16 ? mma_product<simt::Bf16, Stored::plain>(gemm, args.workspace, stream)
                       : mma_product<simt::Half, Stored::plain>(gemm, args.workspace, stream);
    return;
  }
  if (type != Type::bf16) {
    throw UnsupportedError(
        expected_got("product", "bfloat16 activations for int8 and int4 weights", "float16"));
  }
  matrix.stored == Stored::int8
      ? mma_product<simt::Bf16, Stored::int8>(gemm, args.workspace, stream)
      : mma_product<simt::Bf16, Stored::int4>(gemm, args.workspace, stream);
}

}  // namespace specrt::cuda
