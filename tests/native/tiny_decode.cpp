#include "tiny_decode.h"

#include <algorithm>
#include <bit>
#include <random>

#include "check.h"
#include "specrt/error.h"

namespace tiny {

using specrt::Decoder;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::Finish;
using specrt::Plan;
using specrt::SequenceId;

DraftStats& DraftStats::operator+=(const DraftStats& other) {
  drafted += other.drafted;
  accepted += other.accepted;
  later_siblings += other.later_siblings;
  return *this;
}

ScriptedDrafter::ScriptedDrafter(std::string name, std::vector<Tokens> texts, Fill fill)
    : name_(std::move(name)), texts_(std::move(texts)), fill_(std::move(fill)) {}

void ScriptedDrafter::admit(SequenceId id, std::span<const TokenId>, std::int64_t) {
  CHECK(last_.emplace(id, DraftTree()).second);
}

void ScriptedDrafter::propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) {
  CHECK_EQ(requests.size(), out.size());
  ++calls_;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::span<const TokenId> tokens = requests[i].tokens;
    std::span<const TokenId> text;
    for (const Tokens& known : texts_) {
      if (known.size() >= tokens.size() &&
          std::equal(tokens.begin(), tokens.end(), known.begin())) {
        text = known;
      }
    }
    CHECK(out[i].empty());
    fill_(requests[i], text, out[i]);
    last_.at(requests[i].id) = out[i];
  }
}

void ScriptedDrafter::observe(SequenceId id, std::span<const TokenId> committed) {
  DraftTree& tree = last_.at(id);
  stats_.drafted += static_cast<std::int64_t>(tree.size());
  std::int32_t node = DraftTree::kRoot;
  for (const TokenId token : committed) {
    const std::int32_t child = tree.child(node, token);
    if (child < 0) break;
    ++stats_.accepted;
    for (std::int32_t i = node + 1; i < child; ++i) {
      if (tree.parents()[static_cast<std::size_t>(i)] == node) {
        ++stats_.later_siblings;
        break;
      }
    }
    node = child;
  }
  tree.clear();
}

void ScriptedDrafter::release(SequenceId id) { CHECK_EQ(last_.erase(id), 1u); }

namespace {

// What comes `ahead` tokens after the request, or -1.
TokenId truth(const DraftRequest& request, std::span<const TokenId> text, std::int64_t ahead) {
  const std::size_t at = request.tokens.size() + static_cast<std::size_t>(ahead);
  return at < text.size() ? text[at] : -1;
}

void chain(const DraftRequest& request, std::span<const TokenId> text, std::int64_t right,
           std::int64_t length, std::int64_t vocab, DraftTree& tree) {
  length = std::min({length, request.max_nodes, request.max_depth});
  for (std::int64_t i = 0; i < length; ++i) {
    const TokenId token = truth(request, text, i);
    if (token < 0) return;
    tree.add(i < right ? token : static_cast<TokenId>((token + 1) % vocab),
             static_cast<std::int32_t>(i) - 1);
  }
}

void staircase(const DraftRequest& request, std::span<const TokenId> text, std::int64_t vocab,
               DraftTree& tree) {
  const auto size = [&] { return static_cast<std::int64_t>(tree.size()); };
  std::int32_t parent = DraftTree::kRoot;
  for (std::int64_t depth = 1; depth <= request.max_depth; ++depth) {
    const TokenId right = truth(request, text, depth - 1);
    if (right < 0) return;
    const std::int64_t position = static_cast<std::int64_t>(request.tokens.size()) + depth;
    const std::int64_t wrong = request.max_nodes == 1 ? position % 2 : position % 3;
    for (std::int64_t i = 1; i <= wrong && size() < request.max_nodes; ++i) {
      std::int32_t node = tree.add(static_cast<TokenId>((right + i) % vocab), parent);
      // A wrong branch that goes on with tokens that would be right one line further down.
      for (std::int64_t j = 0; j < 2 && i == 1 && depth % 2 == 0; ++j) {
        const TokenId next = truth(request, text, depth + j);
        if (next < 0 || depth + j + 1 > request.max_depth || size() >= request.max_nodes) break;
        node = tree.add(next, node);
      }
    }
    if (size() >= request.max_nodes) return;
    parent = tree.add(right, parent);
  }
}

void bush(const DraftRequest& request, std::span<const TokenId> text, std::int64_t vocab,
          DraftTree& tree) {
  std::mt19937_64 random(request.tokens.size() * 1009 + static_cast<std::uint64_t>(request.id));
  const std::int64_t most = std::min<std::int64_t>(request.max_nodes, 24);
  std::vector<std::int64_t> on_path;  // whether every node up to this one is right
  while (static_cast<std::int64_t>(tree.size()) < most) {
    // Half the time below the newest node, so that some branches are deep.
    auto parent = static_cast<std::int32_t>(tree.size()) - 1;
    if (random() % 2 == 0) {
      parent = static_cast<std::int32_t>(random() % (tree.size() + 1)) - 1;
    }
    const std::int64_t depth =
        parent == DraftTree::kRoot ? 0 : tree.depths()[static_cast<std::size_t>(parent)];
    if (depth >= request.max_depth) {
      if (random() % 8 == 0) return;
      continue;
    }
    const bool parent_right =
        parent == DraftTree::kRoot || on_path[static_cast<std::size_t>(parent)] != 0;
    const TokenId right = truth(request, text, depth);
    const bool try_right = right >= 0 && random() % 3 != 0;
    const TokenId token =
        try_right ? right : static_cast<TokenId>(random() % static_cast<std::uint64_t>(vocab));
    if (tree.child(parent, token) >= 0) {
      if (random() % 8 == 0) return;
      continue;
    }
    tree.add(token, parent, -0.5f);
    on_path.push_back(parent_right && token == right ? 1 : 0);
  }
}

}  // namespace

