#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cpu/dispatch.h"
#include "decode/chain_draft.h"
#include "decode/choose.h"
#include "decode/fill_lists.h"
#include "decode/runner_options.h"
#include "model/cuda_growth.h"
#include "model/runner.h"
#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt {
namespace {

RunnerOptions runner_options(const DraftModelOptions& options) {
  RunnerOptions out = shared_runner_options(options);
  out.team = options.team != nullptr ? options.team : std::make_shared<ThreadTeam>(options.threads);
  out.most_likely = 1;
  return out;
}

// Whether a GPU grows the chains: then every id of the draft model's is one of the target's.
bool grows_chains(const ModelConfig& config, const DraftModelOptions& options,
                  std::int64_t target_vocab_size) {
  return cuda_device_of(options.device).has_value() && config.vocab_size <= target_vocab_size;
}

std::int64_t growth_bytes(const ModelConfig& config, const DraftModelOptions& options) {
  return CudaGrowth::device_bytes(options.max_batch_size, 1, CudaGrowth::kMostNodes,
                                  config.vocab_size, 0);
}

/// Runs the draft model over its own KV cache. What was drafted stays in that cache as if it had
/// been accepted; the next request says what really was, and the rest is cut off then. So there
/// is nothing to roll back in between, and positions are the drafter's own count.
class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(const Model& model, std::int64_t target_vocab_size, const DraftModelOptions& options,
               std::shared_ptr<const VocabularyMap> map)
      : runner_(model, runner_options(options)),
        map_(std::move(map)),
        target_vocab_(target_vocab_size),
        draft_vocab_(model.config().vocab_size),
        chooser_(runner_.kernels(), std::max(target_vocab_, draft_vocab_)),
        max_batch_size_(static_cast<std::size_t>(options.max_batch_size)),
        check_invariants_(options.check_invariants) {
    if (map_ != nullptr) translated_.resize(static_cast<std::size_t>(target_vocab_));
    if (map_ != nullptr || !grows_chains(model.config(), options, target_vocab_)) return;
    growth_bytes_ = growth_bytes(model.config(), options);
    growth_.emplace(*runner_.cuda(), CudaGrowth::Rows::positions, options.max_batch_size, 1,
                    CudaGrowth::kMostNodes, std::span<const TokenId>(), target_vocab_);
  }

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    if (states_.count(id) != 0) {
      throw InvalidArgument(expected_got("draft model", "a new sequence", std::to_string(id)));
    }
    State state;
    translate(prompt, state.context);
    // Text may take more tokens here than there.
    const auto grows = max_length - static_cast<std::int64_t>(prompt.size());
    state.limit = std::min(static_cast<std::int64_t>(state.context.size()) +
                               (map_ != nullptr ? 2 * grows + 16 : grows),
                           runner_.max_model_len());
    state.translated = static_cast<std::int64_t>(prompt.size());
    state.cached.reserve(static_cast<std::size_t>(state.limit));
    enter(id, state);
    states_.emplace(id, std::move(state));
  }

  void observe(SequenceId, std::span<const TokenId>) override {}

  void release(SequenceId id) override {
    const auto found = states_.find(id);
    if (found == states_.end()) {
      throw InvalidArgument(
          expected_got("draft model", "an admitted sequence", std::to_string(id)));
    }
    if (found->second.has_room) runner_.cache().remove(id);
    states_.erase(found);
  }

  MemoryUse memory() const override {
    MemoryUse use = runner_.memory();
    use.workspace += growth_bytes_;
    if (growth_.has_value()) use.workspace += growth_->list_bytes();
    if (runner_.cuda() == nullptr) {  // what the host has beside a GPU is not counted
      use.workspace += Chooser::bytes_for(std::max(target_vocab_, draft_vocab_));
    }
    return use;
  }

  bool tells_laws() const override { return map_ == nullptr; }

  double step_cost(std::int64_t target_bytes) const override {
    const std::int64_t bytes = runner_.model().data().bytes_read(runner_.config().num_layers);
    return static_cast<double>(bytes) / static_cast<double>(target_bytes);
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    const cpu::FpMode mode;
    active_.clear();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      out[i].clear();
      out[i].set_source(name_);
      open(requests[i], out[i]);
    }
    catch_up();
    if (grows_on_device() && begin_growth()) {
      draft_on_device();
    } else {
      for (std::int64_t step = 0; !active_.empty(); ++step) draft_step(step);
    }
    if (check_invariants_) runner_.cache().check_invariants();
  }

 private:
  struct State {
    bool has_room = false;
    std::int64_t limit = 0;        // positions
    std::vector<TokenId> context;  // the sequence in the draft model's tokens
    std::int64_t translated = 0;   // of the target's tokens, how many are in there
    std::vector<TokenId> cached;   // tokens whose K/V are in the cache
    std::int64_t agreed = 0;       // leading tokens of `cached` known to be the sequence's own
  };
  struct Active {
    ChainDraft draft;
    State* state = nullptr;
    std::int64_t row = 0;
  };

  // Into the cache, where there is room for what is known; the rest is set aside draft by draft.
  void enter(SequenceId id, State& state) {
    const std::int64_t length = std::min(std::ssize(state.context), state.limit);
    state.has_room = runner_.cache().size() < max_batch_size_ && runner_.cache().can_add(length);
    if (!state.has_room) return;
    const auto own =
        std::span<const TokenId>(state.context).first(static_cast<std::size_t>(length));
    const std::int64_t known = runner_.cache().add(id, length, own);
    state.cached.assign(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(known));
    state.agreed = known;
  }

  void open(const DraftRequest& request, DraftTree& tree) {
    const auto found = states_.find(request.id);
    if (found == states_.end()) {
      throw InvalidArgument(
          expected_got("draft model", "an admitted sequence", std::to_string(request.id)));
    }
    State& state = found->second;
    translate(request.tokens.subspan(static_cast<std::size_t>(state.translated)), state.context);
    state.translated = static_cast<std::int64_t>(request.tokens.size());
    const auto length = static_cast<std::int64_t>(state.context.size());
    // Drafting `steps` tokens runs positions up to length + steps - 2.
    const std::int64_t steps =
        std::min({request.max_nodes, request.max_depth, state.limit - length});
    if (length == 0 || steps <= 0) return;
    // Where the pool has no room there is no draft, this time.
    if (!state.has_room) enter(request.id, state);
    if (!state.has_room || !runner_.cache().reserve(request.id, length + steps - 1)) return;
    // Keep what agrees with the sequence; its last token is always run again for its logits.
    const std::int64_t most = std::min(static_cast<std::int64_t>(state.cached.size()), length - 1);
    std::int64_t same = std::min(state.agreed, most);
    while (same < most && state.cached[static_cast<std::size_t>(same)] ==
                              state.context[static_cast<std::size_t>(same)]) {
      ++same;
    }
    runner_.cache().truncate(request.id, same);
    state.cached.resize(static_cast<std::size_t>(same));
    state.agreed = same;
    runner_.cache().remember(request.id, state.context);
    active_.push_back({{&request, &tree, steps}, &state, 0});
  }

  // Target tokens in the draft model's own. What it has no tokens for at all is left out.
  void translate(std::span<const TokenId> tokens, std::vector<TokenId>& out) const {
    for (const TokenId token : tokens) {
      if (map_ == nullptr) {
        if (token < draft_vocab_) out.push_back(token);
        continue;
      }
      const auto id = static_cast<std::size_t>(token);
      if (id >= map_->draft_of_target.size()) {
        throw InvalidArgument(expected_got(
            "draft model",
            "tokens of the " + std::to_string(map_->draft_of_target.size()) + " that were matched",
            std::to_string(token)));
      }
      if (map_->draft_of_target[id] >= 0) {
        out.push_back(map_->draft_of_target[id]);
      } else {
        out.insert(out.end(), map_->pieces[id].begin(), map_->pieces[id].end());
      }
    }
  }

  // One row of draft logits by target id: what the draft model cannot say is impossible.
  std::span<const float> by_target_id(std::span<const float> logits) {
    if (map_ == nullptr) {
      return logits.first(static_cast<std::size_t>(std::min(target_vocab_, draft_vocab_)));
    }
    for (std::size_t id = 0; id < translated_.size(); ++id) {
      const TokenId own = map_->draft_of_target[id];
      translated_[id] = own >= 0 ? logits[static_cast<std::size_t>(own)]
                                 : -std::numeric_limits<float>::infinity();
    }
    return translated_;
  }

  // Runs everything but the last token of each sequence, as many passes as the rows take.
  void catch_up() {
    for (bool more = true; more;) {
      more = false;
      runner_.begin();
      fed_.clear();
      for (Active& a : active_) {
        const auto done = static_cast<std::int64_t>(a.state->cached.size());
        const std::int64_t left = static_cast<std::int64_t>(a.state->context.size()) - 1 - done;
        const std::int64_t count = std::min(left, runner_.max_rows() - runner_.rows());
        if (count < left) more = true;
        if (count <= 0) continue;
        const auto tokens =
            std::span<const TokenId>(a.state->context)
                .subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count));
        runner_.add_committed(a.draft.request->id, tokens);
        a.state->cached.insert(a.state->cached.end(), tokens.begin(), tokens.end());
        fed_.push_back({&a, count});
      }
      if (runner_.rows() == 0) break;
      runner_.forward();
      for (const auto& [active, count] : fed_) {
        runner_.advance(active->draft.request->id, count, active->state->context);
      }
    }
  }

  // Guesses may be cut off again, and the last known token is run again: the window behind it
  // stays.
  void keep_row(const Active& a) {
    const auto known = static_cast<std::int64_t>(a.state->context.size());
    runner_.advance_keeping(a.draft.request->id, 1, known - 1);
  }

  // One more token for every active sequence.
  void draft_step(std::int64_t step) {
    runner_.begin();
    for (Active& a : active_) {
      TokenId token = a.state->context.back();
      if (step > 0) {
        token = a.draft.tree->tokens().back();
        if (map_ != nullptr) token = map_->draft_of_target[static_cast<std::size_t>(token)];
      }
      a.row = runner_.add_committed(a.draft.request->id, std::span(&token, 1));
      a.state->cached.push_back(token);
    }
    runner_.forward();
    for (const Active& a : active_) keep_row(a);
    for (std::size_t first = 0; first < active_.size();) {
      const std::size_t last =
          std::min(active_.size(), first + static_cast<std::size_t>(Runner::kLogitRows));
      rows_.clear();
      for (std::size_t i = first; i < last; ++i) rows_.push_back(active_[i].row);
      const std::span<const float> logits = runner_.logits(rows_);
      for (std::size_t i = first; i < last; ++i) {
        Active& a = active_[i];
        a.draft.draw(chooser_, by_target_id(logits.subspan(
                                   (i - first) * static_cast<std::size_t>(draft_vocab_),
                                   static_cast<std::size_t>(draft_vocab_))));
      }
      first = last;
    }
    for (const Active& a : active_) {
      if (step + 1 >= a.draft.steps) a.draft.forget_guesses();
    }
    std::erase_if(active_, [&](const Active& a) { return step + 1 >= a.draft.steps; });
  }

  // Whether nobody asks for what only the host can draw.
  bool grows_on_device() const {
    return growth_.has_value() && !active_.empty() &&
           std::all_of(active_.begin(), active_.end(), [](const Active& a) {
             const DraftRequest& request = *a.draft.request;
             return a.draft.steps <= CudaGrowth::kMostNodes &&
                    CudaFavour::ranks(*request.sampling) &&
                    (request.logits == nullptr || request.logits->constraint() == nullptr);
           });
  }

  // What they ask for goes to the device, where there is room for it.
  bool begin_growth() {
    drafts_.clear();
    trees_.clear();
    favoured_.clear();
    for (const Active& a : active_) {
      drafts_.push_back({a.draft.steps, a.draft.steps});
      trees_.push_back(a.draft.tree);
      favoured_.add(*a.draft.request, growth_->vocab(), {});
    }
    return growth_->begin(drafts_, favoured_.sequences());
  }

  // All steps, which the device puts one behind the other: their tokens come in one copy.
  void draft_on_device() {
    std::int64_t step = 0;
    for (;; ++step) {
      runner_.begin();
      rows_.clear();
      for (std::size_t i = 0; i < active_.size(); ++i) {
        Active& a = active_[i];
        CudaGrowth::Place place;
        place.first_row = a.row;
        if (step < a.draft.steps) {
          const TokenId token = step == 0 ? a.state->context.back() : -1;
          a.row = runner_.add_committed(a.draft.request->id, std::span(&token, 1));
          a.state->cached.push_back(token);
          place.next_row = a.row;
          rows_.push_back(a.row);
        }
        if (step > 0) growth_->set_step(i, step - 1, place);
      }
      if (rows_.empty()) break;
      if (step == 0) {
        runner_.forward();
      } else {
        runner_.forward_grown(growth_->level(step - 1, nullptr));
      }
      for (const Active& a : active_) {
        if (step < a.draft.steps) keep_row(a);
      }
      growth_->rank(rows_, 0, step);
    }
    growth_->finish(step - 1, trees_);
    // What was run, but for the last one drafted.
    for (const Active& a : active_) {
      std::vector<TokenId>& cached = a.state->cached;
      const std::span<const TokenId> tokens = a.draft.tree->tokens();
      auto at = cached.end() - static_cast<std::ptrdiff_t>(a.draft.steps - 1);
      for (std::size_t i = 0; i < tokens.size() && at != cached.end(); ++i) *at++ = tokens[i];
    }
  }

  struct Fed {
    const Active* active;
    std::int64_t count;
  };

  std::string name_ = "draft_model";
  Runner runner_;
  std::shared_ptr<const VocabularyMap> map_;
  std::int64_t target_vocab_ = 0;
  std::int64_t draft_vocab_ = 0;
  Chooser chooser_;
  std::size_t max_batch_size_ = 0;
  bool check_invariants_ = false;
  std::vector<float> translated_;  // logits by target id
  std::unordered_map<SequenceId, State> states_;
  std::vector<Active> active_;
  std::vector<Fed> fed_;
  std::vector<std::int64_t> rows_;
  std::optional<CudaGrowth> growth_;
  std::int64_t growth_bytes_ = 0;
  std::vector<CudaGrowth::Draft> drafts_;
  FavouredRequests favoured_;
  std::vector<DraftTree*> trees_;
};

}  // namespace

