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

}  // namespace
}  // namespace specrt::cpu
