#include "decode/suffix_cache.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "specrt/error.h"

namespace specrt {
namespace {

using Reading = std::shared_lock<std::shared_mutex>;

}  // namespace

SuffixCache::SuffixCache(std::int64_t max_depth, std::int64_t max_requests,
                         std::int64_t max_tokens) {
  if (max_requests < 0) {
    throw InvalidArgument(
        expected_got("max_cached_requests", "an integer >= 0", std::to_string(max_requests)));
  }
  if (max_tokens < 0) {
    throw InvalidArgument(
        expected_got("max_cached_tokens", "an integer >= 0", std::to_string(max_tokens)));
  }
  state_ = std::make_unique<State>(max_depth, max_requests, max_tokens);
}

SuffixCache::~SuffixCache() = default;

void SuffixCache::add(std::span<const TokenId> response) {
  State& s = *state_;
  const auto size = std::min(static_cast<std::int64_t>(response.size()), s.max_tokens);
  if (size == 0 || s.max_requests == 0) return;
  const std::unique_lock writing(s.mutex);
  while (s.trie.texts() >= s.max_requests || s.trie.tokens() + size > s.max_tokens) {
    s.trie.evict();
  }
  s.trie.append(response.last(static_cast<std::size_t>(size)));
  s.trie.close();
}

void SuffixCache::set_vocabulary(std::int64_t size) {
  State& s = *state_;
  const std::unique_lock writing(s.mutex);
  if (size < 1 || (s.vocabulary != 0 && s.vocabulary != size)) {
    throw InvalidArgument(expected_got(
        "suffix cache",
        s.vocabulary == 0
            ? "a vocabulary"
            : "one of responses over a vocabulary of " + std::to_string(size) + " tokens",
        std::to_string(s.vocabulary == 0 ? size : s.vocabulary)));
  }
  s.vocabulary = size;
}

std::int64_t SuffixCache::max_depth() const { return state_->max_depth; }

std::int64_t SuffixCache::requests() const {
  const Reading reading(state_->mutex);
  return state_->trie.texts();
}

std::int64_t SuffixCache::tokens() const {
  const Reading reading(state_->mutex);
  return state_->trie.tokens();
}

std::int64_t SuffixCache::bytes() const {
  const Reading reading(state_->mutex);
  return static_cast<std::int64_t>(sizeof(State) - sizeof(SuffixTrie)) + state_->trie.bytes();
}

std::int64_t SuffixCache::max_bytes() const {
  return static_cast<std::int64_t>(sizeof(State)) +
         SuffixTrie::bytes_for(state_->max_depth, state_->max_tokens);
}

void SuffixCache::check_invariants() const {
  const Reading reading(state_->mutex);
  state_->trie.check_invariants();
}

}  // namespace specrt
