// Sequences that give their blocks away and go on later: the same bytes, with every drafter.

#include <memory>
#include <random>

#include "check.h"
#include "specrt/error.h"
#include "specrt/merge.h"
#include "specrt/suffix.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::CapacityError;
using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Drafter;
using specrt::InvalidArgument;
using tiny::Kind;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

tiny::Spec spec() {
  tiny::Spec spec = tiny::small_spec();
  spec.vocab = 32;
  return spec;
}

std::shared_ptr<Drafter> draft_model(const specrt::Model& model, std::int64_t tokens) {
  specrt::DraftModelOptions options;
  options.max_batch_size = 4;
  options.block_size = 4;
  options.max_rows = 64;
  options.threads = 1;
  options.check_invariants = true;
  DecoderOptions same = tiny::options_for(model, 4, 64, 4);
  options.kv_cache_bytes =
      specrt::kv_cache_bytes_for(model.config(), model.precision(), same, 1, tokens);
  return specrt::make_model_drafter(model, 32, options);
}

std::vector<Request> requests_of(int count, std::int64_t max_tokens) {
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    Request one;
    one.prompt = tiny::random_tokens(static_cast<std::uint64_t>(i % 3), 4 + i, 32);
    one.params.max_tokens = max_tokens;
    one.params.seed = static_cast<std::uint64_t>(i);
    one.params.temperature = i % 2 == 0 ? 0.0 : 0.9;
    one.params.logprobs = i % 3 == 0 ? 1 : -1;
    one.params.repetition_penalty = i % 4 == 1 ? 1.3 : 1.0;
    one.params.frequency_penalty = i % 4 == 2 ? 0.5 : 0.0;
    one.params.min_tokens = i % 4 == 3 ? 9 : 0;
    one.params.stop_token_ids = {static_cast<specrt::TokenId>(i)};
    one.arrival = 2 * i;
    requests.push_back(one);
  }
  return requests;
}

}  // namespace

TEST(preempted_sequences_go_on_as_if_nothing_had_been) {
  const specrt::Model model = tiny::random_model(spec());
  const DecoderOptions roomy = tiny::options_for(model, 4, 64, 4);
  std::vector<Request> requests = requests_of(6, 24);
  std::vector<Output> plain;
  std::vector<Tokens> texts;
  for (const Request& one : requests) {
    plain.push_back(tiny::run_alone(model, roomy, one, tiny::fixed(0)));
    texts.push_back(tiny::joined(one.prompt, plain.back().tokens));
  }
  std::vector<std::shared_ptr<Drafter>> drafters{nullptr};
  for (const Kind kind : tiny::kDrafters) drafters.push_back(tiny::make_drafter(kind, texts, 32));
  drafters.push_back(specrt::make_suffix_drafter());
  drafters.push_back(draft_model(model, 64));
  drafters.push_back(draft_model(model, 40));  // less than two sequences to their ends
  specrt::MergeOptions merged;
  merged.parts = {specrt::make_ngram_drafter(), specrt::make_suffix_drafter(),
                  draft_model(model, 64)};
  merged.target_bytes = 1 << 20;
  drafters.push_back(specrt::make_merge_drafter(merged));
  std::int64_t preemptions = 0;
  for (std::size_t d = 0; d < drafters.size(); ++d) {
    if (tiny::kThinned && d % 3 != 0) continue;
    DecoderOptions small = roomy;
    small.max_rows = 24;
    small.kv_cache_bytes =
        specrt::kv_cache_bytes_for(model.config(), model.precision(), small, 1, 48);
    for (Request& one : requests) one.drafter = drafters[d];
    for (const std::uint64_t seed : {1u, 8u, 15u}) {
      Decoder decoder(model, small);
      const auto planner = seed == 1 ? tiny::fixed(5) : tiny::restless(seed, 6);
      const std::vector<Output> outputs = tiny::run(decoder, requests, planner, seed);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        CHECK_EQ(tiny::difference(outputs[i], plain[i]), std::string());
        preemptions += outputs[i].counters.preemptions;
      }
      if (drafters[d] != nullptr) CHECK_EQ(drafters[d]->memory().other, 0);
    }
  }
  CHECK(preemptions > 30);
}

TEST(preempting_at_every_moment) {
  const specrt::Model model = tiny::random_model(spec());
  DecoderOptions options = tiny::options_for(model, 2, 64, 4);
  Request request = requests_of(1, 12)[0];
  request.prompt = tiny::random_tokens(9, 11, 32);
  request.params.prompt_logprobs = 2;
  request.drafter = specrt::make_ngram_drafter();
  const auto run = [&](int moment) {
    Decoder decoder(model, options);
    const auto id = decoder.add(request.prompt, request.params, request.drafter, nullptr, 0);
    Tokens tokens;
    std::vector<specrt::TokenLogprobs> prompt;
    bool over = false;
    for (int round = 0; !over; ++round) {
      if (round == moment) {
        const std::int64_t taken = decoder.free_kv_tokens();
        decoder.preempt(id);
        CHECK(decoder.free_kv_tokens() > taken || moment == 0);
        CHECK(decoder.sequences().empty() && !decoder.idle());
        CHECK_THROWS(decoder.round({{id, 1}}), InvalidArgument, "[plan]");
        decoder.resume(id, 3);
      }
      for (const specrt::Progress& p : decoder.round({{id, 4}})) {
        tokens.insert(tokens.end(), p.tokens.begin(), p.tokens.end());
        if (!p.prompt_logprobs.empty()) {
          CHECK(prompt.empty());
          prompt.assign(p.prompt_logprobs.begin(), p.prompt_logprobs.end());
        }
        over = p.finish != specrt::Finish::none;
        if (over) CHECK_EQ(p.counters->preemptions, moment < round || moment == 0 ? 1 : 0);
      }
    }
    CHECK_EQ(prompt.size(), request.prompt.size() - 1);
    for (const specrt::TokenLogprobs& one : prompt) tokens.push_back(static_cast<int>(one.rank));
    return tokens;
  };
  const Tokens expected = run(1000);
  for (int moment = 0; moment < 8; ++moment) CHECK(run(moment) == expected);
}

