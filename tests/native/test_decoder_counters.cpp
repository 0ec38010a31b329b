// What a decoder counts, worked out by hand over the counter model, and stopping from outside.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::Decoder;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::Finish;
using specrt::InvalidArgument;
using specrt::SequenceCounters;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;
using Counts = std::vector<std::int64_t>;

const specrt::Model& counter() {
  static const specrt::Model model = tiny::counter_model(64);
  return model;
}

/// Proposes these trees, one a round, then nothing.
std::shared_ptr<tiny::ScriptedDrafter> in_turn(std::vector<DraftTree> trees) {
  auto next = std::make_shared<std::size_t>(0);
  return std::make_shared<tiny::ScriptedDrafter>(
      "in turn", std::vector<Tokens>(),
      [next, trees = std::move(trees)](const DraftRequest&, std::span<const TokenId>,
                                       DraftTree& tree) {
        if (*next < trees.size()) tree = trees[(*next)++];
      });
}

DraftTree chain(const Tokens& tokens) { return DraftTree::chain(tokens); }

Request request_for(std::int64_t max_tokens, std::vector<DraftTree> trees) {
  Request request;
  request.prompt = {3};
  request.params.max_tokens = max_tokens;
  request.drafter = in_turn(std::move(trees));
  return request;
}

SequenceCounters count(const Request& request, std::int64_t gamma = 8) {
  const Output output =
      tiny::run_alone(counter(), tiny::options_for(counter(), 1, 100), request, tiny::fixed(gamma));
  for (std::size_t i = 0; i < output.tokens.size(); ++i) {
    CHECK_EQ(output.tokens[i], static_cast<TokenId>(4 + i));
  }
  return output.counters;
}

/// A decoder whose only sequence has been through its prefill and `rounds` rounds.
struct Started {
  explicit Started(const Request& request, int rounds, std::int64_t gamma)
      : decoder(counter(), tiny::options_for(counter(), 1, 100)),
        free(decoder.free_kv_tokens()),
        id(decoder.add(request.prompt, request.params, request.drafter)) {
    for (int i = 0; i <= rounds; ++i) (void)decoder.round(specrt::plan_fixed(decoder, gamma));
  }
  Decoder decoder;
  std::int64_t free;
  specrt::SequenceId id;
};

}  // namespace

TEST(counters_of_chains_and_trees) {
  // Under the root 0, 13 and 1; under 13, 9 and 14; under 14, 2 and 3; under 0, 14.
  const DraftTree tree({0, 13, 1, 9, 14, 2, 3, 14}, {-1, -1, -1, 1, 1, 4, 4, 0});
  const SequenceCounters c = count(request_for(14, {
                                                       chain({5, 6, 9, 10}),  // 5 6, then 7
                                                       chain({8, 9}),         // 8 9, then 10
                                                       DraftTree(),           // 11
                                                       chain({0}),            // 12
                                                       tree,                  // 13 14, then 15
                                                       chain({16}),           // 16, then 17
                                                   }));
  CHECK_EQ(c.prompt_tokens, 1);
  CHECK_EQ(c.tokens, 14);
  CHECK_EQ(c.rounds, 6);
  CHECK_EQ(c.drafted, 4 + 2 + 0 + 1 + 8 + 1);
  CHECK_EQ(c.accepted, 2 + 2 + 0 + 0 + 2 + 1);
  CHECK_EQ(c.truncated_rounds, 1);  // the last one
  CHECK_EQ(c.full_rounds, 5);
  CHECK_EQ(c.full_accepted, 6);
  CHECK_EQ(c.first_rejections, 3);
  CHECK(c.drafted_at == (Counts{4, 3, 2, 1}));
  CHECK(c.accepted_at == (Counts{3, 3, 0, 0}));
  CHECK(c.first_rejected_at == (Counts{1, 0, 2, 0}));
}

TEST(counters_of_extremes) {
  std::vector<DraftTree> wrong(30, chain({0, 1, 2}));
  SequenceCounters c = count(request_for(20, wrong), 3);
  CHECK_EQ(c.accepted, 0);
  CHECK_EQ(c.rounds, 19);
  CHECK_EQ(c.first_rejections, c.full_rounds);
  // Near the end the draft is cut to 2, 1 and 0 tokens, and only those count.
  CHECK_EQ(c.drafted, 16 * 3 + 2 + 1);
  CHECK_EQ(c.truncated_rounds, 3);
  CHECK(c.first_rejected_at == (Counts{16, 0, 0}));

  c = count(request_for(21, {chain({5, 6, 7, 8}), chain({10, 11, 12, 13}), chain({15, 16, 17, 18}),
                             chain({20, 21, 22, 23})}),
            4);
  CHECK_EQ(c.drafted, 16);
  CHECK_EQ(c.accepted, 16);
  CHECK_EQ(c.rounds, 4);
  CHECK_EQ(c.first_rejections, 0);
  CHECK_EQ(c.truncated_rounds, 1);
  CHECK(c.accepted_at == (Counts{3, 3, 3, 3}));

  for (const std::int64_t max_tokens : {0, 1}) {
    c = count(request_for(max_tokens, {}));
    CHECK_EQ(c.tokens, max_tokens);
    CHECK_EQ(c.rounds + c.drafted + c.accepted + c.truncated_rounds, 0);
    CHECK(c.drafted_at.empty());
  }
}

