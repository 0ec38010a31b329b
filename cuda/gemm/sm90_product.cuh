#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "gemm/sm90.h"
#include "specrt/error.h"

namespace specrt::cuda {

template <bool kBf16, int kTokens>
struct Sm90 {
  using T = std::conditional_t<kBf16, cutlass::bfloat16_t, cutlass::half_t>;
  using Tile = cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Column = cutlass::layout::ColumnMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, float, Column, 4, float,
      Column, 4, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, cutlass::layout::RowMajor, 8, T,
      Column, 8, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
  // Whole tiles to each block in turn: never a part of one (stream-K).
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

template <bool kBf16, int kTokens>
void sm90_product(const Sm90Product& p, Stream stream) {
  using Gemm = typename Sm90<kBf16, kTokens>::Gemm;
  using T = typename Sm90<kBf16, kTokens>::T;
  typename Gemm::Arguments args;
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = cute::make_shape(static_cast<int>(p.n), static_cast<int>(p.rows),
                                        static_cast<int>(p.k), static_cast<int>(p.batches));
  args.mainloop.ptr_A = static_cast<const T*>(p.weight);
  args.mainloop.dA = {p.k_stride, cute::_1{}, p.k};
  args.mainloop.ptr_B = static_cast<const T*>(p.x);
  args.mainloop.dB = {p.k_stride, cute::_1{}, p.k};
  args.epilogue.thread.alpha = 1.0f;
  args.epilogue.thread.beta = p.onto ? 1.0f : 0.0f;
  args.epilogue.ptr_C = p.y;
  args.epilogue.dC = {cute::_1{}, p.y_stride, p.rows * p.y_stride};
  args.epilogue.ptr_D = p.y;
  args.epilogue.dD = args.epilogue.dC;
  Gemm gemm;
  // Needs no workspace: a static schedule, nothing shared between tiles.
  cutlass::Status status = Gemm::can_implement(args);
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, nullptr, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  if (status != cutlass::Status::kSuccess) {
    throw InternalError(std::string("[product] CUTLASS: ") + cutlassGetStatusString(status));
  }
}

}  // namespace specrt::cuda
