#include "decode/head_modules.h"

#include <algorithm>

namespace specrt {

HeadModules::HeadModules(std::span<const Model> later, const Model& target, const HeadSizes& sizes,
                         const RunnerOptions& runner, std::int64_t target_vocab, bool remembers)
    : remembers_(remembers) {
  for (const Model& one : later) {
    runners_.push_back(std::make_unique<Runner>(one, runner, target));
    keys_.emplace_back(target_vocab, count());
  }
  if (!any()) return;
  const Runner& first = *runners_.front();
  const std::int64_t hidden = first.config().hidden_size;
  for (HeldRows& one : outputs_) one = first.hold(sizes.module_rows, hidden);
  last_ = first.hold(runner.max_batch_size * std::ssize(runners_), hidden);
  for (std::int64_t i = runner.max_batch_size; i-- > 0;) places_.push_back(i);
  inputs_.reserve(static_cast<std::size_t>(sizes.module_rows));
  next_outputs_.reserve(static_cast<std::size_t>(sizes.module_rows));
}

bool HeadModules::can_add(std::int64_t positions) const {
  return std::all_of(runners_.begin(), runners_.end(),
                     [&](const auto& one) { return one->cache().can_add(positions); });
}

bool HeadModules::reserve(SequenceId id, std::int64_t positions) {
  return std::all_of(runners_.begin(), runners_.end(),
                     [&](const auto& one) { return one->cache().reserve(id, positions); });
}

std::int64_t HeadModules::admit(SequenceId id, std::span<const TokenId> prompt,
                                std::int64_t max_length, std::int64_t limit, std::int64_t positions,
                                std::int64_t known) {
  State state;
  if (any()) {
    state.place = places_.back();
    places_.pop_back();
  }
  for (std::size_t k = 0; k < runners_.size(); ++k) {
    std::vector<TokenId>& keys = state.keys.emplace_back();
    keys.reserve(static_cast<std::size_t>(max_length));
    keys_[k].append(prompt, keys);
    std::span<const TokenId> shared;
    // One more, for the last position of a prompt is never shared.
    const auto most = static_cast<std::size_t>(std::min(known + 1, limit));
    if (remembers_ && known > 0) {
      shared = std::span<const TokenId>(keys).first(std::min(keys.size(), most));
    }
    known = std::min(known, runners_[k]->cache().add(id, positions, shared));
  }
  for (const auto& one : runners_) {
    if (one->cache().length(id) > known) one->cache().truncate(id, known);
  }
  states_.emplace(id, std::move(state));
  return any() ? known : limit;
}

void HeadModules::release(SequenceId id) {
  for (const auto& one : runners_) one->cache().remove(id);
  const auto found = states_.find(id);
  if (any()) places_.push_back(found->second.place);
  states_.erase(found);
}

void HeadModules::learn(SequenceId id, std::span<const TokenId> tokens) {
  if (!any()) return;
  State& state = states_.at(id);
  for (std::size_t k = 0; k < runners_.size(); ++k) keys_[k].append(tokens, state.keys[k]);
}

void HeadModules::follow(std::span<const Piece> pieces) {
  if (!any()) return;
  before_.clear();
  for (const Piece& one : pieces) {
    before_.push_back({one.first, one.row, std::ssize(one.tokens)});
  }
  for (std::size_t k = 0; k < runners_.size(); ++k) {
    const HeldRows& outputs = outputs_[k % 2];
    Runner& runner = *runners_[k];
    const auto behind = static_cast<std::int64_t>(k) + 1;  // positions, behind the head
    runner.begin();
    inputs_.clear();
    next_outputs_.clear();
    now_.clear();
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      const Piece& piece = pieces[p];
      const std::int64_t start = runner.cache().length(piece.id);
      // Its row for position i reads the token that the head reads at i + behind.
      const std::int64_t skipped = std::max<std::int64_t>(0, start - (piece.first - behind));
      const std::int64_t rows = std::max<std::int64_t>(0, std::ssize(piece.tokens) - skipped);
      now_.push_back({start, runner.rows(), rows});
      if (rows == 0) continue;
      runner.add_committed(piece.id, piece.tokens.subspan(static_cast<std::size_t>(skipped)));
      const float* kept = last_state(piece.id, static_cast<std::int64_t>(k) + 1);
      for (std::int64_t i = start; i < start + rows; ++i) {
        const Span& one = before_[p];
        inputs_.push_back(i < one.first ? kept : outputs.row(one.row + i - one.first));
        if (k + 1 == runners_.size()) continue;
        next_outputs_.push_back(outputs_[(k + 1) % 2].row(std::ssize(next_outputs_)));
      }
    }
    if (runner.rows() > 0) runner.forward_head(inputs_, next_outputs_, false);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      const SequenceId id = pieces[p].id;
      State& state = states_.at(id);
      if (before_[p].count > 0) {
        runner.copy_state(outputs.row(before_[p].row + before_[p].count - 1),
                          last_row(state, static_cast<std::int64_t>(k) + 1));
      }
      if (now_[p].count == 0) continue;
      runner.advance(id, now_[p].count);
      if (remembers_) {
        const auto length = static_cast<std::size_t>(runner.cache().length(id));
        runner.cache().remember(id, std::span<const TokenId>(state.keys[k]).first(length));
      }
    }
    runner.settle_states();
    std::swap(before_, now_);
  }
}

const float* HeadModules::last_state(SequenceId id, std::int64_t k) const {
  return last_row(states_.at(id), k);
}

MemoryUse HeadModules::memory() const {
  MemoryUse use;
  for (const auto& one : runners_) {
    const MemoryUse own = one->memory();
    use.weights += own.weights;
    use.kv_cache += own.kv_cache;
  }
  return use;
}

void HeadModules::check_invariants() const {
  for (const auto& one : runners_) one->cache().check_invariants();
}

}  // namespace specrt
