#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "decode/fill_lists.h"
#include "decode/logits_state.h"
#include "decode/rank.h"
#include "model/cuda_runner.h"
#include "model/medusa.h"
#include "specrt/error.h"
#include "specrt/medusa.h"

namespace specrt {
namespace {

// Rows that the heads run at once: a head's logits are held for all of them.
constexpr int kRows = 32;

std::vector<std::int32_t> widths_of(const StaticTree& tree) {
  std::vector<std::int32_t> widths;
  for (std::int32_t d = 1; d <= tree.depth(); ++d) widths.push_back(tree.width(d));
  return widths;
}

std::int64_t rows_at_once(int max_batch_size) { return std::min(max_batch_size, kRows); }

class MedusaDrafter final : public Drafter {
 public:
  MedusaDrafter(const MedusaHeads& heads, const MedusaOptions& options)
      : heads_(heads),
        tree_(options.tree),
        max_batch_size_(options.max_batch_size),
        runner_(
            heads, rows_at_once(options.max_batch_size),
            options.team != nullptr ? options.team : std::make_shared<ThreadTeam>(options.threads),
            options.cpu_isa, options.device, widths_of(tree_)),
        chooser_(runner_.kernels(), heads.config().vocab_size),
        ranker_(runner_.kernels(), heads.config().vocab_size),
        hidden_(runner_.hold(max_batch_size_)),
        use_(memory_of_medusa(heads.config(), heads.precision(), options.max_batch_size,
                              options.device)) {
    features_.normed = true;
    features_.last_only = true;
    if (!heads.config().token_map.empty()) {
      by_target_.resize(static_cast<std::size_t>(heads.config().vocab_size));
    }
    for (std::int64_t slot = max_batch_size_; slot > 0; --slot) free_.push_back(slot - 1);
    ranked_.resize(static_cast<std::size_t>(rows_at_once(options.max_batch_size)) *
                   static_cast<std::size_t>(tree_.depth()));
  }

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId>, std::int64_t) override {
    if (states_.count(id) != 0) {
      throw InvalidArgument(expected_got(name_, "a new sequence", std::to_string(id)));
    }
    State state;
    if (!free_.empty()) {
      state.slot = free_.back();
      free_.pop_back();
    }
    states_.emplace(id, state);
  }

  void release(SequenceId id) override {
    const State& state = find(id);
    if (state.slot >= 0) free_.push_back(state.slot);
    states_.erase(id);
  }

  void observe(SequenceId, std::span<const TokenId>) override {}

  const TargetFeatures& features() const override { return features_; }
  bool wants_features(SequenceId id) const override {
    const auto found = states_.find(id);
    return found != states_.end() && found->second.slot >= 0;
  }
  void observe_features(std::span<const ObservedFeatures> batch) override {
    for (const ObservedFeatures& one : batch) {
      State& state = find(one.id);
      const std::int64_t count = one.rows.size();
      if (state.slot < 0 || count == 0) continue;
      if (one.rows.width() != heads_.config().hidden_size) {
        throw InvalidArgument(expected_got(
            name_, std::to_string(heads_.config().hidden_size) + " features, as the heads read",
            std::to_string(one.rows.width())));
      }
      runner_.copy_features(one.rows, count - 1, hidden_of(state));
      state.position = one.first + count - 1;
    }
    runner_.settle_states();
  }

  MemoryUse memory() const override {
    MemoryUse use = use_;
    use.workspace += runner_.list_bytes();
    return use;
  }

  /// All heads run at once; a level's share of them.
  double step_cost(std::int64_t target_bytes) const override {
    return static_cast<double>(memory().weights) /
           static_cast<double>(heads_.config().num_heads * target_bytes);
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    const cpu::FpMode mode;
    active_.clear();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      out[i].clear();
      out[i].set_source(name_);
      const DraftRequest& request = requests[i];
      const State& state = find(request.id);
      // The hidden state that chose the last token is what the heads go on from.
      if (state.slot < 0 || state.position != std::ssize(request.tokens) - 2) continue;
      if (std::min(request.max_nodes, request.max_depth) <= 0) continue;
      active_.push_back({&request, &out[i], &state});
    }
    const auto step = static_cast<std::size_t>(runner_.max_rows());
    for (std::size_t first = 0; first < active_.size(); first += step) {
      draft(std::span(active_).subspan(first, std::min(step, active_.size() - first)));
    }
  }

 private:
  struct State {
    std::int64_t slot = -1;      // of hidden_; -1: none was left
    std::int64_t position = -1;  // of the token whose hidden state is there
  };
  struct Active {
    const DraftRequest* request = nullptr;
    DraftTree* tree = nullptr;
    const State* state = nullptr;
  };

  State& find(SequenceId id) {
    const auto found = states_.find(id);
    if (found == states_.end()) {
      throw InvalidArgument(expected_got(name_, "an admitted sequence", std::to_string(id)));
    }
    return found->second;
  }
  float* hidden_of(const State& state) const { return hidden_.row(state.slot); }
  Ranker::Ranked& ranked(std::size_t row, std::int32_t depth) {
    return ranked_[row * static_cast<std::size_t>(tree_.depth()) +
                   static_cast<std::size_t>(depth - 1)];
  }

