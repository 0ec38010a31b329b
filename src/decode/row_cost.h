#pragma once

#include "specrt/cpu.h"

namespace specrt {

/// What one more row adds to a pass of one row, as a share of it; measured on a small model, of
/// which larger ones differ little: both costs grow with the weights. What the brake goes by, since
/// with a clock's word drafts would no longer repeat, and a first guess where nothing is measured.
constexpr double row_cost_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::amx:
      return 0.02;
    case CpuIsa::avx512:
      return 0.06;
    case CpuIsa::avx2:
      return 0.1;
    case CpuIsa::scalar:
      return 0.5;
  }
  return 0.5;
}

/// The same on a GPU, by what its kernels are meant to reach; nobody has measured it.
inline constexpr double kCudaRowCost = 0.005;

}  // namespace specrt
