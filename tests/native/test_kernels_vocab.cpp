// Reductions over the vocabulary: maximum, sums of exponentials.

#include <algorithm>
#include <cfloat>
#include <limits>

#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::cpu::ArgMax;

namespace {

const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

ArgMax arg_max(const Kernels& kernels, const Floats& x) {
  return kernels.arg_max(x.data(), static_cast<std::int64_t>(x.size()));
}

}  // namespace

TEST(kernels_arg_max_finds_the_first_largest) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : {1u, 2u, 15u, 16u, 17u, 31u, 33u, 64u, 100u, 4095u, 4097u, 9001u}) {
      const Floats x = random_floats(n, static_cast<std::uint32_t>(n));
      const ArgMax best = arg_max(kernels, x);
      const auto expected = std::max_element(x.begin(), x.end()) - x.begin();
      CHECK_EQ(best.index, expected);
      CHECK_EQ(best.value, x[expected]);
      CHECK(best.finite);
    }
    // Every pair of places, as ties and as a single largest.
    const std::size_t n = 77;
    for (std::size_t a = 0; a < n; ++a) {
      for (std::size_t b = a; b < n; ++b) {
        Floats x(n, -3.0f);
        x[a] = x[b] = 5.0f;
        const ArgMax best = arg_max(kernels, x);
        CHECK_EQ(best.index, static_cast<std::int64_t>(a));
        CHECK_EQ(best.value, 5.0f);
      }
    }
    // Ties across chunks, both zeros, and a largest beside -inf.
    Floats x(9000, 0.0f);
    x[0] = -0.0f;
    CHECK_EQ(arg_max(kernels, x).index, 0);
    std::fill(x.begin(), x.end(), -kInf);
    x[4099] = x[8500] = -FLT_MAX;
    CHECK_EQ(arg_max(kernels, x).index, 4099);
    CHECK(arg_max(kernels, x).finite);
  });
}

TEST(kernels_arg_max_says_when_entries_are_not_finite) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : {1u, 7u, 16u, 45u, 64u, 77u}) {
      for (std::size_t at = 0; at < n; ++at) {
        for (const float bad : {kNan, -kNan, kInf}) {
          Floats x = random_floats(n, 31);
          x[at] = bad;
          CHECK(!arg_max(kernels, x).finite);
          std::fill(x.begin(), x.end(), -kInf);
          x[at] = bad;
          CHECK(!arg_max(kernels, x).finite);
        }
        Floats x(n, -kInf);
        CHECK(!arg_max(kernels, x).finite);
        x[at] = 1.0f;
        CHECK(arg_max(kernels, x).finite);
        CHECK_EQ(arg_max(kernels, x).index, static_cast<std::int64_t>(at));
      }
    }
    Floats x = random_floats(20000, 32);
    x[12345] = kNan;
    CHECK(!arg_max(kernels, x).finite);
  });
}

TEST(kernels_exponential_accuracy) {
  on_every_isa([](const Kernels& kernels) {
    Floats x;
    for (int i = 0; i <= 200000; ++i) x.push_back(-87.3f + 175.9f * static_cast<float>(i) / 2e5f);
    for (int i = -125; i <= 127; ++i) x.push_back(static_cast<float>(i) * 0.69314718f);
    const std::int64_t n = static_cast<std::int64_t>(x.size());
    Floats out(x.size());
    kernels.exp_weights(x.data(), n, 0.0f, 1.0f, out.data());
    double worst = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = std::exp(static_cast<double>(x[i]));
      worst = std::max(worst, std::fabs(out[i] - expected) / expected);
    }
    CHECK(worst < 2 * 0x1p-23);
    const Floats edge = {0.0f, -0.0f, -87.34f, -88.0f, -1e10f, -FLT_MAX, -kInf, 89.0f, kInf, kNan};
    const Floats expected = {1.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, kInf, kInf, kNan};
    kernels.exp_weights(edge.data(), 10, 0.0f, 1.0f, out.data());
    for (std::size_t i = 0; i < 9; ++i) CHECK_EQ(out[i], expected[i]);
    CHECK(std::isnan(out[9]));
  });
}

TEST(kernels_exp_sum_and_weights_agree) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : {1u, 15u, 64u, 65u, 4096u, 4097u, 20000u, 49152u}) {
      Floats x = random_floats(n, 33, 4.0f);
      if (n > 20) x[17] = -kInf;
      const std::int64_t count = static_cast<std::int64_t>(n);
      const float top = *std::max_element(x.begin(), x.end());
      for (const float inverse : {1.0f, 1.4285715f, 0.5f}) {
        Floats out(n + 1, -7.0f);
        const double sum = kernels.exp_sum(x.data(), count, top, inverse);
        const double stored = kernels.exp_weights(x.data(), count, top, inverse, out.data());
        CHECK(sum == stored);
        CHECK_EQ(out[n], -7.0f);
        const auto expected = specrt::reference::exp_weights(doubles(x), top, inverse);
        double total = 0.0;
        for (std::size_t i = 0; i < n; ++i) {
          // The argument is rounded to float first, which weighs more the larger it is.
          CHECK_NEAR(out[i], expected[i], 5e-6 * expected[i] + 1e-37);
          total += expected[i];
        }
        CHECK_NEAR(sum, total, 2e-6 * total);
      }
    }
  });
}
