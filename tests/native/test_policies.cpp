// Whole decoders under each policy: what is drafted, and that `coupled` text never depends on it.

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::CostModel;
using specrt::Decoder;
using specrt::InvalidArgument;
using specrt::Model;
using specrt::Policy;
using specrt::SamplingParams;
using specrt::Verification;
using tiny::Kind;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

constexpr std::int64_t kVocab = 64;

const Model& counter() {
  static const Model model = tiny::counter_model(kVocab);
  return model;
}

Tokens counting(specrt::TokenId start, std::size_t size) {
  Tokens tokens(size);
  for (std::size_t i = 0; i < size; ++i) {
    tokens[i] = static_cast<specrt::TokenId>((static_cast<std::size_t>(start) + i) % kVocab);
  }
  return tokens;
}

Request request_of(specrt::TokenId start, std::int64_t max_tokens, Policy policy,
                   Kind kind = Kind::oracle) {
  Request request;
  request.prompt = {start};
  request.params.max_tokens = max_tokens;
  request.params.speculation.policy = policy;
  request.drafter = tiny::make_scripted(kind, {counting(start, 400)}, kVocab);
  return request;
}

CostModel cost_of(double one_row, double more_rows) {
  CostModel model;
  model.set_pass({{1, one_row}, {2, one_row + more_rows}, {512, one_row + 511 * more_rows}}, 0, 0);
  return model;
}

/// Rounds with the cost model that is given, whatever passes take.
tiny::Planner by_policies(std::int64_t gamma, CostModel model) {
  return [gamma, model](const Decoder& decoder, int) {
    const_cast<Decoder&>(decoder).set_cost_model(model);
    return specrt::plan_policies(decoder, gamma);
  };
}

std::int64_t nodes_of(const specrt::Plan& plan, specrt::SequenceId id) {
  for (const specrt::PlanItem& item : plan) {
    if (item.id == id) return item.tokens;
  }
  return -1;
}

}  // namespace

TEST(policies_give_each_sequence_its_own) {
  Decoder decoder(counter(), tiny::options_for(counter(), 6, 300, 4));
  std::vector<specrt::SequenceId> ids;
  const auto add = [&](Policy policy, std::int64_t nodes) {
    Request one = request_of(static_cast<specrt::TokenId>(ids.size()), 200, policy);
    one.params.speculation.num_speculative_tokens = nodes;
    ids.push_back(decoder.add(one.prompt, one.params, one.drafter));
  };
  add(Policy::fixed, 5);
  add(Policy::fixed, -1);
  add(Policy::off, 0);
  add(Policy::goodput, 6);
  add(Policy::ema_tiers, -1);
  add(Policy::brake, 2);
  (void)decoder.round(specrt::plan_policies(decoder, 4));
  decoder.set_cost_model(cost_of(1.0, 0.0));
  const specrt::Plan plan = specrt::plan_policies(decoder, 4);
  const std::vector<std::int64_t> expected{5, 4, 0, 6, 4, 2};
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK_EQ(nodes_of(plan, ids[i]), expected[i]);
  // All under one.
  const specrt::Plan fixed = specrt::plan_fixed(decoder, 3);
  CHECK_EQ(nodes_of(fixed, ids[3]), 6);
  CHECK_EQ(nodes_of(fixed, ids[4]), 3);
  CHECK_EQ(nodes_of(fixed, ids[2]), 0);
  decoder.set_cost_model(cost_of(0.001, 1.0));  // rows cost all there is
  const specrt::Plan dear = specrt::plan_goodput(decoder, 4);
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK_EQ(nodes_of(dear, ids[i]), 0);
}