std::shared_ptr<ScriptedDrafter> make_scripted(Kind kind, std::vector<Tokens> texts,
                                               std::int64_t vocab) {
  const char* name = "scripted";
  ScriptedDrafter::Fill fill;
  switch (kind) {
    case Kind::oracle:
      name = "oracle";
      fill = [=](const DraftRequest& r, std::span<const TokenId> text, DraftTree& tree) {
        chain(r, text, r.max_nodes, r.max_nodes, vocab, tree);
      };
      break;
    case Kind::half:
      name = "half";
      fill = [=](const DraftRequest& r, std::span<const TokenId> text, DraftTree& tree) {
        const std::int64_t odd = static_cast<std::int64_t>(r.tokens.size()) % 2;
        chain(r, text, (r.max_nodes + odd) / 2, r.max_nodes, vocab, tree);
      };
      break;
    case Kind::wrong:
      name = "wrong";
      // Long only now and then: rejected tokens would swamp what the others have accepted.
      fill = [=](const DraftRequest& r, std::span<const TokenId> text, DraftTree& tree) {
        chain(r, text, 0, r.tokens.size() % 37 == 0 ? r.max_nodes : 1, vocab, tree);
      };
      break;
    case Kind::tree:
      name = "tree";
      fill = [=](const DraftRequest& r, std::span<const TokenId> text, DraftTree& tree) {
        staircase(r, text, vocab, tree);
      };
      break;
    case Kind::bushy:
      name = "bushy";
      fill = [=](const DraftRequest& r, std::span<const TokenId> text, DraftTree& tree) {
        bush(r, text, vocab, tree);
      };
      break;
    case Kind::none:
    case Kind::ngram:
      return nullptr;
  }
  return std::make_shared<ScriptedDrafter>(name, std::move(texts), std::move(fill));
}

std::shared_ptr<specrt::Drafter> make_drafter(Kind kind, std::vector<Tokens> texts,
                                              std::int64_t vocab) {
  if (kind == Kind::ngram) return specrt::make_ngram_drafter({2, 4, true});
  return make_scripted(kind, std::move(texts), vocab);
}

Planner fixed(std::int64_t num_speculative_tokens) {
  return [=](const Decoder& decoder, int) { return plan_fixed(decoder, num_speculative_tokens); };
}

