// AVX-512's products of whole numbers with the instructions made for them (VNNI). The sums are the
// same, so this is no level of its own.

#include "cpu/vec_avx512.h"
// After the vectors:
#include "cpu/body_codes.h"

namespace specrt::cpu {

void fill_vnni(Kernels& table) { fill_codes(table); }

}  // namespace specrt::cpu
