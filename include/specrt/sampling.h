#pragma once

#include <cstdint>
#include <vector>

#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

/// How the next token of one sequence is chosen. Filters apply in the order temperature, top_k,
/// top_p, min_p, each on what the one before left, as in Hugging Face transformers.
struct SPECRT_API SamplingParams {
  std::int64_t max_tokens = 16;  ///< tokens to generate, >= 0
  double temperature = 0.0;      ///< < 1e-5 means greedy
  std::int64_t top_k = 0;        ///< 0: no limit
  double top_p = 1.0;            ///< (0, 1]
  double min_p = 0.0;            ///< [0, 1]
  std::uint64_t seed = 0;
  std::uint32_t sample_index = 0;        ///< among the n samples of one prompt
  std::vector<TokenId> stop_token_ids;   ///< each ends the sequence; the model's EOS belongs here
  std::int32_t logprobs = -1;            ///< -1: none; k >= 0: the chosen token's and the top k

  static constexpr double kGreedyBelow = 1e-5;
  bool greedy() const { return temperature < kGreedyBelow; }

  /// Throws InvalidArgument naming the first field out of range.
  void check(std::int64_t vocab_size) const;
};

}  // namespace specrt
