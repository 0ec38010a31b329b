#include "cpu/dispatch.h"

#include <algorithm>

#include "specrt/error.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace specrt::cpu {

// Units that must not hold anything that runs elsewhere.
void fill_vnni(Kernels& table);
void fill_amx(Kernels& table);
bool has_amx_unit();

namespace {

Kernels with_vnni(const Kernels& plain) {
  Kernels made = plain;
  fill_vnni(made);
  return made;
}

const Kernels& avx512_kernels_here() {
  static const Kernels table = has_vnni() ? with_vnni(*avx512_kernels()) : *avx512_kernels();
  return table;
}

}  // namespace

const Kernels* amx_kernels() {
  if (!has_amx_unit() || avx512_kernels() == nullptr) return nullptr;
  static const Kernels table = [] {
    Kernels made = with_vnni(*avx512_kernels());
    fill_amx(made);
    return made;
  }();
  return &table;
}

const Kernels& kernels_of(CpuIsa isa) {
  const auto available = available_cpu_isas();
  if (std::find(available.begin(), available.end(), isa) == available.end()) {
    throw UnsupportedError(
        expected_got("cpu_isa", "a level that this build and machine have", name_of(isa)));
  }
  switch (isa) {
    case CpuIsa::amx:
      return *amx_kernels();
    case CpuIsa::avx512:
      return avx512_kernels_here();
    case CpuIsa::avx2:
      return *avx2_kernels();
    case CpuIsa::scalar:
      break;
  }
  return scalar_kernels();
}

#if defined(__x86_64__)

namespace {
// Everything masked, round to nearest, denormals kept.
constexpr unsigned kDefaultMxcsr = 0x1F80;
}  // namespace

FpMode::FpMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
FpMode::~FpMode() { _mm_setcsr(saved_); }

#elif defined(__aarch64__)

FpMode::FpMode() {
  unsigned long mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  saved_ = static_cast<unsigned>(mode);
  __asm__ volatile("msr fpcr, %0" : : "r"(0ul));
}
FpMode::~FpMode() { __asm__ volatile("msr fpcr, %0" : : "r"(static_cast<unsigned long>(saved_))); }

#else

FpMode::FpMode() = default;
FpMode::~FpMode() = default;

#endif

}  // namespace specrt::cpu
