#include "cpu/kernels.h"

namespace specrt::cpu {

const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }

}  // namespace specrt::cpu
