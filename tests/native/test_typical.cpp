// Typical acceptance, against its reference and against what can be computed by hand.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "check.h"
#include "decode/typical.h"
#include "reference/typical.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::DraftTree;
using specrt::InvalidArgument;
using specrt::SamplingParams;
using specrt::TokenId;
using specrt::TypicalWalk;
using specrt::Verification;
using specrt::reference::Law;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

SamplingParams typical(double temperature = 1.0) {
  SamplingParams params;
  params.verification = Verification::typical;
  params.temperature = temperature;
  return params;
}

std::vector<float> floats(const Law& law) { return {law.begin(), law.end()}; }

std::vector<int> walk(const DraftTree& tree, const std::vector<Law>& laws,
                      const SamplingParams& params) {
  TypicalWalk walk;
  walk.start(tree, params);
  std::int32_t last = -2;
  std::int32_t leader = -2;
  while (walk.running()) {
    CHECK(walk.node() > last);  // rows come in order
    last = walk.node();
    CHECK(walk.accepted(last));
    if (walk.leads()) leader = last;
    walk.step(floats(laws[static_cast<std::size_t>(last + 1)]));
  }
  const std::vector<int> path(walk.path().begin(), walk.path().end());
  // The token behind the path's end has been asked for, unless the text ends there.
  const int end = path.empty() ? -1 : path.back();
  if (params.stop_token_ids.empty()) CHECK_EQ(leader, end);
  return path;
}

/// Every law is of the last token alone: logits[last][next].
std::vector<std::vector<float>> logits_of(const std::vector<Law>& laws) {
  std::vector<std::vector<float>> out;
  for (const Law& law : laws) {
    out.emplace_back();
    for (const double p : law) out.back().push_back(static_cast<float>(std::log(p)));
  }
  return out;
}

std::shared_ptr<tiny::ScriptedDrafter> always(DraftTree tree) {
  return std::make_shared<tiny::ScriptedDrafter>(
      "always", std::vector<Tokens>{},
      [tree](const specrt::DraftRequest& request, std::span<const TokenId>, DraftTree& out) {
        for (std::size_t i = 0; i < tree.size(); ++i) {
          if (static_cast<std::int64_t>(i) >= request.max_nodes) return;
          out.add(tree.tokens()[i], tree.parents()[i]);
        }
      });
}

}  // namespace

TEST(typical_bound_is_the_papers) {
  // Even among ten: exp(-H) is a tenth, so alpha decides. Swapped, the bound would be 0.009.
  const Law even(10, 0.1);
  CHECK_NEAR(specrt::typical_bound(floats(even), 0.09, 0.3), 0.03, 1e-4);
  // Certain: the threshold decides.
  CHECK_NEAR(specrt::typical_bound(floats({1.0, 0.0, 0.0}), 0.09, 0.3), 0.09, 1e-9);
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(-4.0, 4.0);
  for (int round = 0; round < 200; ++round) {
    Law law(static_cast<std::size_t>(1 + random() % 5000));
    double sum = 0.0;
    for (double& p : law) sum += p = std::exp(uniform(random));
    for (double& p : law) p /= sum;
    CHECK_NEAR(specrt::typical_bound(floats(law), 0.2, 0.7),
               specrt::reference::typical_bound(law, 0.2, 0.7), 1e-5);
  }
}

TEST(typical_walk_takes_the_longest_then_the_likeliest_path) {
  // Behind every token: 0.6, 0.3, 0.08, 0.02. exp(-H) is 0.39, so both bounds are near 0.09 to 0.12
  // and tokens 0 and 1 are typical.
  const Law law = {0.6, 0.3, 0.08, 0.02};
  const auto path_of = [&](std::vector<TokenId> tokens, std::vector<std::int32_t> parents) {
    const std::vector<Law> laws(tokens.size() + 1, law);
    return walk(DraftTree(std::move(tokens), std::move(parents)), laws, typical());
  };
  CHECK((path_of({1, 1, 1}, {-1, 0, 1}) == std::vector<int>{0, 1, 2}));
  CHECK((path_of({1, 2, 1}, {-1, 0, 1}) == std::vector<int>{0}));  // what follows a refused one
  CHECK((path_of({2, 3}, {-1, -1}).empty()));
  CHECK((path_of({0, 1, 1}, {-1, -1, 1}) == std::vector<int>{1, 2}));  // longer, if less likely
  CHECK((path_of({1, 0}, {-1, -1}) == std::vector<int>{1}));           // likelier
  CHECK((path_of({1, 0, 0, 1}, {-1, -1, 0, 1}) == std::vector<int>{0, 2}));  // equal: the first
  CHECK((path_of({0, 1, 1, 0}, {-1, -1, 0, 1}) == std::vector<int>{0, 2}));
}

