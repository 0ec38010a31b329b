#pragma once

#include <shared_mutex>

#include "core/suffix_trie.h"
#include "specrt/suffix.h"

namespace specrt {

struct SuffixCache::State {
  State(std::int64_t depth, std::int64_t requests, std::int64_t tokens)
      : max_depth(depth), max_requests(requests), max_tokens(tokens), trie(depth, tokens) {}

  const std::int64_t max_depth;
  const std::int64_t max_requests;
  const std::int64_t max_tokens;
  mutable std::shared_mutex mutex;
  SuffixTrie trie;
  std::int64_t vocabulary = 0;  // 0: not known
};

}  // namespace specrt
