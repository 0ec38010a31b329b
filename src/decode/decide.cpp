#include <algorithm>

#include "decode/decoder_impl.h"

// How the rows of a pass decide what becomes of each draft.

namespace specrt {

// Drops nodes that the constraint would refuse. Sampled drafts keep them: their rejection counts.
void Decoder::Impl::prune_by_constraint(Sequence& s) {
  const DraftTree& tree = s.draft;
  std::vector<bool> allowed(tree.size(), false);
  std::vector<bool> inner(tree.size(), false);
  for (const std::int32_t parent : tree.parents()) {
    if (parent >= 0) inner[static_cast<std::size_t>(parent)] = true;
  }
  std::vector<std::int32_t> nodes;
  std::vector<TokenId> tokens;
  for (std::size_t leaf = 0; leaf < tree.size(); ++leaf) {
    if (inner[leaf]) continue;
    nodes.clear();
    for (auto at = static_cast<std::int32_t>(leaf); at >= 0;
         at = tree.parents()[static_cast<std::size_t>(at)]) {
      nodes.push_back(at);
    }
    std::reverse(nodes.begin(), nodes.end());
    tokens.clear();
    for (const std::int32_t node : nodes) {
      tokens.push_back(tree.tokens()[static_cast<std::size_t>(node)]);
    }
    const std::int64_t count = s.state.constraint()->accepts(tokens);
    if (count < 0 || count > std::ssize(tokens)) {
      throw InvalidArgument(expected_got(
          "constraint", "to accept 0 to " + std::to_string(tokens.size()) + " of these tokens",
          std::to_string(count)));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      allowed[static_cast<std::size_t>(nodes[static_cast<std::size_t>(i)])] = true;
    }
  }
  s.draft.keep(allowed);
}

void Decoder::Impl::add_logprobs(const Sequence& s, std::span<const float> logits, TokenId token,
                                 std::vector<TokenLogprobs>& out) {
  if (s.params.logprobs < 0) return;
  out.emplace_back();
  chooser.logprobs(logits, token, s.params.logprobs, out.back());
}

// The walk goes on with a token that the target has settled on.
void Decoder::Impl::take(Sequence& s, TokenId token, std::int32_t child) {
  const bool is_stop = s.is_stop(token);
  // A stop token ends the sequence whatever the constraint has to say about it.
  if (is_stop) {
    s.state.push(token);
  } else {
    s.state.commit(token);
  }
  s.walk.step(token, child, is_stop || s.state.finished());
}

void Decoder::Impl::choose(Sequence& s, std::span<const float> logits) {
  const std::int64_t position = s.length() + static_cast<std::int64_t>(s.walk.emitted().size());
  try {
    if (s.verifies_block()) {
      step_block(s, logits, position);
      return;
    }
    if (s.verifies_typical()) {
      step_typical(s, logits, position);
      return;
    }
    const std::span<const float> row = chooser.processed(logits, s.state, s.state.constraint());
    const std::int32_t node = s.walk.node();
    if (s.params.speculation.synthetic()) {
      const std::int32_t child = synthetic_child(s);
      const TokenId token = child < 0 ? chooser.choose(row, s.params, position)
                                      : s.draft.tokens()[static_cast<std::size_t>(child)];
      add_logprobs(s, logits, token, s.logprobs);
      take(s, token, child);
    } else if (s.verifies_adasd()) {
      step_adasd(s, row, logits, position);
    } else if (s.params.follows_target_noise()) {  // with `typical`: nothing was drafted
      const TokenId token = chooser.choose(row, s.params, position);
      add_logprobs(s, logits, token, s.logprobs);
      take(s, token, s.draft.child(node, token));
    } else {
      const std::span<float> law = chooser.distribution(row, s.params);
      const Verdict verdict =
          reject_at_node(chooser, law, s.draft, node, s.params, position, draft_law);
      add_logprobs(s, logits, verdict.token, s.logprobs);
      take(s, verdict.token, verdict.child);
    }
  } catch (const std::exception& error) {
    fail(s, std::string(error.what()) + " at position " + std::to_string(position) +
                " of sequence " + std::to_string(s.id));
  }
}

// AdaSD: the target's own choice where it was drafted, and else the drafted token where the two
// laws are near enough. Drafts are chains.
void Decoder::Impl::step_adasd(Sequence& s, std::span<const float> row,
                               std::span<const float> logits, std::int64_t position) {
  const std::int32_t node = s.walk.node();
  TokenId token = chooser.choose(row, s.params, position);
  std::int32_t child = s.draft.child(node, token);
  if (s.draft.has_children(node)) {
    const std::int32_t drafted = node + 1;
    const TokenId other = s.draft.tokens()[static_cast<std::size_t>(drafted)];
    const std::span<const float> draft = s.draft.distribution(node);
    const std::span<const float> target = chooser.softened(row, s.params);
    const double distance = js_distance(target, draft);
    s.thresholds.observe(distance, child >= 0);
    if (child < 0 && distance <= s.thresholds.accept_within() &&
        target[static_cast<std::size_t>(other)] >= AdaptiveThresholds::kLeastProbability) {
      token = other;
      child = drafted;
    }
    if (child < 0) s.thresholds.observe_rejected(entropy(draft));
  }
  add_logprobs(s, logits, token, s.logprobs);
  take(s, token, child);
}

// The child of the walk's node that preset probabilities accept, in draft order; -1: none, and what
// the target chooses ends the walk, whether it was drafted or not.
std::int32_t Decoder::Impl::synthetic_child(const Sequence& s) const {
  const std::int32_t node = s.walk.node();
  const auto size = static_cast<std::int32_t>(s.draft.size());
  const auto depth = static_cast<std::int64_t>(s.walk.emitted().size()) + 1;
  const double rate = s.params.speculation.synthetic_rate(depth);
  std::uint32_t trial = 0;
  for (std::int32_t child = node + 1; child < size; ++child) {
    if (s.draft.parents()[static_cast<std::size_t>(child)] != node) continue;
    const double u = coin(s.params, s.length() + depth - 1, purpose_word(Purpose::accept), trial++);
    if (u < rate) return child;
  }
  return -1;
}

// Block verification looks at every node of the chain before it decides, so history and
// log-probabilities follow the draft first and are cut back to what was accepted.
void Decoder::Impl::step_block(Sequence& s, std::span<const float> logits, std::int64_t position) {
  const std::int32_t next = s.block.node() + 1;  // the node whose token this row decides
  position += next;
  const std::span<const float> row = chooser.processed(logits, s.state, nullptr);
  s.block.step(chooser.distribution(row, s.params), s.params, position);
  if (s.block.accepted() == next && s.params.logprobs >= 0) {
    s.last_logits.assign(logits.begin(), logits.end());
  }
  if (next < static_cast<std::int32_t>(s.draft.size())) {
    const TokenId token = s.draft.tokens()[static_cast<std::size_t>(next)];
    add_logprobs(s, logits, token, s.logprobs);
    s.state.push(token);
    return;
  }
  finish_block(s);
}

void Decoder::Impl::finish_block(Sequence& s) {
  for (auto node = static_cast<std::int32_t>(s.draft.size()) - 1; node >= 0; --node) {
    s.state.pop(s.draft.tokens()[static_cast<std::size_t>(node)]);
  }
  const std::int32_t accepted = s.block.accepted();
  const TokenId last = chooser.draw(s.block.residual(), s.params, s.length() + accepted,
                                    purpose_word(Purpose::residual));
  if (s.params.logprobs >= 0) {
    s.logprobs.resize(static_cast<std::size_t>(accepted));
    add_logprobs(s, s.last_logits, last, s.logprobs);
  }
  for (std::int32_t node = 0; node < accepted && s.walk.running(); ++node) {
    take(s, s.draft.tokens()[static_cast<std::size_t>(node)], node);
  }
  if (s.walk.running()) take(s, last, -1);
  // A stop or the limit may have come earlier.
  s.logprobs.resize(std::min(s.logprobs.size(), s.walk.emitted().size()));
}

// Logits behind a node's path, whose tokens count as history there.
std::span<const float> Decoder::Impl::processed_at(Sequence& s, std::int32_t node,
                                                   std::span<const float> logits) {
  if (s.state.neutral()) return logits;
  path.clear();
  for (std::int32_t at = node; at >= 0; at = s.draft.parents()[static_cast<std::size_t>(at)]) {
    path.push_back(at);
  }
  const auto token = [&](std::int32_t at) {
    return s.draft.tokens()[static_cast<std::size_t>(at)];
  };
  for (auto at = path.rbegin(); at != path.rend(); ++at) s.state.push(token(*at));
  const auto pop = [&] {
    for (const std::int32_t at : path) s.state.pop(token(at));
  };
  try {
    const std::span<const float> row = chooser.processed(logits, s.state, nullptr);
    pop();
    return row;
  } catch (...) {
    pop();
    throw;
  }
}

// Typical acceptance looks at every accepted node before it settles on a path, so the token behind
// a node and the log-probabilities of its children are kept until then.
void Decoder::Impl::step_typical(Sequence& s, std::span<const float> logits,
                                 std::int64_t position) {
  TypicalWalk& walk = s.typical;
  const std::int32_t node = walk.node();
  if (node >= 0) position += s.draft.depths()[static_cast<std::size_t>(node)];
  const std::span<const float> row = processed_at(s, node, logits);
  if (walk.leads()) {
    s.behind = chooser.choose(row, s.params, position);
    if (s.params.logprobs >= 0) {
      chooser.logprobs(logits, s.behind, s.params.logprobs, s.behind_logprobs);
    }
  }
  walk.step(chooser.distribution(row, s.params));
  if (s.params.logprobs >= 0) {
    s.node_logprobs.resize(s.draft.size());
    for (std::size_t child = 0; child < s.draft.size(); ++child) {
      if (s.draft.parents()[child] != node || !walk.accepted(static_cast<std::int32_t>(child))) {
        continue;
      }
      chooser.logprobs(logits, s.draft.tokens()[child], s.params.logprobs, s.node_logprobs[child]);
    }
  }
  if (!walk.running()) finish_typical(s);
}

void Decoder::Impl::finish_typical(Sequence& s) {
  const bool told = s.params.logprobs >= 0;
  for (const std::int32_t node : s.typical.path()) {
    if (!s.walk.running()) return;
    const auto at = static_cast<std::size_t>(node);
    if (told) s.logprobs.push_back(s.node_logprobs[at]);
    take(s, s.draft.tokens()[at], node);
  }
  if (!s.walk.running()) return;
  if (told) s.logprobs.push_back(s.behind_logprobs);
  take(s, s.behind, -1);
}

// Rows of this slice that stand in the sequence's prompt, each telling the token behind it.
void Decoder::Impl::add_prompt_logprobs(Sequence& s, std::span<const std::int64_t> rows,
                                        std::span<const float> logits) {
  const auto vocab = static_cast<std::size_t>(runner.config().vocab_size);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t offset = rows[i] - (s.root_row - s.planned + 1);
    if (offset < 0 || offset >= s.planned) continue;
    const std::int64_t told = s.processed + offset + 1;
    if (told >= s.prompt_tokens) continue;
    s.prompt_logprobs.emplace_back();
    try {
      chooser.logprobs(logits.subspan(i * vocab, vocab), s.tokens[static_cast<std::size_t>(told)],
                       s.params.prompt_logprobs, s.prompt_logprobs.back());
    } catch (const NumericError& error) {
      fail(s, std::string(error.what()) + " at position " + std::to_string(told) + " of sequence " +
                  std::to_string(s.id));
      return;
    }
  }
}

