// A second model as the drafter.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::CpuIsa;
using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Drafter;
using specrt::DraftModelOptions;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::InvalidArgument;
using specrt::Model;
using specrt::Precision;
using specrt::SamplingParams;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

DraftModelOptions draft_options(const std::string& isa = "auto") {
  DraftModelOptions options;
  options.kv_cache_bytes = 1 << 22;
  options.threads = 1;
  options.cpu_isa = isa;
  options.check_invariants = true;
  return options;
}

std::vector<Request> requests_for(std::int64_t vocab) {
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < 4; ++i) {
    requests[i].prompt = tiny::random_tokens(500 + i, 1 + 13 * i, vocab);
    requests[i].params.max_tokens = static_cast<std::int64_t>(40 + 9 * i);
    requests[i].params.logprobs = 2;
    requests[i].params.seed = 77 + i;
  }
  requests[1].params.temperature = 1.0;
  requests[2].params.temperature = 0.7;
  requests[2].params.top_p = 0.9;
  requests[3].params.temperature = 1.5;
  requests[3].params.top_k = 7;
  requests[3].params.min_p = 0.02;
  return requests;
}

std::vector<Output> compare(const Model& target, const std::vector<Request>& given,
                            const std::shared_ptr<Drafter>& drafter, const tiny::Planner& planner,
                            const std::string& isa = "auto") {
  DecoderOptions options = tiny::options_for(target, 4, 128, 4);
  options.cpu_isa = isa;
  std::vector<Request> requests = given;
  Decoder decoder(target, options);
  std::vector<Output> alone;
  for (Request& request : requests) {
    alone.push_back(tiny::run(decoder, {request}, tiny::fixed(0))[0]);
    request.drafter = drafter;
  }
  Decoder other(target, options);
  std::vector<Output> outputs = tiny::run(other, requests, planner);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
  }
  return outputs;
}

void check_all_accepted(const std::vector<Output>& outputs) {
  for (const Output& output : outputs) {
    CHECK(output.counters.drafted > 0);
    CHECK_EQ(output.counters.accepted, output.counters.drafted);
  }
}

DraftTree propose(Drafter& drafter, specrt::SequenceId id, const Tokens& text, std::int64_t nodes,
                  const SamplingParams& params) {
  DraftTree tree;
  const DraftRequest request{id, text, nodes, nodes, &params};
  drafter.propose({&request, 1}, {&tree, 1});
  return tree;
}

}  // namespace

// The target as its own drafter: everything is accepted, in every precision, greedy or sampled.
TEST(draft_model_that_is_the_target_is_always_right) {
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    for (const Precision dtype : {Precision::f32, Precision::bf16}) {
      const tiny::Spec spec = tiny::small_spec(dtype, 51);
      const Model model = tiny::random_model(spec);
      for (const std::int64_t gamma : {1, 3, 7}) {
        const auto drafter =
            specrt::make_model_drafter(model, spec.vocab, draft_options(specrt::name_of(isa)));
        check_all_accepted(compare(model, requests_for(spec.vocab), drafter, tiny::fixed(gamma),
                                   specrt::name_of(isa)));
      }
      const auto drafter =
          specrt::make_model_drafter(model, spec.vocab, draft_options(specrt::name_of(isa)));
      check_all_accepted(compare(model, requests_for(spec.vocab), drafter, tiny::restless(4, 9),
                                 specrt::name_of(isa)));
    }
  }
}

// The prompt reaches the draft model in pieces of a few rows.
// What the target finds in its cache the draft model need not have in its own. Memory that holds
// nothing is NaN here, so a slot that was taken for filled would cost drafts.
TEST(draft_model_after_a_prefix_hit) {
  for (const std::int64_t window : {0, 6}) {
    const tiny::Spec spec = tiny::small_spec(Precision::f32, 62);
    specrt::ModelConfig config = tiny::config_of(spec);
    if (window > 0) config.windows = {window, 0};
    const Model model = tiny::build(config, spec.dtype, tiny::random_tensors(spec));
    DraftModelOptions options = draft_options();
    options.block_size = 4;
    const auto drafter = specrt::make_model_drafter(model, spec.vocab, options);
    Decoder decoder(model, tiny::options_for(model, 4, 128, 4));
    std::vector<Request> requests = requests_for(spec.vocab);
    const std::vector<Output> plain = tiny::run(decoder, requests, tiny::fixed(0));
    for (Request& request : requests) request.drafter = drafter;
    std::vector<std::int64_t> rounds;
    for (int turn = 0; turn < 3; ++turn) {
      const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(4));
      check_all_accepted(outputs);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        CHECK_EQ(tiny::difference(outputs[i], plain[i]), "");
        CHECK_EQ(outputs[i].counters.cached_prompt_tokens,
                 (static_cast<std::int64_t>(requests[i].prompt.size()) - 1) / 4 * 4);
        if (turn == 0) rounds.push_back(outputs[i].counters.rounds);
        CHECK_EQ(outputs[i].counters.rounds, rounds[i]);
      }
    }
  }
}

