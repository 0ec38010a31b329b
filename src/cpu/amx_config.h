#pragma once

#include <cstdint>

namespace specrt::cpu {
namespace {

/// What _tile_loadconfig reads: bytes of a row and rows, by tile.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t columns[16] = {};
  std::uint8_t rows[16] = {};
};

/// Tiles 0-3 accumulate, 4-5 hold lines of x, 6-7 weights.
inline void configure(std::int64_t lines) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.columns[tile] = 64;
    config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? lines : 16);
  }
  _tile_loadconfig(&config);
}

}  // namespace
}  // namespace specrt::cpu
