#include "decode/head_drafter.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/dispatch.h"
#include "specrt/error.h"

namespace specrt {
namespace {

RunnerOptions with_team(RunnerOptions runner, const DraftHeadOptions& options) {
  runner.team =
      options.team != nullptr ? options.team : std::make_shared<ThreadTeam>(options.threads);
  return runner;
}

// On a GPU all modules run on one stream, so that each finds what the one before has made.
RunnerOptions beside(RunnerOptions options, const Runner& first) {
  if (first.cuda() != nullptr) options.stream = first.cuda()->shared_stream();
  return options;
}

}  // namespace

HeadDrafter::HeadDrafter(std::span<const Model> modules, const Model& target,
                         const DraftHeadOptions& options)
    : options_(options),
      sizes_(modules.front().config(), options),
      target_vocab_(target.config().vocab_size),
      runner_options_(with_team(sizes_.runner, options)),
      runner_(modules.front(), runner_options_, target),
      chooser_(runner_.kernels(), std::max(target_vocab_, runner_.config().vocab_size)),
      store_(runner_.hold(sizes_.feature_rows, sizes_.feature_width), sizes_.feature_rows),
      keys_(target_vocab_),
      remembers_(options.enable_prefix_caching &&
                 HeadKeys(target_vocab_, options.modules).usable(options.block_size)),
      later_(modules.subspan(1), target, sizes_, beside(runner_options_, runner_), target_vocab_,
             remembers_),
      active_(static_cast<std::size_t>(sizes_.sequences)) {
  const Model& head = modules.front();
  step_bytes_ = head.data().bytes_read(head.config().num_layers);
  if (!head.config().head.own_lm_head) step_bytes_ += target.data().bytes_read(0);
  for (HeldRows& one : hidden_) {
    one = runner_.hold(sizes_.state_rows, head.config().hidden_size);
  }
  if (!options.target_of_draft.empty()) by_target_.resize(static_cast<std::size_t>(target_vocab_));
  if (sizes_.grows_on_device) {
    growth_.emplace(*runner_.cuda(), CudaGrowth::Rows::nodes, sizes_.sequences, options.top_k,
                    options.depth, options.target_of_draft, target_vocab_);
    trees_.reserve(active_.size());
    drafts_.reserve(active_.size());
    places_.resize(active_.size());
  }
  const auto rows = static_cast<std::size_t>(options.max_rows);
  inputs_.reserve(rows);
  outputs_.reserve(rows);
  level_.reserve(rows);
  next_.reserve(rows);
  logit_rows_.reserve(std::max(rows, static_cast<std::size_t>(Runner::kLogitRows)));
}

void HeadDrafter::admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) {
  if (states_.count(id) != 0) {
    throw InvalidArgument(expected_got(options_.name, "a new sequence", std::to_string(id)));
  }
  const cpu::FpMode mode;
  if (remembers_) catch_up();  // so that the prompts of others are there to be shared
  State state;
  // Position i has the state behind token i and token i + 1: the last token of all has none.
  state.limit = std::min(max_length - 1, runner_.max_model_len());
  const std::int64_t at_first = std::min(state.limit, std::ssize(prompt));
  state.has_room = state.limit > 0 &&
                   runner_.cache().size() < static_cast<std::size_t>(options_.max_batch_size) &&
                   runner_.cache().can_add(at_first) && later_.can_add(at_first);
  if (state.has_room) {
    state.keys.reserve(static_cast<std::size_t>(max_length));
    keys_.append(prompt, state.keys);
    std::span<const TokenId> known;
    if (remembers_) {
      known = std::span<const TokenId>(state.keys)
                  .first(std::min(state.keys.size(), static_cast<std::size_t>(state.limit)));
    }
    state.known = runner_.cache().add(id, at_first, known);
    const std::int64_t common =
        later_.admit(id, prompt, max_length, state.limit, at_first, state.known);
    if (common < state.known) runner_.cache().truncate(id, state.known = common);
    state.cached = state.known;
  }
  states_.emplace(id, std::move(state));
}