// A greedy request that nothing else asks of needs no logits, only the best of them.
void Decoder::Impl::choose_best(Sequence& s, const cpu::ArgMax& best, std::int64_t row) {
  if (!best.finite) {
    choose(s, runner.logits(std::span(&row, 1)));  // which says what is wrong
    return;
  }
  const auto token = static_cast<TokenId>(best.index);
  if (!s.params.speculation.synthetic()) {
    take(s, token, s.draft.child(s.walk.node(), token));
    return;
  }
  const std::int32_t child = synthetic_child(s);
  take(s, child < 0 ? token : s.draft.tokens()[static_cast<std::size_t>(child)], child);
}

// Walks trees with what is known of kLogitRows rows at a time: logits, or the best of them. A
// child's row lies behind its parent's, so one pass over the rows in order serves every walk, and
// rows behind the last one that any walk still waits for are never computed.
void Decoder::Impl::walk(bool best_only) {
  logit_rows.clear();
  const auto concerned = [&](const Sequence& s) {
    return s.in_pass && s.finish == Finish::none && !s.on_device &&
           s.wants_best_only() == best_only;
  };
  for (const auto& s : live) {
    if (!concerned(*s)) continue;
    if (s->wants_prompt_logprobs()) {
      for (std::int64_t row = s->root_row - s->planned + 1; row < s->root_row; ++row) {
        logit_rows.push_back(row);
      }
    }
    if (!s->wants_choice && !s->wants_prompt_logprobs()) continue;
    logit_rows.push_back(s->root_row);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(s->draft.size()); ++i) {
      logit_rows.push_back(s->tree_row + i);
    }
  }
  std::sort(logit_rows.begin(), logit_rows.end());
  const auto vocab = static_cast<std::size_t>(runner.config().vocab_size);
  const auto row_of = [](const Sequence& s) {
    const std::int32_t node = s.awaited();
    return node == DraftTree::kRoot ? s.root_row : s.tree_row + node;
  };
  for (std::size_t first = 0; first < logit_rows.size();) {
    const std::size_t last =
        std::min(logit_rows.size(), first + static_cast<std::size_t>(Runner::kLogitRows));
    const auto slice = std::span(logit_rows).subspan(first, last - first);
    first = last;
    const auto waits_here = [&](const Sequence& s) {
      return concerned(s) && s.wants_choice && s.walk.running() && row_of(s) >= slice.front() &&
             row_of(s) <= slice.back();
    };
    const auto tells_prompt = [&](const Sequence& s) {
      return concerned(s) && s.wants_prompt_logprobs();
    };
    if (std::none_of(live.begin(), live.end(),
                     [&](const auto& s) { return waits_here(*s) || tells_prompt(*s); })) {
      continue;
    }
    const auto place_of = [&](const Sequence& s) {
      const auto at = std::lower_bound(slice.begin(), slice.end(), row_of(s)) - slice.begin();
      return static_cast<std::size_t>(at);
    };
    if (best_only) {
      const std::span<const cpu::ArgMax> best = runner.best(slice);
      for (const auto& s : live) {
        while (waits_here(*s)) choose_best(*s, best[place_of(*s)], row_of(*s));
      }
      continue;
    }
    const std::span<const float> logits = runner.logits(slice);
    for (const auto& s : live) {
      if (tells_prompt(*s)) add_prompt_logprobs(*s, slice, logits);
    }
    for (const auto& s : live) {
      while (waits_here(*s)) choose(*s, logits.subspan(place_of(*s) * vocab, vocab));
    }
  }
}

