#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/candidate_tree.h"
#include "decode/choose.h"
#include "decode/fill_lists.h"
#include "decode/head_features.h"
#include "decode/head_memory.h"
#include "decode/head_modules.h"
#include "model/cuda_growth.h"
#include "model/runner.h"
#include "specrt/drafter.h"

namespace specrt {

/// Runs a draft head over its own KV cache. A position there is one that the target has processed:
/// its hidden states and the token behind it. Committed positions are run from the target's own
/// states only; draft nodes stand in scratch slots behind them for one propose() and are forgotten.
/// Features that come wait in a store, and are run with the next draft, or all together once the
/// store is full, so rounds without drafts cost a pass now and then and nothing is ever missing.
class HeadDrafter final : public Drafter {
 public:
  HeadDrafter(std::span<const Model> modules, const Model& target, const DraftHeadOptions& options);

  const std::string& name() const override { return options_.name; }
  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override;
  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override;
  void observe(SequenceId, std::span<const TokenId>) override {}
  const TargetFeatures& features() const override { return options_.features; }
  bool wants_features(SequenceId id) const override;
  std::int64_t known_positions(SequenceId id) const override;
  void observe_features(std::span<const ObservedFeatures> batch) override;
  void release(SequenceId id) override;
  MemoryUse memory() const override;
  double step_cost(std::int64_t target_bytes) const override;

 private:
  struct State {
    bool has_room = false;
    std::int64_t limit = 0;           // positions that it may come to have
    std::int64_t known = 0;           // positions whose features have come, or whose K/V are there
    std::int64_t cached = 0;          // positions with K/V
    std::vector<TokenId> keys;        // see HeadKeys
    std::vector<std::int32_t> slots;  // of positions [first(), known) in the store
    std::vector<TokenId> tokens;      // the tokens behind those positions
    std::int64_t first() const { return known - static_cast<std::int64_t>(slots.size()); }
  };
  /// A draft that is being made.
  struct Active {
    const DraftRequest* request = nullptr;
    State* state = nullptr;
    DraftTree* out = nullptr;
    std::int64_t levels = 0;
    bool sampled = false;             // by itself, with a law to tell
    bool lost = false;                // the head gave no numbers
    CandidateTree tree;               // unless sampled
    DraftTree shape;                  // where sampled: which nodes there are to be
    std::vector<std::int32_t> grown;  // by node of the shape: the draft's, or -1
    std::int64_t shape_nodes = -1;
    std::int64_t shape_levels = -1;
    std::int64_t shape_top_k = -1;
  };
  /// A node whose children are wanted, or one above it that a module has still to read.
  struct Row {
    Active* active = nullptr;
    std::int32_t node = -1;   // candidate, or node of the draft where sampled; -1: the root
    std::int32_t shape = -1;  // where sampled: its node of the shape
    std::int64_t row = -1;    // in the pass
    std::int64_t state = 0;   // in hidden_[now_]
    std::int32_t scratch = -1;
  };
  struct Fed {
    SequenceId id = 0;
    State* state = nullptr;
    HeadModules::Piece piece;
  };

  bool make_room(SequenceId id, State& state, std::int64_t count);
  void feed(SequenceId id, State& state, std::int64_t count);
  void run_fed();
  void catch_up();
  void open(const DraftRequest& request, DraftTree& tree);
  void grow();
  void root_level();
  void add_frontier(Active& active, std::int64_t level);
  std::int32_t parent_of(const Row& row) const;
  void run_level(std::int64_t level);
  TokenId token_of(const Row& row) const;
  void expand(std::size_t first);
  void add_likely(const Row& row, std::span<const Runner::Candidate> likely);
  void add_processed(const Row& row, std::span<const float> own);
  void add_favoured(const Row& row, std::span<const float> logits, std::int64_t position);
  void add_draws(const Row& row, std::span<const float> logits, std::int64_t position);
  std::span<const float> by_target_id(std::span<const float> logits);

  DraftHeadOptions options_;
  HeadSizes sizes_;
  std::int64_t target_vocab_ = 0;
  RunnerOptions runner_options_;
  Runner runner_;
  Chooser chooser_;
  FeatureStore store_;
  HeadKeys keys_;
  bool remembers_ = false;  // shares blocks of prompts that begin alike
  HeadModules later_;       // behind the first, which runner_ runs
  std::unordered_map<SequenceId, State> states_;
  std::array<HeldRows, 2> hidden_;  // the head's own states, of a level and of the next
  std::size_t now_ = 0;
  std::vector<float> by_target_;
  std::int64_t step_bytes_ = 0;  // that a step reads

  // Of a group of requests; they keep their memory.
  std::vector<Active> active_;
  std::size_t active_count_ = 0;
  std::vector<Row> level_;
  std::vector<Row> next_;
  Runner* drafting_ = nullptr;  // that ran level_
  std::vector<Row> roots_;
  std::vector<Fed> fed_;
  std::vector<HeadModules::Piece> pieces_;
  std::vector<const float*> inputs_;
  std::vector<float*> outputs_;
  std::vector<std::int64_t> logit_rows_;
  std::vector<TokenId> path_;
  std::vector<std::pair<TokenId, float>> likely_;

  // Where a GPU grows the trees; head_growth.cpp.
  bool grows_on_device() const;
  bool begin_growth();
  void rank_roots();
  void grow_on_device();
  std::optional<CudaGrowth> growth_;
  bool growing_ = false;  // this group
  std::vector<CudaGrowth::Draft> drafts_;
  FavouredRequests favoured_;
  std::vector<CudaGrowth::Place> places_;
  std::vector<DraftTree*> trees_;
};

}  // namespace specrt
