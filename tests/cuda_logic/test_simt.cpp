// The shim itself: that it runs what a GPU would, and notices what a GPU would not.

#include <cmath>
#include <stdexcept>

#include "support.h"

namespace {

using namespace cuda_test;

struct ReverseArgs {
  const float* x;
  float* out;
  bool barrier;
};

// Writes a block's numbers in reverse, through shared memory.
struct Reverse {
  static constexpr int kThreads = 64;
  using Args = ReverseArgs;
  struct Shared {
    float x[kThreads];
  };
  template <class Block>
  static void run(const Block& block, Shared& shared, const Args& args) {
    shared.x[block.thread()] = args.x[block.thread()];
    if (args.barrier) block.sync();
    args.out[block.thread()] = shared.x[kThreads - 1 - block.thread()];
  }
};

TEST(simt_barriers_order_shared_memory) {
  const Floats x = random_floats(64, 1);
  Floats out(64);
  run_in_all_orders<Reverse>({}, {x.data(), out.data(), true}, out);
  for (int i = 0; i < 64; ++i) CHECK_EQ(out[63 - i], x[i]);
}

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

struct Copies {
  static constexpr int kThreads = 32;
  struct Args {
    const float* x;
    float* out;
    bool wait;
  };
  struct Shared {
    alignas(16) float x[2][128];
  };
  template <class Block>
  static void run(const Block& block, Shared& shared, const Args& args) {
    const int at = 4 * block.thread();
    block.copy_async(&shared.x[0][at], args.x + at, 16);
    block.copy_commit();
    block.copy_async(&shared.x[1][at], args.x + at, 8);
    block.copy_commit();
    if (args.wait) block.template copy_wait<1>();
    args.out[block.thread()] = shared.x[0][at];
    block.template copy_wait<0>();
    args.out[32 + block.thread()] = shared.x[1][at + 1] + shared.x[1][at + 2];
  }
};

TEST(simt_copies_arrive_when_they_are_waited_for) {
  const Floats x = random_floats(128, 1);
  Floats out(64);
  run_in_all_orders<Copies>({}, {x.data(), out.data(), true}, out);
  for (int i = 0; i < 32; ++i) {
    CHECK_EQ(out[i], x[4 * i]);
    CHECK_EQ(out[32 + i], x[4 * i + 1]);  // beyond the 8 bytes there are zeros
  }
  run_grid<Copies>({}, {x.data(), out.data(), false});
  for (int i = 0; i < 32; ++i) CHECK(std::isnan(out[i]));
}

template <typename T>
struct Mma {
  static constexpr int kThreads = 32;
  struct Args {
    const T* a;  // [16][16]
    const T* b;  // [16 of k][8]
    float* d;    // [16][8]
  };
  struct Shared {
    alignas(16) T b[16][16];
  };
  // B comes by load_transposed from rows of k, as attention's values do.
  template <class Block>
  static void run(const Block& block, Shared& shared, const Args& args) {
    const int lane = block.thread();
    const int g = lane / 4, c = lane % 4;
    for (int i = lane; i < 256; i += 32) {
      shared.b[i / 16][i % 16] = i % 16 < 8 ? args.b[i / 16 * 8 + i % 16] : T{0};
    }
    block.sync();
    const auto pair = [&](int row, int k) {
      return args.a[row * 16 + k].bits | std::uint32_t{args.a[row * 16 + k + 1].bits} << 16;
    };
    const std::uint32_t a[4] = {pair(g, 2 * c), pair(g + 8, 2 * c), pair(g, 2 * c + 8),
                                pair(g + 8, 2 * c + 8)};
    std::uint32_t v[4];
    block.load_transposed(v, &shared.b[lane % 16][lane / 16 * 8]);
    const std::uint32_t b[2] = {v[0], v[1]};
    float d[4] = {};
    block.template mma<T>(d, a, b);
    for (int i = 0; i < 4; ++i) args.d[(g + i / 2 * 8) * 8 + 2 * c + i % 2] = d[i];
    // The right half of the rows is empty.
    if (v[2] != 0 || v[3] != 0) args.d[0] = 1e9f;
  }
};

template <typename T>
void check_mma() {
  const auto a = as<T>(random_floats(256, 3));
  const auto b = as<T>(random_floats(128, 4));
  Floats d(128);
  run_in_all_orders<Mma<T>>({}, {a.data(), b.data(), d.data()}, d);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) sum += double{to_float(a[i * 16 + k])} * to_float(b[k * 8 + j]);
      CHECK_NEAR(d[i * 8 + j], sum, 1e-5);
    }
  }
}

TEST(simt_matrix_fragments_lie_as_ptx_says) {
  check_mma<Bf16>();
  check_mma<Half>();
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