TEST(typical_walk_ends_at_a_stop_token) {
  const Law law = {0.6, 0.3, 0.08, 0.02};
  SamplingParams params = typical();
  params.stop_token_ids = {1};
  // What is drafted behind the stop does not count: the other path is longer.
  const std::vector<Law> laws(6, law);
  CHECK((walk(DraftTree({1, 0, 0, 0, 0}, {-1, 0, 1, -1, 3}), laws, params) ==
         std::vector<int>{3, 4}));
  CHECK((walk(DraftTree({0, 1, 0}, {-1, 0, 1}), {law, law, law, law}, params) ==
         std::vector<int>{0, 1}));
}

TEST(typical_walk_equals_its_reference) {
  std::mt19937_64 random(7);
  const auto below = [&](std::uint64_t n) { return static_cast<int>(random() % n); };
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    const int vocab = 3 + below(6);
    DraftTree tree;
    std::vector<int> tokens, parents;
    const int size = 1 + below(20);
    for (int i = 0; i < size; ++i) {
      const int parent = below(static_cast<std::uint64_t>(tree.size()) + 1) - 1;
      const int token = below(static_cast<std::uint64_t>(vocab));
      if (tree.child(parent, token) >= 0) continue;
      tree.add(token, parent);
      tokens.push_back(token);
      parents.push_back(parent);
    }
    std::vector<Law> laws;
    for (std::size_t i = 0; i <= tree.size(); ++i) {
      Law law(static_cast<std::size_t>(vocab));
      double sum = 0.0;
      for (double& p : law) sum += p = std::exp(0.02 * (below(400) - 200));
      for (double& p : law) p = static_cast<float>(p / sum);
      laws.push_back(law);
    }
    SamplingParams params = typical();
    params.posterior_threshold = 0.05 + 0.1 * below(4);
    params.posterior_alpha = 0.2 + 0.3 * below(4);
    const std::vector<int> expected = specrt::reference::typical_path(
        tokens, parents, [&](int node) { return laws[static_cast<std::size_t>(node + 1)]; },
        params.posterior_threshold, params.posterior_alpha);
    CHECK((walk(tree, laws, params) == expected));
    accepted += static_cast<int>(expected.size());
  }
  CHECK(accepted > 1500);
}

TEST(typical_greedy_is_exact) {
  const specrt::Model model = tiny::random_model(tiny::small_spec());
  const std::int64_t vocab = model.config().vocab_size;
  std::vector<Request> requests(3);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(30 + i, 3 + 5 * i, vocab);
    requests[i].params.max_tokens = 40;
    requests[i].params.logprobs = 2;
  }
  const specrt::DecoderOptions options = tiny::options_for(model, 3, 64);
  specrt::Decoder plain(model, options);
  const std::vector<Output> expected = tiny::run(plain, requests, tiny::fixed(0));
  std::vector<Tokens> texts;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    texts.push_back(tiny::joined(requests[i].prompt, expected[i].tokens));
  }
  for (const tiny::Kind kind : tiny::kDrafters) {
    for (Request& request : requests) {
      request.params.verification = Verification::typical;
      request.drafter = tiny::make_drafter(kind, texts, vocab);
    }
    specrt::Decoder decoder(model, options);
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(9));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      CHECK_EQ(tiny::difference(outputs[i], expected[i]), "");
    }
  }
}