// Where drafts have a say in the text, the brake decides, by its own sequence.
TEST(policies_that_look_around_leave_laws_alone) {
  for (const Policy policy : {Policy::goodput, Policy::ema_tiers}) {
    for (const Verification verification :
         {Verification::rejection, Verification::block, Verification::typical}) {
      Decoder decoder(counter(), tiny::options_for(counter(), 2, 300, 4));
      Request one = request_of(1, 200, policy);
      one.params.verification = verification;
      one.params.temperature = 0.5;
      const auto id = decoder.add(one.prompt, one.params, one.drafter);
      one.params.temperature = 0.0;  // a greedy one has one text
      const auto greedy = decoder.add(one.prompt, one.params, one.drafter);
      (void)decoder.round(specrt::plan_policies(decoder, 8));
      CostModel cliff;  // behind the rows that the other one takes
      cliff.set_pass({{1, 0.01}, {10, 0.01}, {11, 10.0}}, 0.0, 0.0);
      decoder.set_cost_model(cliff);
      const specrt::Plan plan = specrt::plan_policies(decoder, 8);
      CHECK_EQ(nodes_of(plan, id), 8);  // nothing failed yet
      CHECK_EQ(nodes_of(plan, greedy), policy == Policy::goodput ? 0 : 5);
    }
  }
}

TEST(policies_say_the_same) {
  const Model model = tiny::random_model(tiny::small_spec());
  const std::int64_t vocab = model.config().vocab_size;
  const auto options = tiny::options_for(model, 4, 80);
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    Request one;
    one.prompt = tiny::random_tokens(static_cast<std::uint64_t>(i) + 5, 6, vocab);
    one.params.max_tokens = 40;
    one.params.seed = static_cast<std::uint64_t>(i);
    one.params.temperature = i % 2 == 0 ? 0.0 : 0.9;
    one.params.logprobs = i % 3 == 0 ? 1 : -1;
    requests.push_back(one);
  }
  std::vector<Output> plain;
  std::vector<Tokens> texts;
  for (const Request& one : requests) {
    plain.push_back(tiny::run_alone(model, options, one, tiny::fixed(0)));
    texts.push_back(tiny::joined(one.prompt, plain.back().tokens));
  }
  std::int64_t drafted = 0;
  for (const Kind kind : {Kind::half, Kind::tree, Kind::bushy, Kind::ngram}) {
    for (const double row : {0.0, 0.1, 1.0}) {
      for (std::size_t i = 0; i < requests.size(); ++i) {
        constexpr Policy kAll[] = {Policy::goodput, Policy::goodput, Policy::ema_tiers,
                                   Policy::brake};
        requests[i].drafter = tiny::make_drafter(kind, texts, vocab);
        requests[i].params.speculation.policy = kAll[i];
        requests[i].params.speculation.target_tpot_seconds = i == 1 ? 0.5 : 0.0;
      }
      Decoder decoder(model, options);
      const std::vector<Output> got =
          tiny::run(decoder, requests, by_policies(6, cost_of(1.0, row)));
      for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK_EQ(tiny::difference(got[i], plain[i]), "");
        drafted += got[i].counters.drafted;
      }
      if (tiny::kThinned) break;
    }
  }
  CHECK(drafted > 200);
}

// Who decodes has time to spare for prompts, or not, or has missed its target whatever they do.
TEST(policies_prompts_wait_for_others_targets) {
  const auto limit_with = [](double target_tpot, double target_ttft) {
    Decoder decoder(counter(), tiny::options_for(counter(), 2, 60));
    SamplingParams params;
    params.max_tokens = 10;
    params.speculation.policy = Policy::goodput;
    params.speculation.target_tpot_seconds = target_tpot;
    (void)decoder.add(Tokens{1}, params);
    CHECK_EQ(decoder.round(specrt::plan_policies(decoder, 0))[0].tokens.size(), 1u);
    params.speculation.target_tpot_seconds = 0.0;
    params.speculation.target_ttft_seconds = target_ttft;
    (void)decoder.add(tiny::random_tokens(1, 40, 60), params);
    CostModel model;
    model.set_pass({{1, 10.0}, {512, 1000.0}}, 0.0, 0.0);
    decoder.set_cost_model(model);
    CHECK_EQ(decoder.prompt_limit(0), 0);
    return decoder.prompt_limit(400);
  };
  CHECK_EQ(limit_with(0.0, 0.0), 400);
  const std::int64_t few = limit_with(20.0, 0.0);
  const std::int64_t more = limit_with(30.0, 0.0);
  CHECK(few > 0 && few < more && more < 400);
  CHECK_EQ(limit_with(200.0, 0.0), 400);
  CHECK_EQ(limit_with(11.0, 0.0), 0);
  CHECK_EQ(limit_with(9.0, 0.0), 400);
  CHECK_EQ(limit_with(20.0, 1e-9), 400);  // the prompt is late
}