TEST(draft_model_prefills_in_chunks) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 52);
  const Model model = tiny::random_model(spec);
  for (const int max_rows : {4, 5, 7, 64}) {
    DraftModelOptions options = draft_options();
    options.max_batch_size = 4;
    options.max_rows = max_rows;
    options.block_size = 1 + max_rows % 4;
    const auto drafter = specrt::make_model_drafter(model, spec.vocab, options);
    check_all_accepted(compare(model, requests_for(spec.vocab), drafter, tiny::fixed(3)));
  }
}

TEST(draft_model_shares_a_team_with_the_decoder) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 53);
  const Model model = tiny::random_model(spec);
  const auto team = std::make_shared<specrt::ThreadTeam>(2);
  DraftModelOptions draft = draft_options();
  draft.team = team;
  DecoderOptions options = tiny::options_for(model, 4, 128);
  options.team = team;
  std::vector<Request> requests = requests_for(spec.vocab);
  for (Request& request : requests) {
    request.drafter = specrt::make_model_drafter(model, spec.vocab, draft);
  }
  Decoder decoder(model, options);
  CHECK_EQ(decoder.threads(), 2);
  check_all_accepted(tiny::run(decoder, requests, tiny::fixed(4)));
}

// Unrelated, of another shape and of the other precision: it costs time and nothing else.
TEST(draft_model_that_knows_nothing) {
  for (const Precision dtype : {Precision::f32, Precision::bf16}) {
    const Model target = tiny::random_model(tiny::small_spec(dtype, 54));
    tiny::Spec spec =
        tiny::small_spec(dtype == Precision::f32 ? Precision::bf16 : Precision::f32, 99);
    spec.layers = 1;
    spec.hidden = 24;
    spec.heads = 3;
    spec.kv_heads = 1;
    const auto drafter =
        specrt::make_model_drafter(tiny::random_model(spec), spec.vocab, draft_options());
    std::int64_t rejected = 0;
    for (const Output& output :
         compare(target, requests_for(spec.vocab), drafter, tiny::fixed(5))) {
      rejected += output.counters.drafted - output.counters.accepted;
    }
    CHECK(rejected > 100);
  }
}

// After rejections, what it proposes is what a drafter would that sees the text for the first time.
TEST(draft_model_rolls_back) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 55);
  const Model target = tiny::random_model(spec);
  // The target's weights, a little off.
  tiny::Tensors tensors = tiny::random_tensors(spec);
  const tiny::Tensors noise = tiny::random_tensors(tiny::small_spec(Precision::bf16, 56));
  for (auto& [name, values] : tensors) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += 0.12f * noise.at(name)[i];
  }
  const Model draft = tiny::build(tiny::config_of(spec), spec.dtype, tensors);
  for (const double temperature : {0.0, 1.0}) {
    Request request;
    request.prompt = tiny::random_tokens(5, 9, spec.vocab);
    request.params.max_tokens = 90;
    request.params.temperature = temperature;
    DraftModelOptions options = draft_options();
    options.block_size = 4;
    const auto real = specrt::make_model_drafter(draft, spec.vocab, options);
    DecoderOptions decoder_options = tiny::options_for(target, 1, 128);
    Decoder decoder(target, decoder_options);
    std::int64_t accepted = 0;
    std::int64_t drafted = 0;
    Tokens text = request.prompt;
    real->admit(0, text, 128);
    const Output plain = tiny::run(decoder, {request}, tiny::fixed(0))[0];
    const Tokens whole = tiny::joined(request.prompt, plain.tokens);
    for (int round = 0; text.size() + 8 < whole.size(); ++round) {
      const std::int64_t nodes = 1 + round % 6;
      const DraftTree tree = propose(*real, 0, text, nodes, request.params);
      const auto fresh = specrt::make_model_drafter(draft, spec.vocab, options);
      fresh->admit(0, text, 128);
      const DraftTree expected = propose(*fresh, 0, text, nodes, request.params);
      CHECK(std::ranges::equal(tree.tokens(), expected.tokens()));
      CHECK(std::ranges::equal(tree.log_probs(), expected.log_probs()));
      CHECK_EQ(static_cast<std::int64_t>(tree.size()), nodes);
      std::size_t right = 0;
      while (right < tree.size() && tree.tokens()[right] == whole[text.size() + right]) ++right;
      accepted += static_cast<std::int64_t>(right);
      drafted += nodes;
      // Now and then its rounds are left out.
      const std::size_t step = right + 1 + (round % 5 == 0 ? 2 : 0);
      text.assign(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(text.size() + step));
    }
    CHECK(accepted * 10 > drafted && accepted * 10 < drafted * 9);
    real->release(0);
  }
}