std::int64_t HeadDrafter::known_positions(SequenceId id) const {
  const State& state = states_.at(id);
  return state.has_room ? state.known : std::numeric_limits<std::int64_t>::max();
}

bool HeadDrafter::wants_features(SequenceId id) const {
  const State& state = states_.at(id);
  return state.has_room && state.known < state.limit;
}

void HeadDrafter::observe_features(std::span<const ObservedFeatures> batch) {
  const cpu::FpMode mode;
  for (const ObservedFeatures& one : batch) {
    State& state = states_.at(one.id);
    if (!state.has_room) continue;
    runner_.check_features(one.rows);
    keys_.append(one.tokens, state.keys);
    later_.learn(one.id, one.tokens);
    for (std::int64_t i = std::max<std::int64_t>(0, state.known - one.first);
         i < one.rows.size() && state.known < state.limit; ++i) {
      if (one.first + i != state.known) {
        throw InternalError(expected_got(options_.name, "features without a gap",
                                         "position " + std::to_string(one.first + i)));
      }
      if (one.rows.width() != sizes_.feature_width) {
        throw InvalidArgument(expected_got(options_.name,
                                           std::to_string(sizes_.feature_width) + " features",
                                           std::to_string(one.rows.width())));
      }
      if (store_.full()) catch_up();
      if (!state.has_room) break;  // which catching up may have cost it
      const std::int32_t slot = store_.take();
      runner_.copy_features(one.rows, i, store_.row(slot));
      state.slots.push_back(slot);
      state.tokens.push_back(one.tokens[static_cast<std::size_t>(state.known + 1)]);
      ++state.known;
    }
  }
  runner_.settle_states();
}

void HeadDrafter::release(SequenceId id) {
  const auto found = states_.find(id);
  if (found == states_.end()) {
    throw InvalidArgument(expected_got(options_.name, "an admitted sequence", std::to_string(id)));
  }
  State& state = found->second;
  const std::int64_t block = options_.block_size;
  // What it leaves behind is worth a pass where it fills a block.
  if (state.has_room && remembers_ && (state.known - 1) / block > state.cached / block) {
    const cpu::FpMode mode;
    try {
      catch_up();
    } catch (const std::exception&) {  // then it leaves less
    }
  }
  if (state.has_room) {  // which catching up may have cost it
    for (const std::int32_t slot : state.slots) store_.give_back(slot);
    runner_.cache().remove(id);
    later_.release(id);
  }
  states_.erase(found);
}

MemoryUse HeadDrafter::memory() const {
  MemoryUse use = runner_.memory();
  const MemoryUse more = later_.memory();
  use.weights += more.weights;
  use.kv_cache += more.kv_cache;
  use.workspace = sizes_.workspace_bytes(runner_.config(), options_, target_vocab_);
  if (growth_.has_value()) use.workspace += growth_->list_bytes();
  return use;
}

double HeadDrafter::step_cost(std::int64_t target_bytes) const {
  return static_cast<double>(step_bytes_) / static_cast<double>(target_bytes);
}

// Whether there is a block for its next `count` positions. Where not it gets no drafts any more: it
// would have gaps.
bool HeadDrafter::make_room(SequenceId id, State& state, std::int64_t count) {
  const std::int64_t positions = state.cached + count;
  if (runner_.cache().reserve(id, positions) && later_.reserve(id, positions)) return true;
  for (const std::int32_t slot : state.slots) store_.give_back(slot);
  state.slots.clear();
  state.tokens.clear();
  runner_.cache().remove(id);
  later_.release(id);
  state.has_room = false;
  return false;
}

// Lays out a state's next `count` rows.
void HeadDrafter::feed(SequenceId id, State& state, std::int64_t count) {
  const std::int64_t skipped = state.cached - state.first();
  const auto tokens =
      std::span<const TokenId>(state.tokens)
          .subspan(static_cast<std::size_t>(skipped), static_cast<std::size_t>(count));
  const std::int64_t row = runner_.add_committed(id, tokens);
  for (std::int64_t i = 0; i < count; ++i) {
    inputs_.push_back(store_.row(state.slots[static_cast<std::size_t>(skipped + i)]));
    outputs_.push_back(later_.any() ? later_.input(row + i) : nullptr);
  }
  fed_.push_back({id, &state, {id, state.cached, row, tokens}});
}