  void draft(std::span<const Active> rows) {
    std::int64_t deepest = 0;
    inputs_.clear();
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const DraftRequest& request = *rows[row].request;
      inputs_.push_back(hidden_of(*rows[row].state));
      deepest = std::max(deepest, request.max_depth);
      for (std::int32_t d = 1; d <= tree_.depth(); ++d) ranked(row, d).clear();
    }
    deepest = std::min<std::int64_t>(deepest, tree_.depth());
    runner_.start(inputs_);
    if (!runner_.finds_likely() || !take_likely(rows, deepest)) rank_all(rows, deepest);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const DraftRequest& request = *rows[row].request;
      tree_.fill(*rows[row].tree, request.max_nodes, request.max_depth, places_,
                 [&](std::int32_t d, std::int32_t rank) {
                   const Ranker::Ranked& found = ranked(row, d);
                   return rank < std::ssize(found) ? found[static_cast<std::size_t>(rank)]
                                                   : std::pair<TokenId, float>(-1, 0.0f);
                 });
    }
  }

  // Alternatives found where the logits are; false where there is no room for what requests say.
  bool take_likely(std::span<const Active> rows, std::int64_t deepest) {
    const std::vector<TokenId>& map = heads_.config().token_map;
    favoured_.clear();
    for (const Active& a : rows) {
      const bool noise = a.request->sampling->verification == Verification::coupled;
      favoured_.add(*a.request, heads_.config().outputs, runner_.draft_of_target(), noise);
    }
    if (!runner_.find_likely(favoured_.sequences(), deepest)) return false;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      for (std::int32_t d = 1; d <= std::min(deepest, rows[row].request->max_depth); ++d) {
        for (const cuda::LikelyToken& one : runner_.likely(d - 1, static_cast<std::int64_t>(row))) {
          if (one.id < 0) break;
          const TokenId token = map.empty() ? one.id : map[static_cast<std::size_t>(one.id)];
          ranked(row, d).emplace_back(token, one.value);
        }
      }
    }
    return true;
  }

  void rank_all(std::span<const Active> rows, std::int64_t deepest) {
    const auto outputs = static_cast<std::size_t>(heads_.config().outputs);
    for (std::int32_t d = 1; d <= deepest; ++d) {
      const std::span<const float> logits = runner_.logits(d - 1, std::ssize(rows));
      for (std::size_t row = 0; row < rows.size(); ++row) {
        if (d > rows[row].request->max_depth) continue;
        try {
          rank(rows[row], d, by_target_id(logits.subspan(row * outputs, outputs)), ranked(row, d));
        } catch (const Error&) {
          // Heads that have gone NaN, or masks that leave nothing, cost drafts, not the request.
          ranked(row, d).clear();
        }
      }
    }
  }

  // One head's alternatives. The request's penalties and masks apply as they stand at the root:
  // what a path itself would add to them differs from node to node.
  void rank(const Active& a, std::int32_t depth, std::span<const float> logits,
            Ranker::Ranked& out) {
    LogitsState* state = a.request->logits;
    const SamplingParams& params = *a.request->sampling;
    const std::span<const float> row =
        state == nullptr ? logits : chooser_.processed(logits, *state, nullptr);
    if (params.verification == Verification::coupled) {
      const std::int64_t position = std::ssize(a.request->tokens) + depth - 1;
      ranker_.as_the_target(chooser_, row, params, position, tree_.width(depth), out);
    } else {
      chooser_.most_likely(row, tree_.width(depth), out);
    }
  }

  // A head's logits by target id: what it has no output for is impossible.
  std::span<const float> by_target_id(std::span<const float> logits) {
    const std::vector<TokenId>& map = heads_.config().token_map;
    if (map.empty()) return logits;
    std::fill(by_target_.begin(), by_target_.end(), -std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i < map.size(); ++i) {
      by_target_[static_cast<std::size_t>(map[i])] = logits[i];
    }
    return by_target_;
  }

  const std::string name_ = "medusa";
  MedusaHeads heads_;
  StaticTree tree_;
  std::int64_t max_batch_size_ = 0;
  MedusaRunner runner_;
  Chooser chooser_;
  Ranker ranker_;
  TargetFeatures features_;
  HeldRows hidden_;  // [max_batch_size, hidden]
  const MemoryUse use_;
  std::vector<std::int64_t> free_;
  std::unordered_map<SequenceId, State> states_;
  std::vector<float> by_target_;
  std::vector<Active> active_;
  std::vector<const float*> inputs_;
  FavouredRequests favoured_;
  std::vector<Ranker::Ranked> ranked_;  // [rows at once, depth]
  std::vector<std::int32_t> places_;
};

}  // namespace

MemoryUse memory_of_medusa(const MedusaConfig& config, Precision precision, int max_batch_size,
                           const std::string& device) {
  check_dtype(precision, device);
  MemoryUse use;
  use.workspace = MedusaRunner::workspace_bytes(config, rows_at_once(max_batch_size), device) +
                  max_batch_size * config.hidden_size * 4;
  if (const std::optional<int> on = cuda_device_of(device)) {
    use.weights = CudaMedusa::weight_bytes(config, precision, *on);
    return use;  // what the host has is not counted
  }
  use.weights = weight_bytes(config, precision);
  use.workspace += Chooser::bytes_for(config.vocab_size) + Ranker::bytes_for(config.vocab_size) +
                   (config.token_map.empty() ? 0 : config.vocab_size * 4);
  return use;
}

std::shared_ptr<Drafter> make_medusa_drafter(const MedusaHeads& heads,
                                             const MedusaOptions& options) {
  if (!heads.valid()) throw InvalidArgument("[medusa] expected loaded heads, got none");
  if (options.max_batch_size < 1) {
    throw InvalidArgument(
        expected_got("max_batch_size", "at least 1", std::to_string(options.max_batch_size)));
  }
  if (options.tree.depth() < 1 || options.tree.depth() > heads.config().num_heads) {
    throw InvalidArgument(expected_got(
        "tree", "a depth from 1 to the " + std::to_string(heads.config().num_heads) + " heads",
        std::to_string(options.tree.depth())));
  }
  return std::make_shared<MedusaDrafter>(heads, options);
}

}  // namespace specrt