MemoryUse memory_of_draft_model(const ModelConfig& config, Precision precision,
                                const DraftModelOptions& options, std::int64_t target_vocab_size) {
  RunnerOptions runner = shared_runner_options(options);
  runner.most_likely = 1;
  check_device(config, precision, runner);
  MemoryUse use;
  use.kv_cache = Runner::kv_layout(config, activation_dtype(precision), runner).bytes();
  use.workspace = Runner::workspace_bytes(config, runner);
  if (const std::optional<int> device = cuda_device_of(options.device)) {
    use.weights = cuda_layout(config, precision, cuda::architecture_of(*device)).bytes;
    if (grows_chains(config, options, target_vocab_size)) {
      use.workspace += growth_bytes(config, options);
    }
  } else {
    use.weights = weight_bytes(config, precision);
    use.workspace += Chooser::bytes_for(std::max(target_vocab_size, config.vocab_size));
  }
  return use;
}

std::shared_ptr<Drafter> make_model_drafter(const Model& model, std::int64_t target_vocab_size,
                                            const DraftModelOptions& options,
                                            std::shared_ptr<const VocabularyMap> vocabulary) {
  if (!model.valid())
    throw InvalidArgument("[draft model] expected a loaded model, got an empty one");
  if (target_vocab_size < 1) {
    throw InvalidArgument(
        expected_got("target_vocab_size", "at least 1", std::to_string(target_vocab_size)));
  }
  if (options.kv_cache_bytes <= 0) {
    throw InvalidArgument(
        expected_got("kv_cache_bytes", "at least 1", std::to_string(options.kv_cache_bytes)));
  }
  if (vocabulary != nullptr) {
    const auto size = static_cast<std::size_t>(target_vocab_size);
    if (vocabulary->draft_of_target.size() != size || vocabulary->pieces.size() != size) {
      throw InvalidArgument(expected_got("vocabulary",
                                         std::to_string(size) + " entries, one a target id",
                                         std::to_string(vocabulary->draft_of_target.size())));
    }
    const auto check = [&](TokenId token, TokenId least) {
      if (token < least || token >= model.config().vocab_size) {
        throw InvalidArgument(
            expected_got("vocabulary", "ids of the draft model", std::to_string(token)));
      }
    };
    for (const TokenId token : vocabulary->draft_of_target) check(token, -1);
    for (const auto& piece : vocabulary->pieces) {
      for (const TokenId token : piece) check(token, 0);
    }
  }
  return std::make_shared<ModelDrafter>(model, target_vocab_size, options, std::move(vocabulary));
}

}  // namespace specrt