// Runs the rows of fed_. Each last position's features stay, so that it can be run again.
void HeadDrafter::run_fed() {
  runner_.forward_head(inputs_, outputs_, false);
  pieces_.clear();
  for (const Fed& one : fed_) pieces_.push_back(one.piece);
  later_.follow(pieces_);
  for (const Fed& one : fed_) {
    State& state = *one.state;
    const std::int64_t count = std::ssize(one.piece.tokens);
    runner_.advance_keeping(one.id, count, state.known - 1);
    state.cached += count;
    const std::int64_t done = std::min(state.cached, state.known - 1) - state.first();
    for (std::int64_t i = 0; i < done; ++i) {
      store_.give_back(state.slots[static_cast<std::size_t>(i)]);
    }
    state.slots.erase(state.slots.begin(), state.slots.begin() + done);
    state.tokens.erase(state.tokens.begin(), state.tokens.begin() + done);
    if (remembers_) {
      runner_.cache().remember(
          one.id,
          std::span<const TokenId>(state.keys).first(static_cast<std::size_t>(state.cached)));
    }
  }
}

// Everything that waits but each sequence's last position, in as few passes as the rows take.
void HeadDrafter::catch_up() {
  for (bool more = true; more;) {
    more = false;
    runner_.begin();
    inputs_.clear();
    outputs_.clear();
    fed_.clear();
    for (auto& [id, state] : states_) {
      if (!state.has_room) continue;
      const std::int64_t left = state.known - 1 - state.cached;
      const std::int64_t count = std::min(left, runner_.max_rows() - runner_.rows());
      if (count < left) more = true;
      if (count <= 0 || !make_room(id, state, count)) continue;
      feed(id, state, count);
    }
    if (fed_.empty()) break;
    run_fed();
  }
}

void HeadDrafter::propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) {
  const cpu::FpMode mode;
  for (std::size_t first = 0; first < requests.size();) {
    active_count_ = 0;
    for (; first < requests.size() && active_count_ < active_.size(); ++first) {
      out[first].clear();
      out[first].set_source(options_.name);
      open(requests[first], out[first]);
    }
    growing_ = grows_on_device() && begin_growth();
    if (growing_) {
      grow_on_device();
    } else {
      grow();
    }
  }
  if (!options_.check_invariants) return;
  runner_.cache().check_invariants();
  later_.check_invariants();
}

void HeadDrafter::open(const DraftRequest& request, DraftTree& tree) {
  const auto found = states_.find(request.id);
  if (found == states_.end()) {
    throw InvalidArgument(
        expected_got(options_.name, "an admitted sequence", std::to_string(request.id)));
  }
  State& state = found->second;
  // Beyond its positions, or without room, the head has nothing to say.
  if (!state.has_room || state.known < 1 || state.slots.empty() ||
      state.known + 1 != std::ssize(request.tokens)) {
    return;
  }
  std::int64_t levels = std::min({request.max_nodes, request.max_depth, options_.depth,
                                  runner_.max_model_len() - state.known + 1});
  // A module has no position yet in a text shorter than its distance.
  if (state.known + 1 < later_.count()) levels = std::min(levels, state.known + 1);
  if (levels < 1) return;
  if (state.cached == state.known) {  // it was asked before, and nothing has come since
    try {
      runner_.cache().truncate(request.id, state.known - 1);
    } catch (const CapacityError&) {  // into a block that others share, and none to spare
      return;
    }
    state.cached = state.known - 1;
  }
  if (!make_room(request.id, state, state.known - state.cached)) return;
  const SamplingParams& params = *request.sampling;
  Active& a = active_[active_count_++];
  a.request = &request;
  a.state = &state;
  a.out = &tree;
  a.levels = levels;
  a.sampled = !params.greedy() && params.verification != Verification::coupled;
  a.lost = false;
  a.tree.clear();
  a.grown.clear();
  if (!a.sampled) return;
  tree.set_draw(Draw::without_replacement);
  const std::int64_t top_k = params.verification == Verification::block ? 1 : options_.top_k;
  if (a.shape_nodes != request.max_nodes || a.shape_levels != levels || a.shape_top_k != top_k) {
    make_static_shape(request.max_nodes, levels, top_k, a.tree, a.shape);
    a.shape_nodes = request.max_nodes;
    a.shape_levels = levels;
    a.shape_top_k = top_k;
  }
  a.grown.assign(a.shape.size(), -1);
}

