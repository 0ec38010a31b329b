// The exponential race: exactly the full search's winner, and the law it draws from.

#include <algorithm>
#include <limits>

#include "core/philox.h"
#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::cpu::NoiseKey;
using specrt::cpu::Race;

namespace {

using Ids = std::vector<std::int32_t>;

NoiseKey key_of(std::uint64_t seed, std::uint32_t position) {
  NoiseKey key;
  key.seed = seed * 0x9E3779B97F4A7C15u;
  key.sample_index = static_cast<std::uint32_t>(seed % 3);
  key.position = position;
  key.purpose = static_cast<std::uint32_t>(seed % 4);
  return key;
}

Race run(const Kernels& kernels, const Floats& weights, const Ids& ids, const NoiseKey& key) {
  return kernels.race(weights.data(), ids.empty() ? nullptr : ids.data(),
                      static_cast<std::int64_t>(weights.size()), key);
}

void check_same(const Kernels& kernels, const Floats& weights, const Ids& ids,
                const NoiseKey& key) {
  const Race expected = specrt::reference::race(weights, ids, key);
  const Race got = run(kernels, weights, ids, key);
  CHECK_EQ(got.token, expected.token);
  CHECK(got.key == expected.key);
}

/// exp of normal logits, as a softmax would give.
Floats soft_weights(std::size_t n, std::uint32_t seed, float spread) {
  Floats weights = random_floats(n, seed, spread);
  const float top = *std::max_element(weights.begin(), weights.end());
  for (float& weight : weights) weight = std::exp(weight - top);
  return weights;
}

Ids shuffled_ids(std::size_t n, std::uint32_t seed) {
  Ids ids(2 * n);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(3 * i + i % 2);
  std::mt19937 engine(seed);
  std::shuffle(ids.begin(), ids.end(), engine);
  ids.resize(n);
  return ids;
}

}  // namespace

TEST(kernels_race_is_the_full_search) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : {1u, 2u, 5u, 16u, 63u, 64u, 65u, 200u, 5000u}) {
      for (const float spread : {0.0f, 1.0f, 4.0f, 12.0f}) {
        for (std::uint32_t seed = 0; seed < 20; ++seed) {
          Floats weights = soft_weights(n, seed + 100, spread);
          for (std::size_t i = seed % 7; i < n; i += 5) weights[i] = 0.0f;
          check_same(kernels, weights, {}, key_of(seed + 1, 17 * seed));
          check_same(kernels, weights, shuffled_ids(n, seed), key_of(seed + 1, 17 * seed));
        }
      }
    }
  });
}

TEST(kernels_race_weights_that_never_win) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  on_every_isa([&](const Kernels& kernels) {
    for (const std::size_t n : {1u, 31u, 64u, 100u}) {
      for (const float weight : {0.0f, -0.0f, -1.0f, nan}) {
        Floats weights(n, weight);
        CHECK_EQ(run(kernels, weights, {}, key_of(5, 5)).token, -1);
        CHECK_EQ(run(kernels, weights, shuffled_ids(n, 1), key_of(5, 5)).token, -1);
        weights[n / 2] = 1e-30f;
        CHECK_EQ(run(kernels, weights, {}, key_of(5, 5)).token, static_cast<std::int64_t>(n / 2));
      }
    }
    CHECK_EQ(kernels.race(nullptr, nullptr, 0, key_of(1, 1)).token, -1);
  });
}

TEST(kernels_race_extreme_weights) {
  on_every_isa([](const Kernels& kernels) {
    const Floats palette = {1e-45f, 1e-40f, 1e-38f, 1e-20f, 1.0f, 1e20f, 3e38f};
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
      std::mt19937 engine(seed);
      const std::size_t lowest = seed % palette.size();
      Floats weights(300);
      for (float& weight : weights) {
        weight = palette[lowest + engine() % (palette.size() - lowest) / (1 + seed % 3)];
      }
      check_same(kernels, weights, {}, key_of(seed, 3));
      check_same(kernels, weights, shuffled_ids(300, seed), key_of(seed, 3));
      std::sort(weights.begin(), weights.end());
      check_same(kernels, weights, {}, key_of(seed, 4));
    }
  });
}

TEST(kernels_race_ties_go_to_the_lower_id) {
  on_every_isa([](const Kernels& kernels) {
    // An id listed twice ties with itself; equal keys of different ids come from weights chosen so
    // that the quotients are equal.
    const NoiseKey key = key_of(9, 9);
    const auto exponential = [&](std::uint32_t id) {
      return -std::log1p(-specrt::uniform_from_bits(
          specrt::noise_bits(key.seed, key.sample_index, key.position, key.purpose, id)));
    };
    for (std::uint32_t a = 0; a < 40; ++a) {
      for (std::uint32_t b = a + 1; b < 40; ++b) {
        const double ratio = exponential(b) / exponential(a);
        for (int tries = 1; tries < 50; ++tries) {
          const float wa = static_cast<float>(tries);
          const float wb = static_cast<float>(tries * ratio);
          if (exponential(a) / wa != exponential(b) / wb) continue;
          const std::int32_t ia = static_cast<std::int32_t>(a), ib = static_cast<std::int32_t>(b);
          CHECK_EQ(run(kernels, {wb, wa}, {ib, ia}, key).token, static_cast<std::int64_t>(a));
          CHECK_EQ(run(kernels, {wa, wb}, {ia, ib}, key).token, static_cast<std::int64_t>(a));
        }
      }
    }
    // Exact ties are rare in double, so infinite weights make them: every key is zero.
    const float inf = std::numeric_limits<float>::infinity();
    CHECK_EQ(run(kernels, {inf, inf, inf}, {30, 7, 12}, key).token, 7);
    CHECK_EQ(run(kernels, {0.0f, inf, inf}, {}, key).token, 1);
  });
}

TEST(kernels_race_same_on_every_isa) {
  const Floats weights = soft_weights(49152, 77, 3.0f);
  for (std::uint32_t position = 0; position < 50; ++position) {
    const Race expected = specrt::reference::race(weights, {}, key_of(4242, position));
    on_every_isa([&](const Kernels& kernels) {
      const Race got = run(kernels, weights, {}, key_of(4242, position));
      CHECK_EQ(got.token, expected.token);
      CHECK(got.key == expected.key);
    });
  }
}

TEST(kernels_race_draws_the_law_of_its_weights) {
  on_every_isa([](const Kernels& kernels) {
    const Floats weights = {0.5f, 2.0f, 0.0f, 1.0f, 0.25f, 4.0f, 0.125f, 1.5f, 3.0f, 0.75f};
    const auto law = specrt::reference::normalized(doubles(weights));
    const int draws = 20000;
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
      std::vector<int> counts(weights.size());
      for (int i = 0; i < draws; ++i) {
        ++counts[run(kernels, weights, {}, key_of(seed, static_cast<std::uint32_t>(i))).token];
      }
      double chi_square = 0.0;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        if (weights[i] == 0.0f) {
          CHECK_EQ(counts[i], 0);
          continue;
        }
        const double expected = draws * law[i];
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
      }
      CHECK(chi_square < 26.1);  // 8 degrees of freedom, one in a thousand
    }
  });
}
