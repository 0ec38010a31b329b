#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "check.h"
#include "core/philox.h"

namespace {

using specrt::noise_bits;
using specrt::philox4x32;
using Words = std::array<std::uint32_t, 4>;

// Correlation of two streams of uniforms, at most about 1 / sqrt(count) where independent.
template <typename A, typename B>
double correlation(int count, A first, B second) {
  double sum = 0;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::uint32_t>(i);
    sum += (specrt::uniform_from_bits(first(at)) - 0.5) *
           (specrt::uniform_from_bits(second(at)) - 0.5);
  }
  return sum / count * 12.0;
}

}  // namespace

// Random123's kat_vectors, philox4x32 with 10 rounds.
TEST(philox_known_answers) {
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) ==
        (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  CHECK(philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
        (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(philox_noise_is_the_block_of_its_id) {
  const std::uint64_t seed = 0x299f31d0a4093822u;
  for (std::uint32_t id = 0; id < 64; ++id) {
    const Words block = philox4x32({id / 4, 17, 3, 2}, {0xa4093822, 0x299f31d0});
    CHECK_EQ(noise_bits(seed, 3, 17, 2, id), block[id % 4]);
  }
}

// Everything in the key and counter tells streams apart, both halves of the seed included.
TEST(philox_streams_differ) {
  std::set<std::uint32_t> seen;
  std::size_t drawn = 0;
  for (const std::uint64_t seed : {0ull, 1ull, 1ull << 32, ~0ull}) {
    for (const std::uint32_t sample : {0u, 1u, 7u}) {
      for (const std::uint32_t position : {0u, 1u, 4095u}) {
        for (std::uint32_t purpose = 0; purpose < 4; ++purpose) {
          for (std::uint32_t id = 0; id < 16; ++id, ++drawn) {
            seen.insert(noise_bits(seed, sample, position, purpose, id));
          }
        }
      }
    }
  }
  CHECK(seen.size() + 4 >= drawn);  // 2304 draws of 32 bits: a collision or none
}

TEST(philox_streams_are_uncorrelated) {
  const int count = 20000;
  const auto base = [](std::uint32_t id) { return noise_bits(1, 0, 5, 0, id); };
  using Stream = std::uint32_t (*)(std::uint32_t);
  const Stream others[] = {
      [](std::uint32_t id) { return noise_bits(2, 0, 5, 0, id); },
      [](std::uint32_t id) { return noise_bits(1 | 1ull << 32, 0, 5, 0, id); },
      [](std::uint32_t id) { return noise_bits(1, 1, 5, 0, id); },
      [](std::uint32_t id) { return noise_bits(1, 0, 6, 0, id); },
      [](std::uint32_t id) { return noise_bits(1, 0, 5, 1, id); },
      [](std::uint32_t id) { return noise_bits(1, 0, 5, 0, id + 1); },
      [](std::uint32_t id) { return noise_bits(1, 0, id, 0, 5); },
  };
  CHECK_NEAR(correlation(count, base, base), 1.0, 0.05);
  for (const Stream other : others) CHECK_NEAR(correlation(count, base, other), 0.0, 0.035);
}

TEST(philox_uniforms_lie_inside_the_unit_interval) {
  CHECK(specrt::uniform_from_bits(0) > 0.0);
  CHECK(specrt::uniform_from_bits(0xffffffff) < 1.0);
  CHECK(std::isfinite(std::log(-std::log(specrt::uniform_from_bits(0)))));
  CHECK(std::isfinite(std::log(-std::log(specrt::uniform_from_bits(0xffffffff)))));
  std::vector<int> bins(16);
  for (std::uint32_t id = 0; id < 16000; ++id) {
    ++bins[static_cast<std::size_t>(specrt::uniform_from_bits(noise_bits(9, 0, 0, 0, id)) * 16)];
  }
  for (const int count : bins) CHECK_NEAR(count, 1000, 160);  // five sigma
}
