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
  hidden_ = runners_.front()->config().hidden_size;
  outputs_.resize(static_cast<std::size_t>(sizes.module_rows * hidden_));
  inputs_.reserve(static_cast<std::size_t>(sizes.module_rows));
}

bool HeadModules::can_add(std::int64_t limit) const {
  return std::all_of(runners_.begin(), runners_.end(),
                     [&](const auto& one) { return one->cache().can_add(limit); });
}

std::int64_t HeadModules::admit(SequenceId id, std::span<const TokenId> prompt,
                                std::int64_t max_length, std::int64_t limit, std::int64_t known) {
  State state;
  state.last.resize(runners_.size() * static_cast<std::size_t>(hidden_));
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
    known = std::min(known, runners_[k]->cache().add(id, limit, shared));
  }
  for (const auto& one : runners_) {
    if (one->cache().length(id) > known) one->cache().truncate(id, known);
  }
  states_.emplace(id, std::move(state));
  return any() ? known : limit;
}

void HeadModules::release(SequenceId id) {
  for (const auto& one : runners_) one->cache().remove(id);
  states_.erase(id);
}

void HeadModules::learn(SequenceId id, std::span<const TokenId> tokens) {
  if (!any()) return;
  State& state = states_.at(id);
  for (std::size_t k = 0; k < runners_.size(); ++k) keys_[k].append(tokens, state.keys[k]);
}

void HeadModules::follow(const Runner& head, std::span<const Piece> pieces) {
  if (!any()) return;
  const auto row_of = [this](std::int64_t row) { return outputs_.data() + row * hidden_; };
  before_.clear();
  for (const Piece& one : pieces) {
    before_.push_back({one.first, one.row, std::ssize(one.tokens)});
  }
  const Runner* last = &head;
  for (std::size_t k = 0; k < runners_.size(); ++k) {
    for (const Span& one : before_) {
      for (std::int64_t i = 0; i < one.count; ++i) {
        last->output_hidden(one.row + i, row_of(one.row + i));
      }
    }
    Runner& runner = *runners_[k];
    const auto behind = static_cast<std::int64_t>(k) + 1;  // positions, behind the head
    runner.begin();
    inputs_.clear();
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
      const float* kept = states_.at(piece.id).last.data() + static_cast<std::int64_t>(k) * hidden_;
      for (std::int64_t i = start; i < start + rows; ++i) {
        const Span& one = before_[p];
        inputs_.push_back(i < one.first ? kept : row_of(one.row + i - one.first));
      }
    }
    if (runner.rows() > 0) runner.forward_head(inputs_, false);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      const SequenceId id = pieces[p].id;
      State& state = states_.at(id);
      if (before_[p].count > 0) {
        const float* from = row_of(before_[p].row + before_[p].count - 1);
        std::copy(from, from + hidden_, state.last.data() + static_cast<std::int64_t>(k) * hidden_);
      }
      if (now_[p].count == 0) continue;
      runner.advance(id, now_[p].count);
      if (remembers_) {
        const auto length = static_cast<std::size_t>(runner.cache().length(id));
        runner.cache().remember(id, std::span<const TokenId>(state.keys[k]).first(length));
      }
    }
    std::swap(before_, now_);
    last = &runner;
  }
}

const float* HeadModules::last_state(SequenceId id, std::int64_t k) const {
  return states_.at(id).last.data() + (k - 1) * hidden_;
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
