#pragma once

#include "model/runner.h"

namespace specrt {

/// What a decoder's options and a draft model's say alike of the Runner below them; the team is
/// left to them.
template <typename Options>
RunnerOptions shared_runner_options(const Options& options) {
  RunnerOptions out;
  out.kv_cache_bytes = options.kv_cache_bytes;
  out.max_model_len = options.max_model_len;
  out.max_batch_size = options.max_batch_size;
  out.max_rows = options.max_rows;
  out.block_size = options.block_size;
  out.kv_cache_dtype = options.kv_cache_dtype;
  out.prefix_reuse = options.enable_prefix_caching;
  out.poison = options.check_invariants;
  out.cpu_isa = options.cpu_isa;
  out.device = options.device;
  return out;
}

}  // namespace specrt
