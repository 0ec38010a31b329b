// What a decoder tells of its last round and of all rounds together, over the counter model.

#include <cstdint>
#include <memory>
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
using specrt::InvalidArgument;
using specrt::SequenceCounters;
using specrt::TokenId;
using tiny::Tokens;
using Nodes = std::vector<std::int32_t>;

const specrt::Model& counter() {
  static const specrt::Model model = tiny::counter_model(64);
  return model;
}

/// Proposes the same branches behind every last token t: t + 1 with t + 2, and 0.
std::shared_ptr<tiny::ScriptedDrafter> branches() {
  return std::make_shared<tiny::ScriptedDrafter>(
      "branches", std::vector<Tokens>(),
      [](const DraftRequest& request, std::span<const TokenId>, DraftTree& tree) {
        const TokenId next = request.tokens.back() + 1;
        tree = DraftTree({0, next, next + 1}, {-1, -1, 1}, {-2.0f, -0.5f, -0.25f}, "branches");
      });
}

template <typename T>
std::vector<T> copy(std::span<const T> values) {
  return {values.begin(), values.end()};
}

}  // namespace

TEST(last_round_tells_drafts_and_what_became_of_them) {
  Decoder decoder(counter(), tiny::options_for(counter(), 2, 100));
  CHECK(decoder.last_round().empty());
  CHECK_EQ(decoder.last_times().rows, 0);
  specrt::SamplingParams params;
  params.max_tokens = 4;
  const auto drafting = decoder.add(Tokens{3}, params, branches());
  const auto waiting = decoder.add(Tokens{1, 2, 3}, params);
  (void)decoder.round({{drafting, 1}});
  decoder.begin_round({{drafting, 3}, {waiting, 2}});
  CHECK_THROWS(decoder.last_round(), InvalidArgument, "[last_round]");
  (void)decoder.finish_round();

  const auto shares = decoder.last_round();
  CHECK_EQ(shares.size(), 2u);
  // The drafting one has ended in this round: it comes last.
  CHECK_EQ(shares[0].id, waiting);
  CHECK_EQ(shares[0].prompt_tokens, 2);
  CHECK(shares[0].draft->empty() && shares[0].accepted.empty() && shares[0].emitted.empty());
  CHECK_EQ(shares[1].id, drafting);
  CHECK_EQ(shares[1].prompt_tokens, 0);
  CHECK(copy(shares[1].draft->tokens()) == (Tokens{0, 5, 6}));
  CHECK(copy(shares[1].draft->parents()) == (Nodes{-1, -1, 1}));
  CHECK(copy(shares[1].accepted) == (Nodes{1, 2}));
  CHECK(copy(shares[1].emitted) == (Tokens{5, 6, 7}));
  CHECK_EQ(decoder.last_times().rows, 1 + 3 + 2);
  CHECK(decoder.last_times().verify_seconds > 0.0);

  (void)decoder.round({{waiting, 1}});
  CHECK_EQ(decoder.last_round().size(), 1u);
  CHECK(copy(decoder.last_round()[0].emitted) == (Tokens{4}));
}

TEST(totals_are_the_sum_of_all_sequences) {
  Decoder decoder(counter(), tiny::options_for(counter(), 2, 100));
  specrt::SamplingParams params;
  params.max_tokens = 12;
  const auto first = decoder.add(Tokens{3}, params, branches());
  const auto second = decoder.add(Tokens{9, 10}, params, branches());
  SequenceCounters a;
  SequenceCounters b;
  std::int64_t passes = 0;
  std::int64_t rows = 0;
  while (!decoder.idle()) {
    for (const specrt::Progress& p : decoder.round(specrt::plan_fixed(decoder, 3))) {
      if (p.id == second && p.counters->rounds == 2) {
        b = decoder.stop(second, 1);
        break;
      }
      if (p.id == first) a = *p.counters;
    }
    ++passes;
    rows += decoder.last_times().rows;
  }
  const specrt::DecoderTotals& totals = decoder.totals();
  const SequenceCounters& c = totals.counters;
  CHECK_EQ(totals.passes, passes);
  CHECK_EQ(totals.rows, rows);
  CHECK_EQ(c.prompt_tokens, 3);
  CHECK_EQ(c.tokens, a.tokens + b.tokens);
  CHECK_EQ(c.rounds, a.rounds + b.rounds);
  CHECK_EQ(c.drafts, a.drafts + b.drafts);
  CHECK_EQ(c.drafts, a.rounds + b.rounds);
  CHECK_EQ(c.drafted, a.drafted + b.drafted);
  CHECK_EQ(c.accepted, a.accepted + b.accepted);
  CHECK_EQ(c.truncated_rounds, a.truncated_rounds + b.truncated_rounds);
  CHECK_EQ(c.truncated_rounds, 2);
  CHECK_EQ(c.accepted_at.size(), 2u);
  for (std::size_t d = 0; d < 2; ++d) {
    CHECK_EQ(c.accepted_at[d], a.accepted_at[d] + b.accepted_at[d]);
  }
  // Both ran in the same passes, whose time counts once.
  CHECK(c.verify_seconds < a.verify_seconds + b.verify_seconds);
  CHECK(c.prefill_seconds > 0.0);
}