// Drafts that fail are given up, whatever rows cost, and tried again; a drafter's record is what
// the next sequence starts from.
TEST(policies_goodput_learns_what_drafts_are_worth) {
  const auto options = tiny::options_for(counter(), 1, 320, 16);
  Decoder decoder(counter(), options);
  const auto planner = by_policies(4, cost_of(1.0, 0.3));
  const Request wrong = request_of(0, 250, Policy::goodput, Kind::wrong);
  const Output first = tiny::run(decoder, {wrong}, planner)[0];
  const Output second = tiny::run(decoder, {wrong}, planner)[0];
  CHECK(first.counters.drafted > 0 && first.counters.drafted < 30);
  CHECK(second.counters.drafted > 0 && second.counters.drafted < 15);
  const Output right = tiny::run(decoder, {request_of(0, 250, Policy::goodput)}, planner)[0];
  CHECK(right.counters.accepted > 100);
}

// Confident and right, or not and wrong: with the drafts at hand, the wrong ones are left out.
TEST(policies_goodput_trims_what_confidences_doubt) {
  const auto fill = [](const specrt::DraftRequest& request, std::span<const specrt::TokenId> text,
                       specrt::DraftTree& tree) {
    const std::size_t at = request.tokens.size();
    for (std::int64_t i = 0; i < std::min(request.max_nodes, request.max_depth); ++i) {
      const bool sure = (at + static_cast<std::size_t>(i)) % 5 < 3;
      const specrt::TokenId next = text[at + static_cast<std::size_t>(i)];
      tree.add(sure ? next : static_cast<specrt::TokenId>((next + 1) % kVocab),
               static_cast<std::int32_t>(i) - 1, std::log(sure ? 0.95f : 0.2f));
    }
  };
  Request one = request_of(0, 300, Policy::goodput);
  one.drafter =
      std::make_shared<tiny::ScriptedDrafter>("sure", std::vector<Tokens>{counting(0, 400)}, fill);
  const auto options = tiny::options_for(counter(), 1, 320, 16);
  const Output trimmed =
      tiny::run_alone(counter(), options, one, by_policies(6, cost_of(1.0, 0.2)));
  one.params.speculation.policy = Policy::fixed;
  const Output whole = tiny::run_alone(counter(), options, one, tiny::fixed(6));
  CHECK_EQ(tiny::difference(trimmed, whole), "");
  const auto share = [](const Output& output) {
    return static_cast<double>(output.counters.accepted) /
           static_cast<double>(output.counters.drafted);
  };
  CHECK(share(trimmed) > 0.7);
  CHECK(share(whole) < 0.5);
}

// What others draft brings tokens and takes time: beside them a node has to bring more.
TEST(policies_goodput_counts_what_others_draft) {
  const auto nodes_beside = [](Policy policy) {
    Decoder decoder(counter(), tiny::options_for(counter(), 2, 300, 16));
    const Request other = request_of(0, 200, policy);
    decoder.add(other.prompt, other.params, other.drafter);
    for (int i = 0; i < 20; ++i) (void)decoder.round(specrt::plan_policies(decoder, 6));
    const Request one = request_of(5, 200, Policy::goodput, Kind::half);
    const auto id = decoder.add(one.prompt, one.params, one.drafter);
    (void)decoder.round(specrt::plan_policies(decoder, 6));
    // Its first node is expected to bring 0.7 tokens, for 0.5 of a pass of one row. Beside 6 nodes
    // that are always right it would have to be nearly 0.9, beside none 0.67.
    decoder.set_cost_model(cost_of(1.0, 0.5));
    return nodes_of(specrt::plan_policies(decoder, 6), id);
  };
  CHECK_EQ(nodes_beside(Policy::off), 1);
  CHECK_EQ(nodes_beside(Policy::fixed), 0);
}