TEST(preempted_sequences_are_cancelled_and_forgotten) {
  const specrt::Model model = tiny::random_model(spec());
  const auto suffix = specrt::make_suffix_drafter();
  const auto scripted = tiny::make_scripted(Kind::wrong, {}, 32);
  {
    Decoder decoder(model, tiny::options_for(model, 2, 64, 4));
    const std::int64_t free = decoder.free_kv_tokens();
    const std::vector<Request> requests = requests_of(2, 12);
    const auto a = decoder.add(requests[0].prompt, requests[0].params, suffix);
    const auto b = decoder.add(requests[1].prompt, requests[1].params, scripted);
    (void)decoder.round(specrt::plan_fixed(decoder, 2));
    CHECK_THROWS(decoder.can_resume(a), InvalidArgument, "a preempted sequence");
    CHECK_THROWS(decoder.resume(a), InvalidArgument, "a preempted sequence");
    decoder.begin_round(specrt::plan_fixed(decoder, 2));
    CHECK_THROWS(decoder.preempt(a), InvalidArgument, "no round");
    CHECK_THROWS(decoder.reserve({}), InvalidArgument, "no round");
    (void)decoder.finish_round();
    decoder.preempt(a);
    decoder.preempt(b);
    CHECK_EQ(scripted->open(), 0u);
    CHECK_EQ(decoder.free_kv_tokens(), free);
    CHECK_EQ(decoder.cancel(b).preemptions, 1);
    CHECK_THROWS(decoder.cancel(b), InvalidArgument, "a running sequence");
    CHECK(suffix->memory().other > 0);
    CHECK_EQ(decoder.cancel(a).tokens, 2);
    CHECK_EQ(suffix->memory().other, 0);
    CHECK(decoder.idle());
    decoder.preempt(decoder.add(requests[0].prompt, requests[0].params, suffix));
  }
  CHECK_EQ(suffix->memory().other, 0);  // the decoder took its leave for it
}

TEST(resume_needs_room) {
  const specrt::Model model = tiny::random_model(spec());
  DecoderOptions options = tiny::options_for(model, 1, 40, 4);
  options.max_batch_size = 2;
  Decoder decoder(model, options);
  std::vector<Request> requests = requests_of(2, 24);
  for (Request& one : requests) one.params.stop_token_ids.clear();
  const auto a = decoder.add(requests[0].prompt, requests[0].params, nullptr, nullptr, 0);
  (void)decoder.round({{a, 64}});
  decoder.preempt(a);
  const auto b = decoder.add(requests[1].prompt, requests[1].params, nullptr, nullptr, 24);
  CHECK(decoder.can_resume(a, 0) && !decoder.can_resume(a));
  CHECK_THROWS(decoder.resume(a), CapacityError, "[kv cache]");
  decoder.resume(a, 0);
  CHECK_EQ(decoder.sequences().size(), 2u);
  (void)decoder.cancel(b);
}

namespace {

// Keeps something of who gives way, and cannot take them back.
class Keeper final : public Drafter {
 public:
  const std::string& name() const override { return name_; }
  void admit(specrt::SequenceId, std::span<const specrt::TokenId>, std::int64_t) override {
    ++kept;
  }
  void propose(std::span<const specrt::DraftRequest>, std::span<specrt::DraftTree>) override {}
  void observe(specrt::SequenceId, std::span<const specrt::TokenId>) override {}
  bool suspend(specrt::SequenceId) override { return true; }
  void resume(specrt::SequenceId, std::span<const specrt::TokenId>, std::int64_t) override {
    throw CapacityError("[drafter] expected room, got none");
  }
  void release(specrt::SequenceId) override { --kept; }
  specrt::MemoryUse memory() const override { return {}; }
  int kept = 0;

 private:
  std::string name_ = "keeper";
};

}  // namespace

TEST(resume_that_fails_leaves_nothing_with_the_drafter) {
  const specrt::Model model = tiny::random_model(spec());
  Decoder decoder(model, tiny::options_for(model, 2, 40, 4));
  const std::int64_t free = decoder.free_kv_tokens();
  const auto keeper = std::make_shared<Keeper>();
  const Request request = requests_of(1, 24)[0];
  const auto id = decoder.add(request.prompt, request.params, keeper);
  (void)decoder.round({{id, 64}});
  decoder.preempt(id);
  CHECK_EQ(keeper->kept, 1);
  CHECK_THROWS(decoder.resume(id), CapacityError, "[drafter]");
  CHECK_EQ(keeper->kept, 0);
  CHECK(decoder.idle());
  CHECK_EQ(decoder.free_kv_tokens(), free);
}
