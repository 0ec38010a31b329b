#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "decode/head_features.h"
#include "decode/head_memory.h"
#include "model/runner.h"

namespace specrt {

/// Further modules behind a head (multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section
/// 2.2). Module k, counted from 1, reads at position i what module k - 1 made of it, and token
/// i + k; so the last token reaches it k - 1 positions further back than the head, which is module
/// 1. Each has a KV cache of its own and is run over every committed position. Behind the last
/// token it reads drafted ones: the row of a drafted token at depth d stands d - 1 positions behind
/// the module's committed ones, and reads the state of the token before it in the module before.
class HeadModules {
 public:
  /// Rows of one sequence that the head has just run.
  struct Piece {
    SequenceId id = 0;
    std::int64_t first = 0;           ///< position of the first
    std::int64_t row = 0;             ///< in the head's pass
    std::span<const TokenId> tokens;  ///< that they read
  };

  HeadModules(std::span<const Model> later, const Model& target, const HeadSizes& sizes,
              const RunnerOptions& runner, std::int64_t target_vocab, bool remembers);

  bool any() const { return !runners_.empty(); }
  std::int64_t count() const { return static_cast<std::int64_t>(runners_.size()) + 1; }
  /// Module k, from 2.
  Runner& runner(std::int64_t k) { return *runners_[static_cast<std::size_t>(k - 2)]; }

  bool can_add(std::int64_t positions) const;
  /// Enters a sequence with room for its first `positions`; returns how many are committed in all
  /// of them, at most `known`. It will have at most `limit`, of a text of `max_length` tokens.
  std::int64_t admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length,
                     std::int64_t limit, std::int64_t positions, std::int64_t known);
  /// Whether there are blocks for its first `positions` in every module.
  bool reserve(SequenceId id, std::int64_t positions);
  void release(SequenceId id);
  /// `tokens` are the sequence's.
  void learn(SequenceId id, std::span<const TokenId> tokens);
  /// Runs what follows from a pass of the head.
  /// The pass has left its states at input().
  void follow(std::span<const Piece> pieces);
  /// Where the head's pass leaves a row's state, for module 2 to read.
  float* input(std::int64_t row) const { return outputs_[0].row(row); }
  /// What module k made of its last committed position, [hidden]; k is not the last.
  const float* last_state(SequenceId id, std::int64_t k) const;

  MemoryUse memory() const;  ///< but for the workspace
  void check_invariants() const;

 private:
  struct State {
    std::vector<std::vector<TokenId>> keys;  // of module 2, 3, ...: see HeadKeys
    std::int64_t place = 0;                  // of last_
  };

  float* last_row(const State& state, std::int64_t k) const {
    return last_.row(state.place * std::ssize(runners_) + k - 1);
  }

  std::vector<std::unique_ptr<Runner>> runners_;
  std::vector<HeadKeys> keys_;
  bool remembers_ = false;
  std::unordered_map<SequenceId, State> states_;
  // By row of its pass, of the module before; two take turns.
  std::array<HeldRows, 2> outputs_;
  HeldRows last_;  // [sequences, modules but the last], [hidden] each
  std::vector<std::int64_t> places_;
  std::vector<const float*> inputs_;
  std::vector<float*> next_outputs_;
  /// By piece: where its rows begin in the pass of the module before and in this one, and at which
  /// position.
  struct Span {
    std::int64_t first = 0;
    std::int64_t row = 0;
    std::int64_t count = 0;
  };
  std::vector<Span> before_;
  std::vector<Span> now_;
};

}  // namespace specrt
