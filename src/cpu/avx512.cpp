#include "cpu/vec_avx512.h"
// After the vectors:
#include "cpu/body_codes.h"
#include "cpu/body_gemm.h"
#include "cpu/body_math.h"
// After the exponential:
#include "cpu/body_attention_vector.h"
#include "cpu/body_kv.h"
#include "cpu/body_race.h"
#include "cpu/body_vocab.h"
// After all:
#include "cpu/body_table.h"

namespace specrt::cpu {
namespace {
constexpr Kernels kTable = table_named("avx512");
}  // namespace

const Kernels* avx512_kernels() { return &kTable; }

}  // namespace specrt::cpu