// A drafter that always says the same: what comes out is known but for the token behind it.
TEST(typical_decoder_takes_what_the_rule_says) {
  const Law law = {0.6, 0.3, 0.08, 0.02};
  const specrt::Model model = tiny::bigram_model(logits_of({law, law, law, law}));
  const auto run = [&](DraftTree tree, SamplingParams params) {
    params.seed = 11;
    params.max_tokens = 61;
    params.logprobs = 1;
    specrt::Decoder decoder(model, tiny::options_for(model, 1, 64));
    return tiny::run(decoder, {{{2}, params, always(std::move(tree))}}, tiny::fixed(8))[0];
  };
  const Output likely = run(DraftTree({1, 1, 1}, {-1, 0, 1}), typical());
  CHECK_EQ(likely.error, "");
  CHECK_EQ(likely.counters.accepted, 45);  // 1 + 15 rounds of 3 + 1
  CHECK_EQ(likely.counters.drafted, 45);
  for (std::size_t i = 1; i < likely.tokens.size(); ++i) {
    if (i % 4 != 0) CHECK_EQ(likely.tokens[i], 1);
    const double p = law[static_cast<std::size_t>(likely.tokens[i])];
    CHECK_NEAR(likely.logprobs[i].logprob, std::log(p), 1e-4);
  }
  // The same seed says the same; tokens behind the drafts are the target's own choice, not all one.
  CHECK_EQ(tiny::difference(run(DraftTree({1, 1, 1}, {-1, 0, 1}), typical()), likely), "");
  bool zero = false, other = false;
  for (std::size_t i = 0; i < likely.tokens.size(); i += 4) {
    (likely.tokens[i] == 0 ? zero : other) = true;
  }
  CHECK(zero && other);

  const Output branch = run(DraftTree({2, 0, 1, 1}, {-1, -1, -1, 2}), typical());
  CHECK_EQ(branch.counters.accepted, 40);  // two of each round: the longer path
  const Output never = run(DraftTree({3, 2}, {-1, -1}), typical());
  CHECK_EQ(never.counters.accepted, 0);
  CHECK_EQ(never.counters.first_rejections, never.counters.full_rounds);
  // Nothing is refused where any likelihood is enough, but what cannot be.
  SamplingParams lax = typical();
  lax.posterior_alpha = 1e-6;
  CHECK_EQ(run(DraftTree({3, 2, 3}, {-1, 0, 1}), lax).counters.accepted, 45);
  lax.top_k = 2;
  CHECK_EQ(run(DraftTree({3, 2, 3}, {-1, 0, 1}), lax).counters.accepted, 0);
  // At a low temperature the second token is not typical any more: 0.5 / 0.3 to the tenth.
  CHECK_EQ(run(DraftTree({1, 1, 1}, {-1, 0, 1}), typical(0.1)).counters.accepted, 0);
  // Its path's own history counts: no token comes again before every other has come as often.
  SamplingParams once = typical();
  once.frequency_penalty = 100.0;
  const Output said = run(DraftTree({1, 1}, {-1, 0}), once);
  CHECK(said.counters.accepted > 0);
  std::vector<int> counts(4, 0);
  for (const TokenId token : said.tokens) {
    ++counts[static_cast<std::size_t>(token)];
    CHECK(*std::max_element(counts.begin(), counts.end()) <=
          *std::min_element(counts.begin(), counts.end()) + 1);
  }
}

// Without drafts nothing is lossy, whoever else drafts; a batch does not change what is said.
TEST(typical_in_a_batch) {
  const specrt::Model model = tiny::random_model(tiny::small_spec());
  const std::int64_t vocab = model.config().vocab_size;
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(70 + i, 4 + i, vocab);
    requests[i].params = typical(0.8);
    requests[i].params.seed = i;
    requests[i].params.max_tokens = 30;
    requests[i].params.logprobs = 1;
    requests[i].params.repetition_penalty = 1.2;
  }
  const specrt::DecoderOptions options = tiny::options_for(model, 4, 64);
  std::vector<Output> alone;
  for (Request& request : requests) {
    Request coupled = request;
    coupled.params.verification = Verification::coupled;
    const Output plain = tiny::run_alone(model, options, coupled, tiny::fixed(0));
    CHECK_EQ(tiny::difference(tiny::run_alone(model, options, request, tiny::fixed(5)), plain), "");
    request.drafter =
        tiny::make_drafter(tiny::Kind::bushy, {tiny::joined(request.prompt, plain.tokens)}, vocab);
    alone.push_back(tiny::run_alone(model, options, request, tiny::fixed(5)));
  }
  specrt::Decoder decoder(model, options);
  const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(5));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
  }
}

TEST(typical_parameters_are_checked) {
  SamplingParams params = typical();
  params.check(10);
  for (const double wrong : {0.0, -0.1, 1.1, std::nan("")}) {
    SamplingParams one = params;
    one.posterior_threshold = wrong;
    CHECK_THROWS(one.check(10), InvalidArgument, "posterior_threshold");
  }
  for (const double wrong : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    SamplingParams one = params;
    one.posterior_alpha = wrong;
    CHECK_THROWS(one.check(10), InvalidArgument, "posterior_alpha");
  }
  for (const Verification other :
       {Verification::coupled, Verification::rejection, Verification::block}) {
    SamplingParams one;
    one.verification = other;
    one.check(10);
    one.posterior_threshold = 0.2;
    CHECK_THROWS(one.check(10), InvalidArgument, "typical");
  }
  CHECK(specrt::verification_from_name("typical") == Verification::typical);
}
