#pragma once

// Coupled verification (Daliri et al., 2408.07978) of all drafts: from the root, the walk goes on
// into the child that carries the target's own choice, as long as there is one (decode/verify.h).

#include "kernels/sampling_state.h"

namespace specrt::cuda {

/// How a walk ended; the values of specrt::WalkEnd, and an error.
enum class Walked : std::int32_t { mismatch = 1, stop = 2, length = 3, failed = 4 };

/// What a round comes to for a sequence, as int32 in one array, so that one copy brings it all:
///   [0] how it ended   [1] tokens emitted   [2] nodes accepted   [3] kNotFinite or kAllMasked
///   then most_nodes + 1 tokens, as many log-probabilities (float), and most_nodes accepted nodes
struct Verdict {
  static constexpr std::int64_t kHead = 4;
  static constexpr std::int64_t size(std::int64_t most_nodes) { return kHead + 3 * most_nodes + 2; }
  static constexpr std::int64_t tokens() { return kHead; }
  static constexpr std::int64_t logprobs(std::int64_t most_nodes) { return kHead + most_nodes + 1; }
  static constexpr std::int64_t path(std::int64_t most_nodes) {
    return kHead + 2 * (most_nodes + 1);
  }
};

struct VerifyArgs {
  const SamplingState* states = nullptr;  ///< [sequences]
  DraftTrees trees;
  const std::int32_t* choices = nullptr;  ///< [rows], see choose.h
  const float* logprobs = nullptr;        ///< [rows]
  std::int32_t* verdicts = nullptr;       ///< [sequences, Verdict::size(most_nodes)]
  // Beside the verdicts for commit.h:
  std::int32_t* path = nullptr;         ///< [sequences, most_nodes]
  std::int32_t* path_length = nullptr;  ///< [sequences]
};

/// Grid: sequences.
struct Verify {
  static constexpr int kThreads = simt::kWarp;
  using Args = VerifyArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t sequence = block.x();
    const SamplingState& state = args.states[sequence];
    const std::int64_t most = args.trees.most_nodes;
    const std::int32_t* tokens = args.trees.tokens + sequence * most;
    const std::int32_t* parents = args.trees.parents + sequence * most;
    std::int32_t* verdict = args.verdicts + sequence * Verdict::size(most);
    std::int32_t* path = args.path + sequence * most;
    const bool writes = block.thread() == 0;

    std::int32_t node = -1;
    std::int32_t emitted = 0;
    std::int32_t accepted = 0;
    std::int32_t error = 0;
    Walked end = Walked::mismatch;
    for (;;) {
      const std::int64_t row = std::int64_t{state.root_row} + 1 + node;
      const std::int32_t choice = args.choices[row];
      if (choice < 0) {
        end = Walked::failed;
        error = choice;
        break;
      }
      if (writes) {
        verdict[Verdict::tokens() + emitted] = choice;
        verdict[Verdict::logprobs(most) + emitted] =
            static_cast<std::int32_t>(simt::bits_of(args.logprobs[row]));
      }
      ++emitted;
      // A stop is a stop even on the last token allowed.
      bool stops = false;
      for (int i = block.thread(); i < state.stop_count; i += kThreads) {
        stops = stops || state.stops[i] == choice;
      }
      if (block.any(stops)) {
        end = Walked::stop;
        break;
      }
      if (emitted == state.limit) {
        end = Walked::length;
        break;
      }
      std::int32_t child = INT32_MAX;
      for (std::int32_t i = node + 1 + block.thread(); i < state.nodes; i += kThreads) {
        if (parents[i] == node && tokens[i] == choice && i < child) child = i;
      }
      for (int mask = 16; mask > 0; mask /= 2) {
        const std::int32_t other = block.shuffle_xor(child, mask);
        child = other < child ? other : child;
      }
      if (child == INT32_MAX) break;
      if (writes) {
        path[accepted] = child;
        verdict[Verdict::path(most) + accepted] = child;
      }
      ++accepted;
      node = child;
    }
    if (!writes) return;
    verdict[0] = static_cast<std::int32_t>(end);
    verdict[1] = emitted;
    verdict[2] = accepted;
    verdict[3] = error;
    args.path_length[sequence] = accepted;
  }
};

}  // namespace specrt::cuda
