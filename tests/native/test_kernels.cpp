// Dispatch, and the kernels that work element by element.

#include <algorithm>
#include <cfloat>
#include <limits>

#include "specrt/cpu.h"
#include "specrt/error.h"
#include "test_kernels_support.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace kernel_test;
using specrt::CpuIsa;

TEST(kernels_forced_isa_runs_its_own_table) {
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    const Kernels& table = specrt::cpu::kernels_of(isa);
    CHECK_EQ(std::string(table.name), std::string(specrt::name_of(isa)));
    CHECK(specrt::cpu_isa_from_name(specrt::name_of(isa)) == isa);
    // No function is shared between levels.
    for (const CpuIsa other : specrt::available_cpu_isas()) {
      if (other == isa) continue;
      const auto bf16 = static_cast<int>(Precision::bf16);
      CHECK(table.gemm[bf16] != specrt::cpu::kernels_of(other).gemm[bf16]);
      // The tile unit's level has AVX-512's table but for its products.
      const bool tiles = isa == CpuIsa::amx || other == CpuIsa::amx;
      const bool wide = isa == CpuIsa::avx512 || other == CpuIsa::avx512;
      if (tiles && wide) continue;
      CHECK(table.race != specrt::cpu::kernels_of(other).race);
    }
  }
  CHECK(specrt::cpu_isa_from_name("auto") == specrt::best_cpu_isa());
  CHECK_THROWS(specrt::cpu_isa_from_name("sse9"), specrt::InvalidArgument, "[cpu_isa] expected");
  for (const CpuIsa isa : {CpuIsa::avx2, CpuIsa::avx512, CpuIsa::amx}) {
    const auto available = specrt::available_cpu_isas();
    if (std::find(available.begin(), available.end(), isa) != available.end()) continue;
    CHECK_THROWS(specrt::cpu_isa_from_name(specrt::name_of(isa)), specrt::UnsupportedError, "got");
    CHECK_THROWS(specrt::cpu::kernels_of(isa), specrt::UnsupportedError, "[cpu_isa]");
  }
  CHECK(specrt::default_thread_count() >= 1);
}

#if defined(__x86_64__)
TEST(kernels_fp_mode_is_set_and_restored) {
  const unsigned before = _mm_getcsr();
  const unsigned odd = 0xFFC0;  // flush to zero, denormals are zero, round toward zero
  _mm_setcsr(odd);
  {
    const specrt::cpu::FpMode mode;
    CHECK_EQ(_mm_getcsr() & 0xFFC0u, 0x1F80u);
  }
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK_EQ(after & 0xFFC0u, odd);
}
#endif

TEST(kernels_rms_norm) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::int64_t width : {1, 7, 16, 63, 64, 65, 576, 2049}) {
      const std::int64_t rows = 3, stride = width + 5, out_stride = width + 3;
      const Floats x = random_floats(static_cast<std::size_t>(rows * stride), 1, 3.0f);
      const Floats weight = random_floats(static_cast<std::size_t>(width), 2);
      for (const bool round : {false, true}) {
        Floats out(static_cast<std::size_t>(rows * out_stride), -7.0f);
        kernels.rms_norm(x.data(), stride, weight.data(), 1e-5f, rows, width, round, out.data(),
                         out_stride);
        for (std::int64_t r = 0; r < rows; ++r) {
          const Floats row(x.begin() + r * stride, x.begin() + r * stride + width);
          const auto expected = specrt::reference::rms_norm(doubles(row), doubles(weight), 1e-5);
          for (std::int64_t i = 0; i < width; ++i) {
            CHECK_NEAR(out[r * out_stride + i], expected[i],
                       (round ? 0x1p-8 : 1e-6) * std::fabs(expected[i]) + 1e-30);
          }
          for (std::int64_t i = width; i < out_stride; ++i)
            CHECK_EQ(out[r * out_stride + i], -7.0f);
          Floats alone(static_cast<std::size_t>(width));
          kernels.rms_norm(row.data(), width, weight.data(), 1e-5f, 1, width, round, alone.data(),
                           width);
          CHECK(same_bits(alone.data(), out.data() + r * out_stride, alone.size()));
          if (round) CHECK(rounded_to_bf16(alone) == alone);
        }
      }
    }
  });
}

TEST(kernels_rope) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::int64_t head_dim : {2, 6, 16, 64, 80, 128}) {
      const std::int64_t heads = 3, half = head_dim / 2;
      const Floats x = random_floats(static_cast<std::size_t>(heads * head_dim), 3);
      specrt::reference::Vector angles;
      Floats cosines, sines;
      for (std::int64_t i = 0; i < half; ++i) {
        angles.push_back(1234.0 *
                         std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half)));
        cosines.push_back(static_cast<float>(std::cos(angles.back())));
        sines.push_back(static_cast<float>(std::sin(angles.back())));
      }
      Floats out = x;
      kernels.rope(out.data(), heads, head_dim, cosines.data(), sines.data());
      for (std::int64_t h = 0; h < heads; ++h) {
        const Floats head(x.begin() + h * head_dim, x.begin() + (h + 1) * head_dim);
        const auto expected = specrt::reference::rope(doubles(head), angles);
        for (std::int64_t i = 0; i < head_dim; ++i) {
          CHECK_NEAR(out[h * head_dim + i], expected[i], 1e-6);
        }
      }
    }
  });
}

TEST(kernels_store_and_load) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::uint32_t tiny_nan_bits = 0x7F800001u;  // rounding its bits would make it infinity
  float tiny_nan;
  std::memcpy(&tiny_nan, &tiny_nan_bits, 4);
  on_every_isa([&](const Kernels& kernels) {
    for (const std::size_t n : {1u, 3u, 8u, 17u, 40u, 100u}) {
      Floats x = random_floats(n, 6, 100.0f);
      const Floats special = {1.00390625f, 1.01171875f, inf,     -inf,  nan,
                              tiny_nan,    -0.0f,       FLT_MAX, 1e-40f};
      for (std::size_t i = 0; i < n; i += 2) x[i] = special[(i / 2 + n) % special.size()];
      std::vector<std::uint16_t> stored(n + 1, 0xABCD);
      kernels.store(x.data(), static_cast<std::int64_t>(n), DType::bf16, stored.data());
      Floats back(n + 1, -7.0f);
      kernels.load(stored.data(), static_cast<std::int64_t>(n), DType::bf16, back.data());
      for (std::size_t i = 0; i < n; ++i) {
        CHECK_EQ(stored[i], specrt::cpu::float_to_bf16(x[i]));
        CHECK_EQ(std::isnan(x[i]), std::isnan(back[i]));
        if (!std::isnan(x[i])) CHECK_EQ(back[i], specrt::cpu::bf16_to_float(stored[i]));
      }
      CHECK_EQ(stored[n], 0xABCD);
      CHECK_EQ(back[n], -7.0f);
      Floats copy(n + 1, -7.0f);
      kernels.store(x.data(), static_cast<std::int64_t>(n), DType::f32, copy.data());
      CHECK(same_bits(copy.data(), x.data(), n));
      kernels.load(x.data(), static_cast<std::int64_t>(n), DType::f32, copy.data());
      CHECK(same_bits(copy.data(), x.data(), n));
      CHECK_EQ(copy[n], -7.0f);
    }
  });
  // Halfway cases go to even.
  CHECK_EQ(specrt::cpu::float_to_bf16(1.00390625f), 0x3F80);
  CHECK_EQ(specrt::cpu::float_to_bf16(1.01171875f), 0x3F82);
}
