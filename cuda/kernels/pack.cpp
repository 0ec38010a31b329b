#include "kernels/pack.h"

#include <cstring>
#include <string>

#include "specrt/error.h"

namespace specrt::cuda {
namespace {

// Where element (row, k) of a matrix is: its block, and in it lane and place among the lane's 16 k.
struct Place {
  std::int64_t block;  // bytes
  int lane;
  int upper;  // 1: of rows g + 8
  int at;     // 0 to 15
};

Place place_of(std::int64_t row, std::int64_t k, std::int64_t columns, Stored stored) {
  const std::int64_t panel = row / kPanelRows;
  const int inside = static_cast<int>(row % kPanelRows);
  const int column = static_cast<int>(k % kBlockColumns);
  return {(panel * k_blocks(columns) + k / kBlockColumns) * block_bytes(stored),
          inside % 8 * 4 + column / 16, inside / 8, column % 16};
}

void check(std::size_t got, std::int64_t expected, const char* what) {
  if (static_cast<std::int64_t>(got) == expected) return;
  throw InternalError(
      expected_got(what, std::to_string(expected) + " values", std::to_string(got)));
}

}  // namespace

std::int64_t packed_bytes(std::int64_t n, std::int64_t k, Stored stored) {
  return panels_of(n) * k_blocks(k) * block_bytes(stored);
}

void pack_plain(std::span<const std::uint16_t> values, std::int64_t first, std::int64_t n,
                std::int64_t k, std::span<std::byte> packed) {
  check(values.size(), n * k, "weight");
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < k; ++c) {
      const Place p = place_of(first + r, c, k, Stored::plain);
      // Step, lane, then the fragment's words: pairs of k, each for rows g and g + 8.
      const int word = p.at % 4 / 2 * 2 + p.upper;
      const std::int64_t at = p.block + (p.at / 4 * 32 + p.lane) * 16 + word * 4 + p.at % 2 * 2;
      std::memcpy(packed.data() + at, &values[static_cast<std::size_t>(r * k + c)], 2);
    }
  }
}

void pack_int8(std::span<const std::int8_t> codes, std::int64_t first, std::int64_t n,
               std::int64_t k, std::span<std::byte> packed) {
  check(codes.size(), n * k, "weight");
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < k; ++c) {
      const Place p = place_of(first + r, c, k, Stored::int8);
      const std::int64_t at = p.block + (p.upper * 32 + p.lane) * 16 + p.at;
      packed[static_cast<std::size_t>(at)] =
          static_cast<std::byte>(codes[static_cast<std::size_t>(r * k + c)]);
    }
  }
}

void pack_int4(std::span<const std::int8_t> codes, std::span<const std::uint16_t> scales,
               std::span<const std::uint16_t> minima, std::int64_t first, std::int64_t n,
               std::int64_t k, std::span<std::byte> packed) {
  const std::int64_t groups = (k + 31) / 32;
  check(codes.size(), n * k, "weight");
  check(scales.size(), n * groups, "scales");
  check(minima.size(), n * groups, "minima");
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < k; ++c) {
      const Place p = place_of(first + r, c, k, Stored::int4);
      const std::int64_t at = p.block + p.lane * 16 + p.upper * 8 + p.at / 2;
      const auto code = static_cast<unsigned>(codes[static_cast<std::size_t>(r * k + c)]) & 15u;
      packed[static_cast<std::size_t>(at)] |= static_cast<std::byte>(code << (4 * (p.at % 2)));
    }
    for (std::int64_t group = 0; group < groups; ++group) {
      const Place p = place_of(first + r, group * 32, k, Stored::int4);
      const std::int64_t at =
          p.block + 512 + (group % 2 * kPanelRows + (first + r) % kPanelRows) * 4;
      std::memcpy(packed.data() + at, &scales[static_cast<std::size_t>(r * groups + group)], 2);
      std::memcpy(packed.data() + at + 2, &minima[static_cast<std::size_t>(r * groups + group)], 2);
    }
  }
}

}  // namespace specrt::cuda