// Time in a queue counts towards the first token: then there is none for others' drafts.
TEST(policies_goodput_counts_time_in_the_queue) {
  const auto nodes_after = [](double waited) {
    Decoder decoder(counter(), tiny::options_for(counter(), 2, 300, 16));
    const Request one = request_of(0, 200, Policy::goodput);
    const auto id = decoder.add(one.prompt, one.params, one.drafter);
    for (int i = 0; i < 20; ++i) (void)decoder.round(specrt::plan_policies(decoder, 8));
    Request late = request_of(1, 8, Policy::goodput);
    late.params.speculation.target_ttft_seconds = 1000.0;
    decoder.add(late.prompt, late.params, late.drafter, nullptr, -1, waited);
    CostModel model;
    model.set_pass({{1, 5.0}, {2, 5.0}, {3, 6.0}, {512, 515.0}}, 0.0, 0.0);
    decoder.set_cost_model(model);
    return nodes_of(specrt::plan_policies(decoder, 8), id);
  };
  CHECK(nodes_after(0.0) >= 4);
  CHECK(nodes_after(992.5) <= 3);
  Decoder decoder(counter(), tiny::options_for(counter(), 1, 64));
  const Request one = request_of(1, 8, Policy::off);
  for (const double waited : {-1.0, double{NAN}, 1e300}) {
    CHECK_THROWS(decoder.add(one.prompt, one.params, nullptr, nullptr, -1, waited), InvalidArgument,
                 "[waited_seconds]");
  }
}

TEST(policies_synthetic_rates_hold) {
  const auto options = tiny::options_for(counter(), 1, 480, 16);
  for (const double rate : {0.0, 0.4, 0.8, 1.0}) {
    Request one = request_of(0, 450, Policy::fixed, Kind::wrong);
    one.drafter = specrt::make_synthetic_drafter();
    one.params.speculation.synthetic_acceptance_rates = {rate};
    const specrt::SequenceCounters counters =
        tiny::run_alone(counter(), options, one, tiny::fixed(4)).counters;
    const auto decided = static_cast<double>(counters.full_accepted + counters.first_rejections);
    CHECK(decided > 200);
    // Six standard deviations of a binomial.
    const double slack = 6.0 * std::sqrt(rate * (1.0 - rate) / decided);
    CHECK_NEAR(static_cast<double>(counters.full_accepted) / decided, rate, slack);
  }
}

TEST(policies_refuse_what_cannot_be) {
  SamplingParams params;
  params.speculation.num_speculative_tokens = -2;
  CHECK_THROWS(params.check(64), InvalidArgument, "[num_speculative_tokens]");
  params.speculation = {};
  params.speculation.policy = Policy::off;
  params.speculation.num_speculative_tokens = 2;
  CHECK_THROWS(params.check(64), InvalidArgument, "[num_speculative_tokens]");
  params.speculation = {};
  params.speculation.target_tpot_seconds = 0.1;
  CHECK_THROWS(params.check(64), InvalidArgument, "[target_tpot_seconds]");
  params.speculation.policy = Policy::goodput;
  params.check(64);
  params.speculation.target_ttft_seconds = NAN;
  CHECK_THROWS(params.check(64), InvalidArgument, "[target_ttft_seconds]");
  params.speculation = {};
  params.speculation.synthetic_acceptance_rates = {0.5, 1.1};
  CHECK_THROWS(params.check(64), InvalidArgument, "[synthetic_acceptance_rates]");
  params.speculation.synthetic_acceptance_rates = {0.5};
  params.verification = Verification::rejection;
  CHECK_THROWS(params.check(64), InvalidArgument, "[verification]");
  params.speculation = {};
  params.speculation.policy = Policy::adasd;
  CHECK_THROWS(params.check(64), InvalidArgument, "[verification]");
  CHECK_THROWS(specrt::policy_from_name("fast"), InvalidArgument, "[policy]");
  Decoder decoder(counter(), tiny::options_for(counter(), 1, 64));
  const Request adasd = request_of(1, 8, Policy::adasd);
  CHECK_THROWS(decoder.add(adasd.prompt, adasd.params, adasd.drafter), specrt::UnsupportedError,
               "[policy]");
  CHECK(decoder.idle());
}

