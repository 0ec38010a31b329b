// The host's blocks: that they notice what a GPU would not.

#include <cmath>
#include <stdexcept>

#include "shim_kernels.h"
#include "support.h"

namespace {

using namespace cuda_test;

TEST(simt_a_missing_barrier_shows) {
  const Floats x = random_floats(64, 1);
  Floats forward(64), backward(64);
  run_grid<Reverse>({}, {x.data(), forward.data(), false}, Order::forward);
  run_grid<Reverse>({}, {x.data(), backward.data(), false}, Order::backward);
  CHECK(!same_bits(forward, backward));
}

struct HalfWay {
  static constexpr int kThreads = 64;
  struct Args {};
  struct Shared {};
  template <class Block>
  static void run(const Block& block, Shared&, const Args&) {
    if (block.thread() < 40) block.sync();
  }
};

TEST(simt_a_barrier_that_not_all_reach_throws) {
  CHECK_THROWS(run_grid<HalfWay>({}, {}), std::logic_error, "not all threads");
}

TEST(simt_copies_that_nobody_waits_for_have_not_arrived) {
  const Floats x = random_floats(128, 1);
  Floats out(64);
  run_grid<Copies>({}, {x.data(), out.data(), false});
  for (int i = 0; i < 32; ++i) CHECK(std::isnan(out[i]));
}

TEST(simt_16_bit_floats_convert_as_the_core_does) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(to_float(from_float<Half>(value))));
      continue;
    }
    CHECK_EQ(from_float<Half>(value).bits, half.bits);
    // Just above, just below and half-way to the next one.
    const Half next{static_cast<std::uint16_t>(bits + 1)};
    const float other = to_float(next);
    if ((bits & 0x7FFF) >= 0x7BFF || std::isnan(other)) continue;
    const float middle = static_cast<float>((double{value} + other) / 2);
    CHECK_EQ(from_float<Half>(middle).bits % 2, 0);
    CHECK_EQ(from_float<Half>(std::nextafter(middle, value)).bits, half.bits);
    CHECK_EQ(from_float<Half>(std::nextafter(middle, other)).bits, next.bits);
  }
  CHECK_EQ(from_float<Half>(65519.0f).bits, 0x7BFF);
  CHECK_EQ(from_float<Half>(65520.0f).bits, 0x7C00);
  CHECK_EQ(from_float<Bf16>(1.0f + 0x1p-8f).bits, 0x3F80);
  CHECK_EQ(from_float<Bf16>(1.0f + 0x3p-8f).bits, 0x3F82);
  CHECK(std::isnan(to_float(from_float<Bf16>(std::nanf("")))));
}

TEST(simt_exponential_is_the_function) {
  for (float x = -90.0f; x < 90.0f; x += 0.0371f) {
    const double exact = std::exp(static_cast<double>(x));
    const float got = specrt::cuda::exponential(x);
    if (exact < 1.2e-38) {
      CHECK(got <= 1.2e-38f);
    } else if (exact < 3.4e38) {
      CHECK_NEAR(got / exact, 1.0, 2e-7);
    }
  }
  CHECK_EQ(specrt::cuda::exponential(0.0f), 1.0f);
  CHECK_EQ(specrt::cuda::exponential(-INFINITY), 0.0f);
  CHECK(std::isinf(specrt::cuda::exponential(INFINITY)));
  CHECK(std::isnan(specrt::cuda::exponential(std::nanf(""))));
}

}  // namespace
