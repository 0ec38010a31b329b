#pragma once

#include <array>
#include <cstdint>

// All of it constexpr, which is what lets CUDA kernels call the very same functions.

namespace specrt {

/// What a random number is for; streams of different purposes are independent.
enum class Purpose : std::uint32_t {
  target_choice = 0,  ///< the target's own choice, read by coupled drafters too
  draft = 1,
  accept = 2,
  residual = 3,
};

/// The word that stands for a purpose in a stream's key. Where what happens at a position depends
/// on noise of later positions (block verification looks at a whole draft before it decides), a
/// round that starts at `round_start` must not meet that noise again: each round has streams of its
/// own.
constexpr std::uint32_t purpose_word(Purpose purpose) {
  return static_cast<std::uint32_t>(purpose);
}
constexpr std::uint32_t purpose_word(Purpose purpose, std::int64_t round_start) {
  return purpose_word(purpose) + 4u * (static_cast<std::uint32_t>(round_start) + 1u);
}

/// Philox4x32-10 (Salmon et al., SC'11). `key` is the seed, low word first.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// The 32 random bits of vocabulary id `id`: word id % 4 of the block with
/// counter = {id / 4, position, sample_index, purpose} and key = seed.
constexpr std::uint32_t noise_bits(std::uint64_t seed, std::uint32_t sample_index,
                                   std::uint32_t position, std::uint32_t purpose,
                                   std::uint32_t id) {
  const auto block =
      philox4x32({id / 4, position, sample_index, purpose},
                 {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return block[id % 4];
}

/// Open-interval uniform: (bits + 1/2) / 2^32, exact in double.
constexpr double uniform_from_bits(std::uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

}  // namespace specrt
