// What the filters of the sampler are made of: shares above a floor, ids between two values, masks
// of bits.

#include <algorithm>
#include <cfloat>
#include <limits>

#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::cpu::Share;

namespace {

using Ids = std::vector<std::int32_t>;

const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();
const std::size_t kSizes[] = {1u,  2u,  3u,   5u,   8u,    15u,   16u,   17u,   31u,
                              33u, 64u, 100u, 129u, 4095u, 4096u, 4097u, 12345u};

std::int64_t size_of(const Floats& x) { return static_cast<std::int64_t>(x.size()); }

Ids between(const Floats& x, float low, float high) {
  Ids ids;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] >= low && x[i] < high) ids.push_back(static_cast<std::int32_t>(i));
  }
  return ids;
}

void check_between(const Kernels& kernels, const Floats& x, float low, float high) {
  Ids got(x.size() + 1, -7);
  const std::int64_t count = kernels.ids_between(x.data(), size_of(x), low, high, got.data());
  CHECK_EQ(got.back(), -7);
  got.resize(static_cast<std::size_t>(count));
  CHECK(got == between(x, low, high));
}

/// Values of which many are equal.
Floats few_values(std::size_t n, std::uint32_t seed) {
  Floats x = random_floats(n, seed, 3.0f);
  for (float& value : x) value = std::round(value);
  return x;
}

}  // namespace

TEST(kernels_share_from_counts_and_adds) {
  on_every_isa([](const Kernels& kernels) {
    CHECK_EQ(kernels.share_from(nullptr, nullptr, 0, 0.0f).count, 0);
    for (const std::size_t n : kSizes) {
      Floats x = few_values(n, static_cast<std::uint32_t>(n));
      if (n > 4) x[n / 2] = -kInf;
      Floats weights = random_floats(n, 5);
      for (float& weight : weights) weight = std::fabs(weight);
      for (const float floor : {-kInf, -FLT_MAX, -4.0f, 0.0f, 0.5f, 1.0f, 3.0f, 100.0f, kInf}) {
        double sum = 0.0;
        std::int64_t count = 0;
        for (std::size_t i = 0; i < n; ++i) {
          if (x[i] < floor) continue;
          sum += double{weights[i]};
          ++count;
        }
        const Share share = kernels.share_from(x.data(), weights.data(), size_of(x), floor);
        CHECK_EQ(share.count, count);
        CHECK_NEAR(share.sum, sum, 2e-6 * sum);
        const Share counted = kernels.share_from(x.data(), nullptr, size_of(x), floor);
        CHECK_EQ(counted.count, count);
        CHECK_EQ(counted.sum, 0.0);
      }
    }
  });
}

TEST(kernels_share_of_all_is_the_sum_of_the_weights) {
  // What is above the lowest floor must be all of it, bit for bit: else top_p = 1 - 1e-9 would look
  // for weight that is not there.
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : kSizes) {
      const Floats x = random_floats(n, 6, 2.0f);
      Floats weights(n);
      const float top = *std::max_element(x.begin(), x.end());
      const double sum = kernels.exp_weights(x.data(), size_of(x), top, 1.3f, weights.data());
      CHECK(kernels.share_from(x.data(), weights.data(), size_of(x), -FLT_MAX).sum == sum);
    }
  });
}

TEST(kernels_ids_between_are_all_and_ascending) {
  on_every_isa([](const Kernels& kernels) {
    CHECK_EQ(kernels.ids_between(nullptr, 0, 0.0f, 1.0f, nullptr), 0);
    for (const std::size_t n : kSizes) {
      Floats x = few_values(n, static_cast<std::uint32_t>(n) + 1);
      for (const float low : {-kInf, -3.0f, 0.0f, 2.0f, 9.0f}) {
        for (const float high : {-2.0f, 0.0f, 1.0f, 2.5f, kInf})
          check_between(kernels, x, low, high);
      }
      // One in each place, alone.
      for (std::size_t at = 0; at < n; at += 1 + n / 77) {
        Floats one(n, -kInf);
        one[at] = 1.0f;
        check_between(kernels, one, -FLT_MAX, kInf);
      }
      // NaN and the ends themselves.
      for (const float odd : {kNan, -kNan, kInf, -kInf, -0.0f}) {
        x[n / 2] = odd;
        check_between(kernels, x, -kInf, kInf);
        check_between(kernels, x, 0.0f, kInf);
        check_between(kernels, x, -kInf, 0.0f);
      }
    }
  });
}

TEST(kernels_keep_bits_leaves_the_rest_alone) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : kSizes) {
      std::mt19937 engine(static_cast<std::uint32_t>(n));
      std::vector<std::uint32_t> bits((n + 31) / 32);
      for (std::size_t word = 0; word < bits.size(); ++word) {
        const std::uint32_t palette[] = {0u, ~0u, static_cast<std::uint32_t>(engine()), 1u << 31};
        bits[word] = palette[engine() % 4];
      }
      Floats x = random_floats(n + 1, 9);
      if (n > 3) x[n - 2] = kNan;
      Floats expected = x;
      for (std::size_t id = 0; id < n; ++id) {
        if ((bits[id / 32] >> (id % 32) & 1u) == 0) expected[id] = -kInf;
      }
      kernels.keep_bits(x.data(), static_cast<std::int64_t>(n), bits.data());
      CHECK(same_bits(x.data(), expected.data(), n + 1));
    }
  });
}
