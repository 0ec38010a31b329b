#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/choose.h"
#include "decode/cuda_walk.h"
#include "decode/ema_tiers.h"
#include "decode/sequence.h"
#include "model/runner.h"
#include "specrt/decoder.h"
#include "specrt/error.h"

namespace specrt {

RunnerOptions runner_options(const DecoderOptions& options, bool with_team);

struct Decoder::Impl {
  Impl(const Model& model, const DecoderOptions& given);

  DecoderOptions options;
  Runner runner;
  Chooser chooser;
  std::unique_ptr<CudaWalk> cuda_walk;  // null on the CPU
  const std::int64_t weight_bytes;
  const double row_cost;    // of one more row in a pass, as a share of a pass of one
  const double head_share;  // of a row's products, those with the output head
  std::vector<std::unique_ptr<Sequence>> live;  // in order of arrival
  std::vector<std::unique_ptr<Sequence>> gone;  // finished in the last round
  std::vector<std::unique_ptr<Sequence>> preempted;
  std::unordered_map<SequenceId, Sequence*> by_id;
  SequenceId next_id = 0;
  bool round_open = false;
  bool busy = false;  // inside a call: drafters and constraints may not call back

  void require_idle(const char* what) const {
    if (busy) {
      throw InvalidArgument(std::string("[") + what +
                            "] expected no call from inside a drafter or constraint, got one");
    }
  }
  void require_between_rounds(const char* what) const {
    require_idle(what);
    if (round_open) {
      throw InvalidArgument(
          std::string("[") + what +
          "] expected no round between begin_round and finish_round, got an open one");
    }
  }
  struct Busy {
    Busy(Impl& impl, const char* what) : impl_(impl) {
      impl.require_idle(what);
      impl.busy = true;
    }
    ~Busy() { impl_.busy = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
    Impl& impl_;
  };

  double draft_seconds = 0;  // of the round under way
  // Of the last rounds in which somebody decoded: all, and what the prompts in them took.
  double recent_seconds = 0;
  double recent_prompt_seconds = 0;
  std::chrono::steady_clock::time_point launched;  // where its pass is on a GPU already
  RoundTimes times;                                // of the last finished round
  DecoderTotals totals;
  /// What is known of one drafter's drafts, from all sequences.
  struct DrafterRecord {
    std::string name;
    Acceptance acceptance{kFirstGuess, kSlow};
    Calibration calibration;
    bool confident = false;                     // its drafts say what they are worth
    static constexpr double kFirstGuess = 0.7;  // before any draft of its was decided
    static constexpr double kSlow = 0.02;
  };
  std::vector<DrafterRecord> records;
  /// What a round asks of one drafter, by a sequence that has it.
  struct DrafterUse {
    const Sequence* of = nullptr;
    std::int64_t given = 0;  // depth that is no choice
    bool chosen = false;     // and whether there is one
  };
  CostModel cost;
  EmaTiers tiers;
  const DrafterRecord* known_record(const std::string& name) const;
  DrafterRecord* record_of(const std::string& name);
  std::int64_t ema_initial() const;
  std::int64_t decoding() const;
  void record(Sequence& sequence, std::int64_t accepted, bool rejected);
  bool trims_freely(const Sequence& sequence) const;
  void trim();
  std::int64_t whole_rows(std::int64_t rows, std::int64_t prompt_rows) const;
  double prompt_seconds(std::int64_t rows, std::int64_t prompt_rows, std::int64_t sequences,
                        std::int64_t context) const;
  double fill_pass_costs(std::int64_t rows, std::int64_t prompt_rows, std::int64_t most) const;
  void set_pace(const Sequence& s, std::chrono::steady_clock::time_point now,
                DraftCandidate& one) const;
  bool add_paced(const Sequence& s, double tokens, std::chrono::steady_clock::time_point now) const;
  double round_limit(std::int64_t prompt_rows, std::chrono::steady_clock::time_point now) const;
  void add_probes(std::span<const std::size_t> which, const Allocation& best, double aside,
                  std::vector<std::int64_t>& out) const;
  void observe_round(double verify_seconds);

