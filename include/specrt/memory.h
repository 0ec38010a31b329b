#pragma once

#include <cstdint>

#include "specrt/export.h"

namespace specrt {

/// Bytes by purpose.
struct SPECRT_API MemoryUse {
  std::int64_t weights = 0;
  std::int64_t kv_cache = 0;   ///< the pool, scratch slots included
  std::int64_t workspace = 0;  ///< activations, logits, position tables
  std::int64_t other = 0;      ///< drafters' own indexes
  std::int64_t total() const { return weights + kv_cache + workspace + other; }
};

}  // namespace specrt