// A draft as deep as the limits allow was cut by them, whether or not it was accepted.
TEST(counters_of_cut_drafts) {
  const SequenceCounters c = count(request_for(4, {chain({0, 1, 2, 3})}));
  CHECK_EQ(c.rounds, 3);
  CHECK_EQ(c.drafted, 2);
  CHECK_EQ(c.truncated_rounds, 2);  // the cut draft, and the last token
  CHECK_EQ(c.full_rounds, 1);
  CHECK_EQ(c.first_rejections, 0);
}

// Trees beyond what was asked for are pruned, deepest and last nodes first.
TEST(counters_of_pruned_trees) {
  const DraftTree tree({0, 5, 1, 6, 7, 8}, {-1, -1, -1, 1, 3, 4});
  SequenceCounters c = count(request_for(30, {tree}), 4);
  CHECK_EQ(c.drafted, 4);
  CHECK_EQ(c.accepted, 2);
  c = count(request_for(30, {tree}), 1);
  CHECK_EQ(c.drafted, 1);
  CHECK_EQ(c.accepted, 0);
  c = count(request_for(4, {tree}), 10);  // depth 2 at most: 0 5 1 6
  CHECK_EQ(c.drafted, 4);
  CHECK_EQ(c.accepted, 2);
}

TEST(decoder_stop_drops_the_end_of_a_round) {
  const std::vector<DraftTree> drafts{chain({5, 9}), chain({7, 8, 9, 10, 11, 12})};
  for (std::int64_t dropped = 0; dropped <= 6; ++dropped) {
    Started started(request_for(50, drafts), 2, 6);
    CHECK_THROWS(started.decoder.stop(started.id, 7), InvalidArgument, "less than the 7 tokens");
    CHECK_THROWS(started.decoder.stop(started.id, -1), InvalidArgument, "[stop]");
    const SequenceCounters c = started.decoder.stop(started.id, dropped);
    CHECK_EQ(c.rounds, 2);
    CHECK_EQ(c.tokens, 1 + 2 + 7 - dropped);
    CHECK_EQ(c.accepted, 1 + 6 - dropped);
    CHECK_EQ(c.tokens, 1 + c.accepted + c.rounds);
    CHECK_EQ(c.drafted, 8);
    CHECK_EQ(c.truncated_rounds, 1);
    CHECK_EQ(c.full_rounds, 1);
    CHECK_EQ(c.full_accepted, 1);
    CHECK_EQ(c.first_rejections, 1);
    CHECK(c.drafted_at == (Counts{1, 1, 0, 0, 0, 0}));
    CHECK(c.accepted_at == (Counts{1, 0, 0, 0, 0, 0}));
    CHECK(c.first_rejected_at == (Counts{0, 1, 0, 0, 0, 0}));
    CHECK(started.decoder.idle());
    CHECK_EQ(started.decoder.free_kv_tokens(), started.free);
    CHECK_THROWS(started.decoder.cancel(started.id), InvalidArgument, "[sequence]");
  }
}

// A round that ended in a rejection is taken out of the rejections too.
TEST(decoder_stop_takes_back_a_rejection) {
  Started started(request_for(50, {chain({5, 0, 0})}), 1, 3);
  const SequenceCounters c = started.decoder.stop(started.id, 1);
  CHECK_EQ(c.tokens, 2);
  CHECK_EQ(c.accepted, 0);
  CHECK_EQ(c.rounds, 1);
  CHECK_EQ(c.truncated_rounds, 1);
  CHECK_EQ(c.first_rejections, 0);
  CHECK(c.first_rejected_at == (Counts{0, 0, 0}));
}

TEST(decoder_stop_after_prefill) {
  Started started(request_for(50, {}), 0, 3);
  CHECK_THROWS(started.decoder.stop(started.id, 1), InvalidArgument, "[stop]");
  const SequenceCounters c = started.decoder.stop(started.id, 0);
  CHECK_EQ(c.tokens, 1);
  CHECK_EQ(c.rounds, 0);
  CHECK_EQ(c.truncated_rounds, 0);
}

TEST(decoder_stop_needs_a_round_of_the_sequence) {
  Decoder decoder(counter(), tiny::options_for(counter(), 2, 100));
  specrt::SamplingParams params;
  const auto a = decoder.add(Tokens{1, 2, 3}, params);
  const auto b = decoder.add(Tokens{1}, params);
  CHECK_THROWS(decoder.stop(a, 0), InvalidArgument, "less than the 0 tokens");
  (void)decoder.round({{a, 2}, {b, 1}});
  CHECK_THROWS(decoder.stop(a, 0), InvalidArgument, "[stop]");  // still in its prompt
  (void)decoder.round({{a, 1}});
  CHECK_THROWS(decoder.stop(b, 0), InvalidArgument, "[stop]");  // not in the last round
  (void)decoder.stop(a, 0);
  (void)decoder.round({{b, 0}});
  (void)decoder.stop(b, 0);
  CHECK(decoder.idle());
}

// A caller's stop may lie before the end that the core saw in the same round.
TEST(decoder_stop_after_the_core_has_ended_the_sequence) {
  for (const bool by_stop_token : {false, true}) {
    Request request = request_for(by_stop_token ? 50 : 8, {chain({5, 6, 7, 8, 9, 10})});
    if (by_stop_token) request.params.stop_token_ids = {11};
    Started started(request, 1, 6);
    CHECK(started.decoder.idle());
    const SequenceCounters c = started.decoder.stop(started.id, 5);
    CHECK_EQ(c.tokens, 3);
    CHECK_EQ(c.accepted, 1);
    CHECK_EQ(c.rounds, 1);
    CHECK_EQ(c.truncated_rounds, 1);
    CHECK_EQ(started.decoder.free_kv_tokens(), started.free);
  }
}