Planner restless(std::uint64_t seed, std::int64_t most_nodes) {
  return [=](const Decoder& decoder, int round) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(round) * 7919);
    Plan plan;
    std::int64_t rows = decoder.max_rows();
    for (const specrt::SequenceState& state : decoder.sequences()) {
      if (random() % 8 == 0) continue;
      std::int64_t tokens = 0;
      if (state.prompt_left > 0) {
        tokens = std::min<std::int64_t>(static_cast<std::int64_t>(random() % 6), rows);
        rows -= std::min(tokens, state.prompt_left);
      } else {
        if (rows < 1) continue;
        tokens = std::min<std::int64_t>(
            static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most_nodes + 1)),
            rows - 1);
        rows -= tokens + 1;
      }
      plan.push_back({state.id, tokens});
    }
    // Any order will do.
    std::shuffle(plan.begin(), plan.end(), random);
    return plan;
  };
}

specrt::DecoderOptions options_for(const specrt::Model& model, int sequences, std::int64_t tokens,
                                   int block_size, const std::string& kv_cache_dtype) {
  specrt::DecoderOptions options;
  options.kv_cache_dtype = kv_cache_dtype;
  options.max_batch_size = sequences;
  options.block_size = block_size;
  options.threads = 1;
  options.check_invariants = true;
  options.kv_cache_bytes =
      specrt::kv_cache_bytes_for(model.config(), model.precision(), options, sequences, tokens);
  return options;
}

namespace {

void take(const specrt::Progress& progress, const Request& request, Output& out) {
  CHECK(out.finish == Finish::none);
  out.tokens.insert(out.tokens.end(), progress.tokens.begin(), progress.tokens.end());
  out.logprobs.insert(out.logprobs.end(), progress.logprobs.begin(), progress.logprobs.end());
  out.finish = progress.finish;
  out.error = progress.error;
  CHECK(progress.counters != nullptr);
  out.counters = *progress.counters;
  const specrt::SequenceCounters& c = out.counters;
  CHECK_EQ(c.prompt_tokens, std::ssize(request.prompt));
  CHECK_EQ(c.rounds, c.full_rounds + c.truncated_rounds);
  CHECK(c.accepted >= c.full_accepted && c.drafted >= c.accepted);
  CHECK(c.first_rejections <= c.full_rounds);
  std::int64_t accepted = 0;
  std::int64_t rejected = 0;
  for (const std::int64_t count : c.accepted_at) accepted += count;
  for (const std::int64_t count : c.first_rejected_at) rejected += count;
  CHECK_EQ(accepted, c.full_accepted);
  CHECK_EQ(rejected, c.first_rejections);
  if (out.finish == Finish::error) {
    CHECK(progress.tokens.empty() && !out.error.empty());
    return;
  }
  CHECK(out.error.empty());
  CHECK_EQ(c.tokens, std::ssize(out.tokens));
  CHECK_EQ(c.tokens, (c.tokens == 0 ? 0 : 1) + c.accepted + c.rounds);
  // The end comes with the last token, not a round later.
  if (c.tokens > 0) CHECK(c.tokens < request.params.max_tokens || out.finish != Finish::none);
  CHECK_EQ(out.logprobs.size(), request.params.logprobs >= 0 ? out.tokens.size() : 0u);
}

}  // namespace

namespace {

/// Preempts sequences of a decoder and resumes them, the one that came first before others.
class Preempter {
 public:
  Preempter(Decoder& decoder, std::uint64_t seed) : decoder_(decoder), random_(seed) {}

  void before_round() {
    if (random_() % 8 == 0) preempt_last();
    while (!out_.empty() && random_() % 4 != 0) {
      const SequenceId id = *out_.begin();
      const auto reserve = static_cast<std::int64_t>(random_() % 5);
      if (!decoder_.can_resume(id, reserve)) {
        if (decoder_.sequences().empty()) check::fail(__FILE__, __LINE__, "nobody can run");
        break;
      }
      decoder_.resume(id, reserve);
      out_.erase(id);
    }
  }
  Plan fitted(Plan plan) {
    while (decoder_.reserve(plan).has_value()) {
      CHECK(decoder_.sequences().size() > 1);
      CHECK_THROWS(decoder_.begin_round(plan), specrt::CapacityError, "preempt a sequence");
      const SequenceId last = preempt_last();
      std::erase_if(plan, [&](const specrt::PlanItem& item) { return item.id == last; });
    }
    return plan;
  }