TEST(policies_costs_are_measured_in_an_idle_decoder) {
  Decoder decoder(counter(), tiny::options_for(counter(), 2, 300, 16));
  const std::int64_t free_before = decoder.free_kv_tokens();
  specrt::DraftModelOptions options;
  options.kv_cache_bytes = 1 << 20;
  options.max_model_len = 300;
  options.max_batch_size = 2;
  const auto drafter = specrt::make_model_drafter(counter(), kVocab, options);
  const CostModel model = specrt::measure_cost(decoder, drafter, 4, 0.05, 20);
  CHECK(decoder.idle());
  CHECK_EQ(decoder.free_kv_tokens(), free_before);
  CHECK(model.measured());
  CHECK_EQ(model.table().front().first, 1);
  CHECK(model.table().size() >= 4);
  CHECK(model.drafts().contains(drafter->name()));
  CHECK(model.draft_seconds(drafter->name(), 0.0, 4, 1) > 0.0);
  const Request one = request_of(1, 8, Policy::fixed);
  decoder.add(one.prompt, one.params, one.drafter);
  CHECK_THROWS(specrt::measure_cost(decoder, nullptr, 4), InvalidArgument, "[measure_cost]");
}

// The texts that costs are measured with say nothing of what a drafter is worth.
TEST(policies_measuring_costs_leaves_no_opinion_of_drafts) {
  struct Hopeless final : specrt::Drafter {
    const std::string& name() const override { return own_name; }
    void admit(specrt::SequenceId, std::span<const specrt::TokenId>, std::int64_t) override {}
    void propose(std::span<const specrt::DraftRequest> requests,
                 std::span<specrt::DraftTree> out) override {
      for (std::size_t i = 0; i < requests.size(); ++i) {
        std::int32_t parent = specrt::DraftTree::kRoot;
        for (std::int64_t depth = 0; depth < requests[i].max_depth; ++depth) {
          parent = out[i].add(requests[i].tokens.back(), parent);  // a counter says another one
        }
      }
    }
    void observe(specrt::SequenceId, std::span<const specrt::TokenId>) override {}
    void release(specrt::SequenceId) override {}
    specrt::MemoryUse memory() const override { return {}; }
    double step_cost(std::int64_t) const override { return 0.01; }  // else it is not measured
    std::string own_name = "hopeless";
  };
  const auto hopeless = std::make_shared<Hopeless>();
  std::vector<std::int64_t> planned[2];
  for (const bool measured : {false, true}) {
    Decoder decoder(counter(), tiny::options_for(counter(), 2, 300, 16));
    if (measured) (void)specrt::measure_cost(decoder, hopeless, 4, 0.05, 60);
    Request one = request_of(1, 200, Policy::goodput);
    one.drafter = hopeless;
    const specrt::SequenceId id = decoder.add(one.prompt, one.params, one.drafter);
    while (decoder.sequences()[0].prompt_left > 0) decoder.round({{id, 1}});
    for (int more = 1; more < 70; ++more) {
      decoder.set_cost_model(cost_of(1.0, 0.01 * more));
      planned[measured].push_back(specrt::plan_goodput(decoder, 8)[0].tokens);
    }
  }
  CHECK(planned[0].front() > 2);
  CHECK(planned[0].back() < planned[0].front());
  CHECK(planned[1] == planned[0]);
}

// Where a pass takes long, all of it stays within the passes that it was given.
TEST(policies_measuring_costs_keeps_to_its_passes) {
  struct Counting final : specrt::Drafter {
    const std::string& name() const override { return own_name; }
    void admit(specrt::SequenceId, std::span<const specrt::TokenId>, std::int64_t) override {}
    void propose(std::span<const specrt::DraftRequest>, std::span<specrt::DraftTree>) override {
      ++drafts;
    }
    void observe(specrt::SequenceId, std::span<const specrt::TokenId>) override {}
    void release(specrt::SequenceId) override {}
    specrt::MemoryUse memory() const override { return {}; }
    double step_cost(std::int64_t) const override { return 0.01; }
    std::string own_name = "counting";
    int drafts = 0;
  };
  for (const double seconds : {1e-9, 5.0}) {
    const auto drafter = std::make_shared<Counting>();
    Decoder decoder(counter(), tiny::options_for(counter(), 8, 300, 16));
    const CostModel model = specrt::measure_cost(decoder, drafter, 4, seconds, 20);
    CHECK(model.table().size() >= 6);
    CHECK(model.drafts().contains("counting"));
    // A first draft and those that count, of three kinds.
    CHECK_EQ(drafter->drafts, seconds < 1.0 ? 3 * 2 : 3 * 4);
  }
}
