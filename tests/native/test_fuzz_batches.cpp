// Batches at random: whatever a request's verification, penalties, filters and grammar, its output
// is the one that it has alone. `rejection` and `block` promise that for the same drafter and the
// same number of nodes asked for; `coupled` for any.

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>

#include "check.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::DraftTree;
using specrt::TokenId;
using specrt::Verification;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

constexpr std::int64_t kVocab = 24;
constexpr std::int64_t kLongest = 72;
constexpr std::int64_t kModelNodes = 3;  // asked of the draft model, which all its requests share
constexpr int kMostSequences = 8;

std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u;
  return x ^ (x >> 29);
}

/// Nodes that a sequence is always asked for; 0 and less: any number.
using Nodes = std::map<specrt::SequenceId, std::int64_t>;

/// A grammar of sorts: half of the tokens may come next, and which ones depends on the whole path.
class PathGrammar final : public specrt::TokenConstraint {
 public:
  explicit PathGrammar(std::uint64_t state) : state_(state) {}
  void fill_bitmask(std::span<std::uint32_t> mask) override {
    mask[0] = static_cast<std::uint32_t>(mixed(state_) >> 32) | 1u << state_ % kVocab;
  }
  void advance(TokenId token) override {
    CHECK_EQ(accepts(std::span(&token, 1)), 1);
    state_ = after(state_, token);
    ++length_;
  }
  bool finished() const override { return length_ > 5 && state_ % 29 == 0; }
  std::int64_t accepts(std::span<const TokenId> tokens) override {
    PathGrammar ahead(*this, 0);
    std::int64_t count = 0;
    for (const TokenId token : tokens) {
      std::uint32_t bits = 0;
      ahead.fill_bitmask(std::span(&bits, 1));
      if ((bits >> token & 1u) == 0) break;
      ahead.state_ = after(ahead.state_, token);
      ++count;
    }
    return count;
  }
  std::unique_ptr<TokenConstraint> fork() const override {
    return std::unique_ptr<TokenConstraint>(new PathGrammar(*this, 0));
  }

 private:
  PathGrammar(const PathGrammar& other, int) : state_(other.state_), length_(other.length_) {}
  static std::uint64_t after(std::uint64_t state, TokenId token) {
    return mixed(state * 131 + static_cast<std::uint64_t>(token) + 1);
  }
  std::uint64_t state_;
  std::int64_t length_ = 0;
};

/// Trees that depend on the text alone: of which shape, drawn from which law or from none.
class TextDrafter final : public specrt::Drafter {
 public:
  TextDrafter(std::uint64_t salt, bool chain, bool sampled, std::int64_t nodes,
              std::shared_ptr<Nodes> asked)
      : salt_(salt), chain_(chain), sampled_(sampled), nodes_(nodes), asked_(std::move(asked)) {}

  const std::string& name() const override { return name_; }
  void admit(specrt::SequenceId id, std::span<const TokenId>, std::int64_t) override {
    (*asked_)[id] = nodes_;
  }
  void observe(specrt::SequenceId, std::span<const TokenId>) override {}
  void release(specrt::SequenceId id) override { asked_->erase(id); }
  specrt::MemoryUse memory() const override { return {}; }

  void propose(std::span<const specrt::DraftRequest> requests, std::span<DraftTree> out) override {
    for (std::size_t i = 0; i < requests.size(); ++i) fill(requests[i], out[i]);
  }

 private:
  void fill(const specrt::DraftRequest& request, DraftTree& tree) {
    std::uint64_t hash = salt_;
    for (const TokenId token : request.tokens) {
      hash = mixed(hash * 31 + static_cast<std::uint64_t>(token));
    }
    std::mt19937_64 random(hash);
    if (sampled_) tree.set_draw(specrt::Draw::without_replacement);
    // Node by node, so that children of one node are drawn one after another.
    for (std::int32_t parent = DraftTree::kRoot;
         parent < static_cast<std::int32_t>(tree.size()) && room(tree, request); ++parent) {
      const std::int64_t depth =
          parent == DraftTree::kRoot ? 0 : tree.depths()[static_cast<std::size_t>(parent)];
      if (depth >= request.max_depth) break;
      std::vector<float> law(kVocab);
      for (float& value : law) {
        value = std::exp(3.0f * static_cast<float>(random() % 1000) / 1000.0f);
      }
      float sum = 0.0f;
      for (const float value : law) sum += value;
      for (float& value : law) value /= sum;
      if (sampled_) tree.set_distribution(parent, law);
      const std::uint64_t width = chain_ ? 1 : 1 + random() % 3;
      for (std::uint64_t i = 0; i < width && room(tree, request); ++i) {
        std::discrete_distribution<TokenId> draw(law.begin(), law.end());
        const TokenId token = draw(random);
        tree.add(token, parent, -1.0f);
        law[static_cast<std::size_t>(token)] = 0.0f;
      }
    }
  }
  static bool room(const DraftTree& tree, const specrt::DraftRequest& request) {
    return static_cast<std::int64_t>(tree.size()) < request.max_nodes;
  }

