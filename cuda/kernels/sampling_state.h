#pragma once

// What choosing a token has to know, in device memory: a sequence's parameters and history, the
// draft trees, and which row of logits stands for which node.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

/// A token that prompt or output holds; sorted by id.
struct SeenToken {
  std::int32_t id;
  std::int32_t in_output;  ///< how often; 0: in the prompt alone
};

struct TokenBias {
  std::int32_t id;
  float bias;
};

/// Tokens [begin, begin + length) of SamplingState::word_tokens, which may not be completed.
struct BadWord {
  std::int32_t begin;
  std::int32_t length;
};

/// One sequence's SamplingParams and LogitsState (decode/logits_state.h).
struct SamplingState {
  bool neutral = true;  ///< logits pass unchanged whatever the history
  float repetition = 1.0f;
  float frequency = 0.0f;
  float presence = 0.0f;
  bool penalties = false;
  const SeenToken* seen = nullptr;
  std::int32_t seen_count = 0;
  const TokenBias* biases = nullptr;
  std::int32_t bias_count = 0;
  const std::uint32_t* allowed = nullptr;  ///< a bit a token, or null
  const BadWord* words = nullptr;
  std::int32_t word_count = 0;
  const std::int32_t* word_tokens = nullptr;
  const std::int32_t* tail = nullptr;  ///< the last tokens so far, as many as the longest bad word
  std::int32_t tail_count = 0;
  std::int32_t generated = 0;
  std::int32_t min_tokens = 0;
  const std::int32_t* stops = nullptr;
  std::int32_t stop_count = 0;

  float temperature = 0.0f;  ///< 0: greedy
  float inv_temperature = 0.0f;
  std::int32_t top_k = 0;  ///< 0: no limit
  double top_p = 1.0;
  double min_p = 0.0;
  std::uint64_t seed = 0;
  std::uint32_t sample_index = 0;
  std::int32_t limit = 1;     ///< tokens that this round may emit, >= 1
  std::int32_t root_row = 0;  ///< its first row of logits; its draft's nodes follow
  std::int32_t nodes = 0;     ///< of its draft
};

/// Drafts of all sequences: [sequences, most_nodes], parents before children, -1 the root.
struct DraftTrees {
  const std::int32_t* tokens = nullptr;
  const std::int32_t* parents = nullptr;
  std::int64_t most_nodes = 0;
  std::int64_t step = 1;  ///< from a node's entries to the next one's
};

/// A row of logits: those behind `node` of a sequence's draft, or behind its last committed token.
struct LogitRow {
  std::int32_t sequence = -1;  ///< negative: padding of a captured graph
  std::int32_t node = -1;
  std::int32_t position = 0;  ///< absolute, of the token to choose
  std::int32_t bits = -1;     ///< which of the rounds' grammar masks; -1: none
};

/// Why a row has no choice; stored in its place.
inline constexpr std::int32_t kNotFinite = -1;  ///< NaN, +inf, or nothing but -inf
inline constexpr std::int32_t kAllMasked = -2;  ///< no token that may come next

}  // namespace specrt::cuda
