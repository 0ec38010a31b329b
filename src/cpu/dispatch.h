#pragma once

#include "cpu/kernels.h"
#include "specrt/cpu.h"

namespace specrt::cpu {

/// The table of a level that available_cpu_isas() lists; throws UnsupportedError otherwise.
const Kernels& kernels_of(CpuIsa isa);

/// Whether AVX-512's products of int8 are there (VNNI).
bool has_vnni();

/// Default rounding and denormals (none flushed, no traps) for the lifetime of the object, then
/// what was there before. One per thread that runs kernels.
class FpMode {
 public:
  FpMode();
  ~FpMode();
  FpMode(const FpMode&) = delete;
  FpMode& operator=(const FpMode&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace specrt::cpu