// Target of 128 positions, drafter of 32: right until the drafter's end, then no drafts.
TEST(draft_model_with_a_smaller_context) {
  tiny::Spec spec = tiny::small_spec(Precision::f32, 57);
  spec.max_positions = 128;
  const Model target = tiny::random_model(spec);
  spec.max_positions = 32;
  const Model draft = tiny::random_model(spec);
  const auto drafter = specrt::make_model_drafter(draft, spec.vocab, draft_options());
  std::vector<Request> requests(3);
  requests[0].prompt = tiny::random_tokens(1, 10, spec.vocab);
  requests[0].params.max_tokens = 90;
  requests[1].prompt = tiny::random_tokens(2, 40, spec.vocab);  // longer than it can ever be
  requests[1].params.max_tokens = 20;
  requests[2].prompt = tiny::random_tokens(3, 31, spec.vocab);
  requests[2].params.max_tokens = 20;
  const std::vector<Output> outputs = compare(target, requests, drafter, tiny::fixed(4));
  CHECK(outputs[0].counters.drafted >= 12);
  CHECK_EQ(outputs[0].counters.accepted, outputs[0].counters.drafted);
  CHECK(outputs[0].counters.accepted <= 22);
  CHECK_EQ(outputs[1].counters.drafted, 0);
  CHECK_EQ(outputs[2].counters.drafted, 0);

  DraftModelOptions options = draft_options();
  options.max_model_len = 20;
  const auto shorter = specrt::make_model_drafter(draft, spec.vocab, options);
  CHECK(compare(target, {requests[0]}, shorter, tiny::fixed(4))[0].counters.drafted <= 10);
  options.max_model_len = 33;
  CHECK_THROWS(specrt::make_model_drafter(draft, spec.vocab, options), InvalidArgument,
               "[max_model_len]");
}

// The drafter's vocabulary is padded further than the target's, or less far.
TEST(draft_model_with_another_padded_vocabulary) {
  for (const bool larger : {true, false}) {
    tiny::Spec spec = tiny::small_spec(Precision::f32, 58);
    const std::int64_t small = spec.vocab;
    tiny::Spec padded = spec;
    padded.vocab = small + 11;
    const tiny::Tensors tensors = tiny::random_tensors(spec);
    tiny::Tensors wide = tiny::random_tensors(padded);
    for (auto& [name, values] : wide) {
      const std::vector<float>& common = tensors.at(name);
      std::copy(common.begin(), common.end(), values.begin());
    }
    // Rows beyond the vocabulary win nearly always where they are in the running.
    for (float& value : wide.at("lm_head")) {
      const auto at = static_cast<std::int64_t>(&value - wide.at("lm_head").data());
      if (at >= small * spec.hidden) value *= 4.0f;
    }
    const Model narrow = tiny::build(tiny::config_of(spec), Precision::f32, tensors);
    const Model wider = tiny::build(tiny::config_of(padded), Precision::f32, wide);
    const Model& target = larger ? narrow : wider;
    const Model& draft = larger ? wider : narrow;
    const auto drafter =
        specrt::make_model_drafter(draft, target.config().vocab_size, draft_options());
    const std::vector<Output> outputs =
        compare(target, requests_for(small), drafter, tiny::fixed(4));
    std::int64_t unknown = 0;
    for (const Output& output : outputs) {
      for (const TokenId token : output.tokens) unknown += token >= small ? 1 : 0;
    }
    if (larger) {
      check_all_accepted({outputs[0]});
      CHECK_EQ(unknown, 0);
    } else {
      CHECK(unknown > 0);  // and the draft model knew no way on from there
    }
  }
}