  std::uint64_t salt_;
  bool chain_;
  bool sampled_;
  std::int64_t nodes_;
  std::shared_ptr<Nodes> asked_;
  std::string name_ = "text";
};

/// A request whose drafter is made anew for every run.
struct Case {
  Request request;
  bool by_model = false;
  std::uint64_t salt = 0;
  bool chain = false;
  bool sampled = false;
  std::int64_t nodes = 0;
};

Case random_case(std::uint64_t seed) {
  std::mt19937_64 random(mixed(seed + 77));
  const auto one_in = [&](std::uint64_t n) { return random() % n == 0; };
  const auto part = [&] { return static_cast<double>(random() % 1000) / 1000.0; };
  Case one;
  Request& request = one.request;
  request.prompt = tiny::random_tokens(seed % 3, 1 + random() % 30, kVocab);  // many begin alike
  specrt::SamplingParams& params = request.params;
  params.max_tokens = 4 + static_cast<std::int64_t>(random() % 36);
  params.seed = random();
  params.logprobs = one_in(3) ? 2 : -1;
  params.temperature = one_in(5) ? 0.0 : 0.6 + part();
  if (one_in(3)) params.top_k = 3 + static_cast<std::int64_t>(random() % 15);
  if (one_in(3)) params.top_p = 0.7 + 0.29 * part();
  if (one_in(4)) params.min_p = 0.05 * part();
  if (one_in(4)) params.repetition_penalty = 0.8 + part();
  if (one_in(4)) params.frequency_penalty = part();
  if (one_in(4)) params.presence_penalty = 2.0 * part() - 0.5;
  if (one_in(5)) params.logit_bias = {{static_cast<TokenId>(random() % kVocab), 2.0f}};
  if (one_in(5)) params.bad_words = {{3, 4}, {static_cast<TokenId>(random() % kVocab)}};
  if (one_in(3)) params.stop_token_ids = {static_cast<TokenId>(random() % kVocab)};
  if (one_in(3)) params.min_tokens = static_cast<std::int64_t>(random() % 4);
  params.verification = static_cast<Verification>(random() % 3);
  if (params.verification != Verification::block && one_in(3)) {
    request.constraint = std::make_shared<PathGrammar>(random());
  }
  one.by_model = one_in(3);
  one.salt = random();
  one.chain = params.verification == Verification::block || one_in(2);
  one.sampled = one_in(2);
  one.nodes = params.verification == Verification::coupled
                  ? 0
                  : 1 + static_cast<std::int64_t>(random() % 7);
  return one;
}

std::shared_ptr<specrt::Drafter> draft_model() {
  tiny::Spec spec = tiny::small_spec();
  spec.vocab = kVocab;
  spec.head_scale = 1.5;
  spec.layers = 1;
  specrt::DraftModelOptions options;
  options.kv_cache_bytes = 4 << 20;
  options.max_batch_size = kMostSequences;
  options.max_rows = 64;
  options.threads = 1;
  return specrt::make_model_drafter(tiny::random_model(spec), kVocab, options);
}

/// What it is asked for is the sequence's own; everything else of a round is at random.
tiny::Planner planner(std::uint64_t seed, std::shared_ptr<Nodes> asked) {
  return [=](const specrt::Decoder& decoder, int round) {
    std::mt19937_64 random(mixed(seed) + static_cast<std::uint64_t>(round));
    specrt::Plan plan;
    std::int64_t rows = decoder.max_rows();
    for (const specrt::SequenceState& state : decoder.sequences()) {
      if (seed != 0 && random() % 6 == 0) continue;
      std::int64_t tokens = seed == 0 ? 64 : static_cast<std::int64_t>(random() % 9);
      std::int64_t needed = std::min(tokens, state.prompt_left);
      if (state.prompt_left == 0) {
        const auto found = asked->find(state.id);
        if (found == asked->end()) {
          tokens = state.has_drafter ? kModelNodes : 0;
        } else if (found->second > 0) {
          tokens = found->second;
        }
        needed = 1 + tokens;
      }
      if (needed > rows) continue;
      rows -= needed;
      plan.push_back({state.id, tokens});
    }
    if (seed != 0) std::shuffle(plan.begin(), plan.end(), random);
    return plan;
  };
}