// Puts the pass on the GPU's stream, and behind it what the GPU decides by itself.
void Decoder::Impl::launch_on_device() {
  launched = std::chrono::steady_clock::now();
  runner.forward();
  cuda_walk->begin();
  for (const auto& s : live) {
    if (s->on_device && s->finish == Finish::none) cuda_walk->add(*s);
  }
  if (!cuda_walk->empty()) cuda_walk->launch();
}

// What it has decided, entered here as if it had been decided here.
void Decoder::Impl::walk_on_device() {
  cuda_walk->wait();
  std::size_t index = 0;
  for (const auto& s : live) {
    if (!s->on_device || s->finish != Finish::none) continue;
    const CudaWalk::Verdict verdict = cuda_walk->verdict(index++);
    for (std::size_t i = 0; i < verdict.tokens.size(); ++i) {
      take(*s, verdict.tokens[i], i < verdict.path.size() ? verdict.path[i] : -1);
    }
    if (verdict.end == cuda::Walked::failed) {
      const std::int32_t node = s->walk.node();
      const std::int64_t row = node == DraftTree::kRoot ? s->root_row : s->tree_row + node;
      choose(*s, runner.logits(std::span(&row, 1)));  // which says what is wrong
    }
    if (s->finish == Finish::none &&
        static_cast<std::int32_t>(s->walk.end()) != static_cast<std::int32_t>(verdict.end)) {
      throw InternalError("[verify] the device's walk ended otherwise than its tokens say");
    }
  }
}

void Decoder::Impl::walk_all() {
  walk(true);
  walk(false);
}

}  // namespace specrt
