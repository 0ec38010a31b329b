#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "specrt/drafter.h"
#include "specrt/export.h"

namespace specrt {

/// Responses of earlier requests, for suffix drafters of one or more decoders with one vocabulary.
/// Safe to use from several threads: drafters look things up side by side, and add one by one.
class SPECRT_API SuffixCache {
 public:
  /// `max_depth` in [1, 4096] bounds a match and its draft together, `max_requests` and
  /// `max_tokens` (>= 0) what is kept: the oldest responses go first. Of a longer response than
  /// `max_tokens` the end is kept. Throws InvalidArgument.
  SuffixCache(std::int64_t max_depth, std::int64_t max_requests, std::int64_t max_tokens);
  ~SuffixCache();
  SuffixCache(const SuffixCache&) = delete;
  SuffixCache& operator=(const SuffixCache&) = delete;

  void add(std::span<const TokenId> response);
  /// Says which vocabulary the responses are of, by its size. Throws InvalidArgument where another
  /// one was said before.
  void set_vocabulary(std::int64_t size);

  std::int64_t max_depth() const;
  std::int64_t requests() const;
  std::int64_t tokens() const;
  std::int64_t bytes() const;  ///< held now
  /// What it can come to hold.
  std::int64_t max_bytes() const;
  /// Throws InternalError where it contradicts itself. For tests: it visits everything.
  void check_invariants() const;

  struct State;
  State& state() const { return *state_; }  ///< for built-in drafters

 private:
  std::unique_ptr<State> state_;
};

/// Names and meanings as vLLM and Arctic Inference have them (`suffix_decoding_...`).
struct SPECRT_API SuffixOptions {
  std::int64_t max_tree_depth = 24;
  double max_spec_factor = 4.0;  ///< vLLM and Arctic: 1.0
  double max_spec_offset = 0.0;
  double min_token_prob = 0.1;
  bool use_tree_spec = false;
  std::shared_ptr<SuffixCache> cache;  ///< of the same depth; null: the request's own text alone
};

/// Suffix decoding (Oliaro et al., arXiv 2411.04975): what most often followed the context's
/// suffix, in the request's own text and in earlier responses. Of all suffixes that occurred, the
/// one counts whose draft scores best, with scores the sum of estimated path probabilities; the
/// longer suffix of equals, the request's own text before the cache. A match of m tokens drafts at
/// most m * max_spec_factor + max_spec_offset, and nothing less likely than min_token_prob.
///
/// Requests whose text depends on their drafts (sampled, with `rejection` or `block`) read their
/// own text alone, so that a seed repeats its text whatever ran before; their responses are kept.
SPECRT_API std::shared_ptr<Drafter> make_suffix_drafter(const SuffixOptions& options = {});

}  // namespace specrt