 private:
  SequenceId preempt_last() {
    SequenceId last = -1;
    for (const specrt::SequenceState& state : decoder_.sequences()) {
      last = std::max(last, state.id);
    }
    if (last < 0) return last;
    decoder_.preempt(last);
    CHECK_THROWS(decoder_.preempt(last), specrt::InvalidArgument, "running sequence");
    out_.insert(last);
    return last;
  }

  Decoder& decoder_;
  std::mt19937_64 random_;
  std::set<SequenceId> out_;
};

}  // namespace

std::vector<Output> run(Decoder& decoder, const std::vector<Request>& requests,
                        const Planner& planner, std::uint64_t preempt) {
  Preempter preempter(decoder, preempt);
  const std::int64_t reserve = preempt != 0 ? static_cast<std::int64_t>(preempt % 6) : -1;
  const std::int64_t free_before = decoder.free_kv_tokens();
  const bool was_idle = decoder.idle();
  std::vector<Output> outputs(requests.size());
  std::unordered_map<SequenceId, std::size_t> index;
  std::vector<bool> added(requests.size(), false);
  std::size_t finished = 0;
  for (int round = 0; finished < requests.size(); ++round) {
    CHECK(round < 100000);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Request& request = requests[i];
      if (added[i] || request.arrival > round ||
          !decoder.can_add(std::ssize(request.prompt), request.params.max_tokens, reserve)) {
        continue;
      }
      outputs[i].id = decoder.add(
          request.prompt, request.params, request.drafter,
          request.constraint != nullptr ? request.constraint->fork() : nullptr, reserve);
      index.emplace(outputs[i].id, i);
      added[i] = true;
    }
    if (preempt != 0) preempter.before_round();
    Plan plan = planner(decoder, round);
    if (preempt != 0) plan = preempter.fitted(std::move(plan));
    for (const specrt::Progress& progress : decoder.round(plan)) {
      const auto found = index.find(progress.id);
      if (found == index.end()) continue;
      take(progress, requests[found->second], outputs[found->second]);
      finished += progress.finish != Finish::none;
    }
  }
  if (was_idle) {
    CHECK(decoder.idle());
    CHECK_EQ(decoder.free_kv_tokens(), free_before);
  }
  return outputs;
}

Output run_alone(const specrt::Model& model, const specrt::DecoderOptions& options,
                 const Request& request, const Planner& planner) {
  Decoder decoder(model, options);
  return run(decoder, {request}, planner)[0];
}

std::string difference(const Output& a, const Output& b) {
  const auto at = [](const char* what, std::size_t i) {
    return std::string(what) + " " + std::to_string(i);
  };
  const auto same = [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  };
  for (std::size_t i = 0; i < std::min(a.tokens.size(), b.tokens.size()); ++i) {
    if (a.tokens[i] != b.tokens[i]) {
      return at("token", i) + ": " + std::to_string(a.tokens[i]) +
             " != " + std::to_string(b.tokens[i]);
    }
  }
  if (a.tokens.size() != b.tokens.size()) {
    return "tokens: " + std::to_string(a.tokens.size()) + " != " + std::to_string(b.tokens.size());
  }
  if (a.finish != b.finish) {
    return "finish: " + std::to_string(static_cast<int>(a.finish)) + " " + a.error +
           " != " + std::to_string(static_cast<int>(b.finish)) + " " + b.error;
  }
  if (a.logprobs.size() != b.logprobs.size()) return "number of logprobs";
  for (std::size_t i = 0; i < a.logprobs.size(); ++i) {
    const specrt::TokenLogprobs& x = a.logprobs[i];
    const specrt::TokenLogprobs& y = b.logprobs[i];
    if (!same(x.logprob, y.logprob)) return at("logprob", i);
    if (x.rank != y.rank) return at("rank", i);
    if (x.top.size() != y.top.size()) return at("size of top", i);
    for (std::size_t k = 0; k < x.top.size(); ++k) {
      if (x.top[k].first != y.top[k].first || !same(x.top[k].second, y.top[k].second)) {
        return at("top of", i);
      }
    }
  }
  return "";
}

Tokens joined(const Tokens& prompt, const Tokens& continuation) {
  Tokens text = prompt;
  text.insert(text.end(), continuation.begin(), continuation.end());
  return text;
}

}  // namespace tiny