// The same with a window: a round whose tokens it does not know leaves its text as it was, and the
// last of it is run again, as long as a window back.
TEST(draft_model_with_a_window_meets_unknown_tokens) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 61);
  specrt::ModelConfig config = tiny::config_of(spec);
  config.windows.assign(static_cast<std::size_t>(spec.layers), 5);
  const Model draft = tiny::build(config, spec.dtype, tiny::random_tensors(spec));
  const auto unknown = static_cast<TokenId>(spec.vocab);
  DraftModelOptions options = draft_options();
  options.block_size = 1;
  const SamplingParams params;
  Tokens text = tiny::random_tokens(5, 20, spec.vocab);
  const auto drafter = specrt::make_model_drafter(draft, spec.vocab + 3, options);
  drafter->admit(0, text, 64);
  for (int round = 0; round < 6; ++round) {
    const DraftTree tree = propose(*drafter, 0, text, 4, params);
    const auto fresh = specrt::make_model_drafter(draft, spec.vocab + 3, options);
    fresh->admit(0, text, 64);
    const DraftTree expected = propose(*fresh, 0, text, 4, params);
    CHECK_EQ(tree.size(), 4u);
    CHECK(std::ranges::equal(tree.tokens(), expected.tokens()));
    CHECK(std::ranges::equal(tree.log_probs(), expected.log_probs()));
    text.push_back(round % 3 == 1 ? tree.tokens()[0] : unknown);
  }
}

// More sequences than it was made for: some of them wait for drafts until others have gone.
TEST(draft_model_smaller_than_the_batch) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 59);
  const Model model = tiny::random_model(spec);
  for (const bool by_rows : {true, false}) {
    DraftModelOptions options = draft_options();
    options.max_batch_size = by_rows ? 2 : 8;
    options.max_rows = by_rows ? 2 : 64;
    if (!by_rows) {
      DecoderOptions size;
      size.max_rows = 64;
      options.kv_cache_bytes =
          specrt::kv_cache_bytes_for(model.config(), model.precision(), size, 1, 128);
    }
    const auto drafter = specrt::make_model_drafter(model, spec.vocab, options);
    std::int64_t drafted = 0;
    std::int64_t without = 0;
    for (const Output& output : compare(model, requests_for(spec.vocab), drafter, tiny::fixed(3))) {
      CHECK_EQ(output.counters.accepted, output.counters.drafted);
      drafted += output.counters.drafted;
      without += output.counters.drafted == 0 ? 1 : 0;
    }
    CHECK(drafted > 0);
    CHECK(without < std::ssize(requests_for(spec.vocab)));
  }
}

// A drafter whose head is broken drafts nothing, or nonsense; the target goes on.
TEST(draft_model_that_has_gone_nan) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 60);
  const Model target = tiny::random_model(spec);
  tiny::Tensors tensors = tiny::random_tensors(spec);
  tensors.at("lm_head")[5] = NAN;
  const Model draft = tiny::build(tiny::config_of(spec), spec.dtype, tensors);
  const auto drafter = specrt::make_model_drafter(draft, spec.vocab, draft_options());
  for (const Output& output : compare(target, requests_for(spec.vocab), drafter, tiny::fixed(3))) {
    CHECK_EQ(output.counters.drafted, 0);
  }
}

TEST(draft_model_refuses) {
  const tiny::Spec spec = tiny::small_spec();
  const Model model = tiny::random_model(spec);
  DraftModelOptions options = draft_options();
  CHECK_THROWS(specrt::make_model_drafter(Model(), 5, options), InvalidArgument, "[draft model]");
  CHECK_THROWS(specrt::make_model_drafter(model, 0, options), InvalidArgument,
               "[target_vocab_size]");
  options.kv_cache_bytes = 0;
  CHECK_THROWS(specrt::make_model_drafter(model, 5, options), InvalidArgument, "[kv_cache_bytes]");
  const auto drafter = specrt::make_model_drafter(model, spec.vocab, draft_options());
  CHECK_EQ(drafter->name(), "draft_model");
  CHECK(drafter->memory().kv_cache <= 1 << 22);
  CHECK_EQ(drafter->memory().weights, model.weight_bytes());
  drafter->admit(1, Tokens{1}, 10);
  CHECK_THROWS(drafter->admit(1, Tokens{1}, 10), InvalidArgument, "a new sequence, got 1");
  CHECK_THROWS(drafter->release(2), InvalidArgument, "an admitted sequence, got 2");
  CHECK_THROWS(propose(*drafter, 2, Tokens{1}, 3, {}), InvalidArgument, "got 2");
  CHECK(propose(*drafter, 1, Tokens{1}, 0, {}).empty());
  drafter->release(1);
}
