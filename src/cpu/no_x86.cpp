#include "cpu/kernels.h"

namespace specrt::cpu {

const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
void fill_vnni(Kernels&) {}
void fill_amx(Kernels&) {}
bool has_amx_unit() { return false; }

}  // namespace specrt::cpu