  std::vector<Progress> progress;
  // Scratch of a round.
  std::vector<Sequence*> drafting;
  std::vector<DraftRequest> requests;
  std::vector<DraftTree> drafts;
  std::vector<ObservedFeatures> observed;
  std::vector<std::int64_t> logit_rows;
  std::vector<std::int32_t> path;
  std::vector<float> draft_law;
  // Scratch of planning, which changes nothing.
  mutable std::vector<double> node_gains;
  mutable std::vector<double> pass_costs;
  mutable std::vector<DraftCandidate> paced;  // that have a target and nothing to choose
  mutable std::vector<double> draft_costs;
  std::vector<double> survival;
  std::vector<std::int32_t> node_order;
  std::vector<DraftCandidate> candidates;
  std::vector<Sequence*> trimmed_of;

  Sequence& find(SequenceId id) {
    const auto found = by_id.find(id);
    if (found == by_id.end()) {
      throw InvalidArgument(
          expected_got("sequence", "the id of a running sequence", std::to_string(id)));
    }
    return *found->second;
  }

  using Preempted = std::vector<std::unique_ptr<Sequence>>::iterator;
  Preempted look_up_preempted(SequenceId id) {
    return std::find_if(preempted.begin(), preempted.end(),
                        [id](const auto& one) { return one->id == id; });
  }
  Preempted find_preempted(SequenceId id) {
    const Preempted found = look_up_preempted(id);
    if (found == preempted.end()) {
      throw InvalidArgument(
          expected_got("sequence", "the id of a preempted sequence", std::to_string(id)));
    }
    return found;
  }

  std::int64_t max_length(std::int64_t prompt, std::int64_t max_tokens) const {
    const std::int64_t room = runner.max_model_len() - prompt;
    return prompt + std::min(max_tokens, std::max<std::int64_t>(room, 0));
  }
  // The last token's K/V are never needed.
  static std::int64_t kv_positions(std::int64_t max_length) {
    return std::max<std::int64_t>(1, max_length - 1);
  }

  std::int64_t positions_after(const Sequence& sequence, std::int64_t tokens) const;
  std::int64_t positions_at_first(const Sequence& sequence, std::int64_t reserve) const;
  std::optional<SequenceId> reserve(const Plan& plan);
  void enter(Sequence& sequence, std::int64_t positions);
  void leave(Sequence& preempted_sequence) noexcept;
  void check_plan(const Plan& plan) const;
  void propose();
  void fail(Sequence& sequence, const std::string& what) {
    sequence.finish = Finish::error;
    sequence.error = what;
    sequence.wants_choice = false;
  }
  void lay_out(Sequence& sequence);
  void prune_by_constraint(Sequence& sequence);
  void choose(Sequence& sequence, std::span<const float> logits);
  void take(Sequence& sequence, TokenId token, std::int32_t child);
  std::int32_t synthetic_child(const Sequence& sequence) const;
  void step_adasd(Sequence& sequence, std::span<const float> row, std::span<const float> logits,
                  std::int64_t position);
  void step_block(Sequence& sequence, std::span<const float> logits, std::int64_t position);
  void finish_block(Sequence& sequence);
  void step_typical(Sequence& sequence, std::span<const float> logits, std::int64_t position);
  void finish_typical(Sequence& sequence);
  std::span<const float> processed_at(Sequence& sequence, std::int32_t node,
                                      std::span<const float> logits);
  void add_logprobs(const Sequence& sequence, std::span<const float> logits, TokenId token,
                    std::vector<TokenLogprobs>& out);
  void add_prompt_logprobs(Sequence& sequence, std::span<const std::int64_t> rows,
                           std::span<const float> logits);
  void choose_best(Sequence& sequence, const cpu::ArgMax& best, std::int64_t row);
  void walk(bool best_only);
  void walk_all();
  void launch_on_device();
  void walk_on_device();
  void find_features(Sequence& sequence) const;
  void capture(Sequence& sequence);
  void note_features(Sequence& sequence);
  void hand_over_features();
  void settle(Sequence& sequence);
  void count_pass();
  void retire();
};

}  // namespace specrt
