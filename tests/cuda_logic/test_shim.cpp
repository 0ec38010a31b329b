// What blocks do alike on the host and on a GPU: there these tests show that the host's blocks are
// the GPU's.

#include <cmath>

#include "shim_kernels.h"
#include "support.h"

namespace {

using namespace cuda_test;

TEST(shim_barriers_order_shared_memory) {
  const Floats x = random_floats(64, 1);
  Floats out(64);
  run_in_all_orders<Reverse>({}, {x.data(), out.data(), true}, out);
  for (int i = 0; i < 64; ++i) CHECK_EQ(out[63 - i], x[i]);
}

TEST(shim_copies_arrive_when_they_are_waited_for) {
  const Floats x = random_floats(128, 1);
  Floats out(64);
  run_in_all_orders<Copies>({}, {x.data(), out.data(), true}, out);
  for (int i = 0; i < 32; ++i) {
    CHECK_EQ(out[i], x[4 * i]);
    CHECK_EQ(out[32 + i], x[4 * i + 1]);  // beyond the 8 bytes there are zeros
  }
}

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

TEST(shim_matrix_fragments_lie_as_ptx_says) {
  check_mma<Bf16>();
  check_mma<Half>();
}

TEST(shim_lanes_see_each_other) {
  const Floats x = random_floats(64, 2);
  Floats sums(64), block_sums(64), turned(64);
  std::vector<int> any(64);
  run_grid<Lanes>({}, {sums.data(), block_sums.data(), turned.data(), any.data(), x.data()});
  Floats lanes(x.begin(), x.end());
  for (int mask = 16; mask > 0; mask /= 2) {
    const Floats before = lanes;
    for (int i = 0; i < 64; ++i) lanes[i] = before[i] + before[i ^ mask];
  }
  for (int i = 0; i < 64; ++i) {
    CHECK_EQ(sums[i], lanes[i]);
    CHECK_EQ(block_sums[i], lanes[0] + lanes[32]);
    CHECK_EQ(turned[i], x[i / 32 * 32 + (i + 1) % 32]);
    CHECK_EQ(any[i], i / 32);
  }
}

// Every half, what lies around it, and numbers far and near: the same bits wherever it runs.
TEST(shim_numbers_are_the_hosts) {
  Floats x;
  for (std::uint32_t bits = 0; bits < 0x10000; bits += 3) {
    const float value = to_float(Half{static_cast<std::uint16_t>(bits)});
    if (std::isnan(value)) continue;
    for (const float near : {value, std::nextafter(value, 1e30f), value * 1.0003f}) {
      x.push_back(near);
    }
  }
  for (float value = -100.0f; value < 100.0f; value += 0.0371f) x.push_back(value);
  for (const float value : {65519.0f, 65520.0f, 3e38f, 1e-40f, INFINITY, -INFINITY}) {
    x.push_back(value);
  }
  const std::size_t n = x.size();
  std::vector<std::uint16_t> half(n), bf16(n);
  Floats back(n), exponential(n);
  run_grid<Numbers>({static_cast<std::int64_t>((n + 127) / 128)},
                    {x.data(), static_cast<std::int64_t>(n), half.data(), bf16.data(), back.data(),
                     exponential.data()});
  for (std::size_t i = 0; i < n; ++i) {
    CHECK_EQ(half[i], from_float<Half>(x[i]).bits);
    CHECK_EQ(bf16[i], from_float<Bf16>(x[i]).bits);
    CHECK_EQ(back[i], to_float(from_float<Half>(x[i])));
    CHECK_EQ(specrt::simt::bits_of(exponential[i]),
             specrt::simt::bits_of(specrt::cuda::exponential(x[i])));
  }
}

}  // namespace