specrt::DecoderOptions options(const specrt::Model& model, int sequences, int block_size,
                               int threads, std::int64_t rows, int pool = 0) {
  specrt::DecoderOptions out =
      tiny::options_for(model, pool > 0 ? pool : sequences, kLongest, block_size);
  out.max_batch_size = sequences;
  out.threads = threads;
  out.max_rows = static_cast<int>(rows);
  return out;
}

}  // namespace

TEST(fuzz_batches_every_request_is_as_if_alone) {
  tiny::Spec spec = tiny::small_spec();
  spec.vocab = kVocab;
  spec.head_scale = 1.5;
  const specrt::Model model = tiny::random_model(spec);
  const int cases = tiny::kThinned ? 24 : 120;
  std::vector<Case> all;
  std::vector<Output> alone;
  specrt::SequenceCounters total[3];
  std::int64_t grammars = 0;
  const auto prepared = [](const Case& one, const std::shared_ptr<Nodes>& asked,
                           const std::shared_ptr<specrt::Drafter>& shared) {
    Request request = one.request;
    request.drafter = one.by_model ? shared
                                   : std::make_shared<TextDrafter>(one.salt, one.chain, one.sampled,
                                                                   one.nodes, asked);
    return request;
  };
  {
    specrt::Decoder decoder(model, options(model, 1, 16, 1, 64));
    const auto asked = std::make_shared<Nodes>();
    const auto shared = draft_model();
    for (int i = 0; i < cases; ++i) {
      all.push_back(random_case(static_cast<std::uint64_t>(i)));
      const Case& one = all.back();
      Request request = prepared(one, asked, shared);
      // Alone, what `coupled` and greedy requests have without a draft.
      if (one.request.params.verification == Verification::coupled) request.drafter = nullptr;
      alone.push_back(tiny::run(decoder, {request}, planner(0, asked))[0]);
      CHECK_EQ(alone.back().error, std::string());
      const bool greedy = one.request.params.greedy();
      auto& counters = total[greedy ? 0 : static_cast<int>(one.request.params.verification)];
      counters.drafted += alone.back().counters.drafted;
      counters.accepted += alone.back().counters.accepted;
      grammars += one.request.constraint != nullptr && alone.back().counters.tokens > 3;
    }
  }
  // All kinds are there, and drafts that are accepted as well as rejected.
  CHECK(grammars * 12 > cases);
  for (const int which : {1, 2}) {
    CHECK(total[which].accepted > cases / 2);
    CHECK(total[which].drafted - total[which].accepted > cases / 2);
  }
  const int batches = tiny::kThinned ? 3 : 24;
  std::int64_t coupled_accepted = 0;
  std::int64_t preemptions = 0;
  for (int batch = 0; batch < batches; ++batch) {
    std::mt19937_64 random(mixed(static_cast<std::uint64_t>(batch) + 5));
    const auto asked = std::make_shared<Nodes>();
    const auto shared = draft_model();
    const int sequences = 1 + static_cast<int>(random() % kMostSequences);
    // Every other batch in a pool that has not room for all to their ends.
    const std::uint64_t preempt = batch % 2 == 0 ? 0 : 1 + random() % 1000;
    specrt::Decoder decoder(
        model, options(model, sequences, 4 << random() % 3, 1 + static_cast<int>(random() % 3),
                       static_cast<std::int64_t>(8 + random() % 56),
                       preempt == 0 ? 0 : 1 + sequences / 4));
    std::vector<Request> requests;
    std::vector<std::size_t> which;
    for (std::size_t i = 0; i < 16; ++i) {
      which.push_back(random() % all.size());
      requests.push_back(prepared(all[which.back()], asked, shared));
      requests.back().arrival = static_cast<int>(random() % 20);
    }
    const std::vector<Output> outputs = tiny::run(
        decoder, requests, planner(static_cast<std::uint64_t>(batch) + 1, asked), preempt);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Output& expected = alone[which[i]];
      CHECK_EQ(tiny::difference(outputs[i], expected), std::string());
      preemptions += outputs[i].counters.preemptions;
      if (requests[i].params.verification == Verification::coupled) {
        coupled_accepted += outputs[i].counters.accepted;
        continue;
      }
      CHECK_EQ(outputs[i].counters.drafted, expected.counters.drafted);
      CHECK_EQ(outputs[i].counters.accepted, expected.counters.accepted);
    }
  }
  CHECK(coupled_accepted > batches);
  CHECK(preemptions > batches);
}
