#pragma once

#include <cstdint>
#include <string>

namespace specrt::python {

/// What everything with a KV cache of its own is given, a decoder or a drafter.
template <typename Options>
Options cache_options(std::int64_t kv_cache_bytes, std::int64_t max_model_len, int max_batch_size,
                      int max_rows, int block_size, const std::string& kv_cache_dtype,
                      bool enable_prefix_caching) {
  Options options;
  options.kv_cache_bytes = kv_cache_bytes;
  options.max_model_len = max_model_len;
  options.max_batch_size = max_batch_size;
  options.max_rows = max_rows;
  options.block_size = block_size;
  options.kv_cache_dtype = kv_cache_dtype;
  options.enable_prefix_caching = enable_prefix_caching;
  return options;
}

}  // namespace specrt::python