// The drafts of a group, all level by level.
void HeadDrafter::grow() {
  root_level();
  for (std::int64_t level = 2; !level_.empty(); ++level) {
    next_.clear();
    if (level <= later_.count()) {
      // A module that has not drafted yet reads the tokens above the level too.
      for (const Row& row : level_) {
        const Active& a = *row.active;
        if (row.node >= 0 && level <= a.levels && !a.lost) next_.push_back(row);
      }
    }
    const std::size_t above = next_.size();
    for (std::size_t i = 0; i < active_count_; ++i) add_frontier(active_[i], level);
    if (next_.size() == above) break;
    run_level(level);
    expand(above);
  }
  for (std::size_t i = 0; i < active_count_; ++i) {
    Active& a = active_[i];
    if (!a.sampled && !a.lost) a.tree.finish(a.request->max_nodes, *a.out);
  }
}

// Runs next_, whose parents level_ has, and makes it the new level_.
void HeadDrafter::run_level(std::int64_t level) {
  const std::int64_t module = std::min(level, later_.count());
  Runner& runner = module == 1 ? runner_ : later_.runner(module);
  const bool begins = level <= later_.count();
  begins ? runner.begin() : runner.begin_level();
  inputs_.clear();
  outputs_.clear();
  const auto find = [](std::vector<Row>& rows, const Row& child, std::int32_t node) -> Row* {
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
      return row.active == child.active && row.node == node;
    });
    return found == rows.end() ? nullptr : &*found;
  };
  for (Row& row : next_) {
    const std::int32_t parent = parent_of(row);
    const SequenceId id = row.active->request->id;
    const bool first = parent < 0;
    const Row* above = first && begins ? nullptr : find(level_, row, parent);
    // In this module: it has the parent's row already, or in this pass.
    const Row* before = begins ? find(next_, row, parent) : above;
    row.row = runner.add_node(id, token_of(row), first ? -1 : before->scratch);
    row.scratch = runner.scratch_of(row.row);
    inputs_.push_back(above == nullptr ? later_.last_state(id, module - 1)
                                       : hidden_[now_].row(above->state));
  }
  now_ = 1 - now_;
  for (Row& row : next_) {
    row.state = std::ssize(outputs_);
    outputs_.push_back(hidden_[now_].row(row.state));
  }
  runner.forward_head(inputs_, outputs_, true);
  std::swap(level_, next_);
  drafting_ = &runner;
}

// Runs what has become known, of each sequence up to its last position, and makes first levels.
void HeadDrafter::root_level() {
  level_.clear();
  std::size_t begun = 0;
  now_ = 0;
  runner_.begin();
  roots_.clear();
  while (begun < active_count_) {
    runner_.begin_level();
    inputs_.clear();
    outputs_.clear();
    fed_.clear();
    level_.clear();
    for (std::size_t i = begun; i < active_count_ && runner_.rows() < runner_.max_rows(); ++i) {
      Active& a = active_[i];
      const std::int64_t left = a.state->known - a.state->cached;
      const std::int64_t count = std::min(left, runner_.max_rows() - runner_.rows());
      feed(a.request->id, *a.state, count);
      if (count < left) break;
      level_.push_back({&a, -1, -1, runner_.rows() - 1, static_cast<std::int64_t>(i)});
      // Of several modules the next one goes on from here.
      if (!later_.any()) outputs_.back() = hidden_[now_].row(static_cast<std::int64_t>(i));
      ++begun;
    }
    run_fed();
    drafting_ = &runner_;
    if (growing_) {
      rank_roots();
    } else {
      expand(0);
    }
    roots_.insert(roots_.end(), level_.begin(), level_.end());
  }
  std::swap(level_, roots_);
}

