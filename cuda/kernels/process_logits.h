#pragma once

// Penalties, biases and masks, in the order of decode/logits_state.cpp, each row with the history
// of its own node.

#include "kernels/sampling_state.h"

namespace specrt::cuda {

struct ProcessArgs {
  const float* logits = nullptr;  ///< [rows, stride]
  /// [rows, stride], which may be the logits' own place; rows of neutral sequences are left alone.
  float* processed = nullptr;
  std::int64_t stride = 0;
  std::int64_t vocab = 0;
  const LogitRow* rows = nullptr;
  const SamplingState* states = nullptr;
  DraftTrees trees;
  /// Of a drafter with ids of its own, those of the trees' tokens; all lists have them already.
  const std::int32_t* draft_of_target = nullptr;
  const std::uint32_t* grammar_bits = nullptr;  ///< [masks, ceil(vocab / 32)]
};

/// Grid: rows.
struct ProcessLogits {
  static constexpr int kThreads = 512;
  /// Longest path whose tokens count; deeper trees are not drafted.
  static constexpr int kMostDepth = 256;
  using Args = ProcessArgs;
  struct Shared {
    std::int32_t path[kMostDepth];  // from the root down
    std::int32_t length;
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const LogitRow row = args.rows[block.x()];
    if (row.sequence < 0) return;
    const SamplingState& state = args.states[row.sequence];
    if (state.neutral) return;
    const float* from = args.logits + block.x() * args.stride;
    float* x = args.processed + block.x() * args.stride;
    const int thread = block.thread();
    if (thread == 0) find_path(shared, args, row);
    for (std::int64_t i = thread; i < args.vocab; i += kThreads) x[i] = from[i];
    block.sync();

    if (state.penalties) {
      for (int i = thread; i < state.seen_count; i += kThreads) {
        const SeenToken seen = state.seen[i];
        penalise(state, seen.in_output + on_path(shared, seen.id), x[seen.id]);
      }
      // Tokens that only the path has: each where it stands first.
      for (int i = thread; i < shared.length; i += kThreads) {
        const std::int32_t id = shared.path[i];
        bool first = !has_seen(state, id);
        for (int j = 0; j < i; ++j) first = first && shared.path[j] != id;
        if (first) penalise(state, on_path(shared, id), x[id]);
      }
      block.sync();
    }
    // One thread, since an id may come twice.
    if (thread == 0) {
      for (int i = 0; i < state.bias_count; ++i) x[state.biases[i].id] += state.biases[i].bias;
    }
    if (state.bias_count > 0) block.sync();

    const std::int64_t words = (args.vocab + 31) / 32;
    const std::uint32_t* grammar = row.bits < 0 ? nullptr : args.grammar_bits + row.bits * words;
    if (state.allowed != nullptr || grammar != nullptr) {
      for (std::int64_t i = thread; i < args.vocab; i += kThreads) {
        std::uint32_t bits = 0xFFFFFFFFu;
        if (state.allowed != nullptr) bits &= state.allowed[i / 32];
        if (grammar != nullptr) bits &= grammar[i / 32];
        if ((bits >> (i % 32) & 1u) == 0) x[i] = -infinity();
      }
      block.sync();
    }
    for (int i = thread; i < state.word_count; i += kThreads) {
      const BadWord word = state.words[i];
      if (ends_with(shared, state, state.word_tokens + word.begin, word.length - 1)) {
        x[state.word_tokens[word.begin + word.length - 1]] = -infinity();
      }
    }
    if (state.generated + shared.length < state.min_tokens) {
      for (int i = thread; i < state.stop_count; i += kThreads) x[state.stops[i]] = -infinity();
    }
  }

 private:
  SPECRT_KERNEL static void find_path(Shared& shared, const Args& args, const LogitRow& row) {
    const DraftTrees& trees = args.trees;
    const auto at = [&](int node) { return (row.sequence * trees.most_nodes + node) * trees.step; };
    int length = 0;
    for (int node = row.node; node >= 0; node = trees.parents[at(node)]) ++length;
    shared.length = length;
    for (int node = row.node; node >= 0; node = trees.parents[at(node)]) {
      const std::int32_t token = trees.tokens[at(node)];
      shared.path[--length] = args.draft_of_target == nullptr ? token : args.draft_of_target[token];
    }
  }

  SPECRT_KERNEL static std::int32_t on_path(const Shared& shared, std::int32_t id) {
    std::int32_t count = 0;
    for (int i = 0; i < shared.length; ++i) count += shared.path[i] == id ? 1 : 0;
    return count;
  }

  SPECRT_KERNEL static bool has_seen(const SamplingState& state, std::int32_t id) {
    int low = 0;
    int high = state.seen_count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (state.seen[middle].id < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < state.seen_count && state.seen[low].id == id;
  }

  SPECRT_KERNEL static void penalise(const SamplingState& state, std::int32_t in_output, float& x) {
    x = x > 0.0f ? x / state.repetition : x * state.repetition;
    if (in_output == 0) return;
    x -= state.frequency * static_cast<float>(in_output);
    x -= state.presence;
  }

  // Whether history and path end with `count` tokens.
  SPECRT_KERNEL static bool ends_with(const Shared& shared, const SamplingState& state,
                                      const std::int32_t* tokens, int count) {
    if (state.tail_count + shared.length < count) return false;
    for (int back = 1; back <= count; ++back) {
      const int at = shared.length - back;
      const std::int32_t token = at >= 0 ? shared.path[at] : state.tail[state.tail_count + at];
      if (token != tokens[count - back]) return false;
    }
    return true;
  }
};

}  // namespace specrt::cuda