TokenId HeadDrafter::token_of(const Row& row) const {
  return row.active->sampled ? row.active->out->tokens()[static_cast<std::size_t>(row.node)]
                             : row.active->tree.token(row.node);
}

std::int32_t HeadDrafter::parent_of(const Row& row) const {
  return row.active->sampled ? row.active->out->parents()[static_cast<std::size_t>(row.node)]
                             : row.active->tree.parent(row.node);
}

// The rows of the level that comes next: nodes that get children.
void HeadDrafter::add_frontier(Active& a, std::int64_t level) {
  if (a.lost || level > a.levels) return;
  if (!a.sampled) {
    // What is not among the best max_nodes of its level is not among those of all.
    const std::int64_t most = std::min(options_.top_k, a.request->max_nodes);
    for (const std::int32_t node : a.tree.close_level(most)) next_.push_back({&a, node});
    return;
  }
  const auto size = static_cast<std::int32_t>(a.shape.size());
  for (std::int32_t node = 0; node < size; ++node) {
    const auto at = static_cast<std::size_t>(node);
    const std::int32_t own = a.grown[at];
    if (own < 0 || a.shape.depths()[at] + 1 != level || !a.shape.has_children(node)) continue;
    next_.push_back({&a, own, node});
  }
}

std::shared_ptr<Drafter> make_head_drafter(const Model& head, const Model& target,
                                           const DraftHeadOptions& options) {
  return make_head_drafter(std::span(&head, 1), target, options);
}

std::shared_ptr<Drafter> make_head_drafter(std::span<const Model> modules, const Model& target,
                                           const DraftHeadOptions& options) {
  if (std::ssize(modules) != options.modules) {
    throw InvalidArgument(
        expected_got("draft head", std::to_string(options.modules) + " modules, as the options say",
                     std::to_string(modules.size())));
  }
  const bool loaded =
      std::all_of(modules.begin(), modules.end(), [](const Model& one) { return one.valid(); });
  if (modules.empty() || !loaded || !target.valid()) {
    throw InvalidArgument(
        "[draft head] expected a loaded head and a loaded target, got an empty one");
  }
  const ModelConfig& h = modules.front().config();
  for (const Model& one : modules) {
    if (!(one.config().head == h.head) || config_to_text(one.config(), one.precision()) !=
                                              config_to_text(h, modules.front().precision())) {
      throw InvalidArgument("[draft head] expected modules of one config, got different ones");
    }
  }
  const ModelConfig& t = target.config();
  if (options.kv_cache_bytes <= 0) {
    throw InvalidArgument(
        expected_got("kv_cache_bytes", "at least 1", std::to_string(options.kv_cache_bytes)));
  }
  options.features.check(t.num_layers);
  if (h.head.kind != HeadKind::none && h.head.feature_size != t.hidden_size) {
    throw InvalidArgument(expected_got("draft head",
                                       "the target's hidden_size " + std::to_string(t.hidden_size),
                                       std::to_string(h.head.feature_size)));
  }
  const std::vector<TokenId>& map = options.target_of_draft;
  if (!map.empty() && std::ssize(map) != h.vocab_size) {
    throw InvalidArgument(expected_got("target_of_draft",
                                       std::to_string(h.vocab_size) + " ids, one a draft id",
                                       std::to_string(map.size())));
  }
  for (std::size_t d = 0; d < map.size(); ++d) {
    if (map[d] < 0 || map[d] >= t.vocab_size || (d > 0 && map[d] <= map[d - 1])) {
      throw InvalidArgument(
          expected_got("target_of_draft", "rising ids below " + std::to_string(t.vocab_size),
                       std::to_string(map[d]) + " for draft id " + std::to_string(d)));
    }
  }
  return std::make_shared<HeadDrafter>(modules, target, options);
}

}  // namespace specrt
