// Draft trees that a head grows on the emulated device: those that it grows on the host, of the
// same passes, and the bytes of plain decoding.

#include <algorithm>
#include <memory>

#include "../native/check.h"
#include "../native/tiny_decode.h"
#include "../native/tiny_heads.h"
#include "../native/tiny_model.h"
#include "cpu/dispatch.h"
#include "decode/logits_state.h"
#include "emulated/emulated.h"
#include "model/runner.h"

namespace {

using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::DraftHeadOptions;
using specrt::DraftTree;
using specrt::HeadKind;
using specrt::Model;
using specrt::ModelConfig;
using specrt::Precision;
using specrt::Runner;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;
namespace emulated = specrt::cuda::emulated;

DecoderOptions decoder_options(const Model& model, int sequences,
                               const specrt::TargetFeatures& features) {
  DecoderOptions options = tiny::options_for(model, sequences, 80, 4);
  options.device = "cuda";
  options.max_rows = 64;
  options.features = features;
  return options;
}

/// A head, the features of one pass over a text, and sequences that end anywhere in it.
class Drafts {
 public:
  Drafts(const Model& target, const Model& head, DraftHeadOptions own, Tokens text)
      : text_(std::move(text)), features_(own.features), runner_(target, options(own.features)) {
    own.device = "cuda";
    own.max_batch_size = 5;
    drafter_ = specrt::make_head_drafter(head, target, own);
    const specrt::cpu::FpMode mode;
    runner_.cache().add(0, std::ssize(text_));
    runner_.begin();
    (void)runner_.add_committed(0, text_);
    runner_.capture(0, runner_.rows());
    runner_.forward();
    runner_.cuda()->wait();
  }

  struct Asked {
    std::int64_t length;  // of the text, what is there
    std::int64_t nodes;
    std::int64_t depth;
    specrt::SamplingParams sampling = {};
  };
  /// All in one call, or each by itself.
  std::vector<DraftTree> of(const std::vector<Asked>& asked, bool together) {
    std::vector<specrt::DraftRequest> requests;
    std::vector<specrt::LogitsState> states;
    states.reserve(asked.size());
    for (const Asked& one : asked) {
      const auto id = static_cast<specrt::SequenceId>(requests.size());
      const auto tokens = std::span(text_).first(static_cast<std::size_t>(one.length));
      drafter_->admit(id, tokens, 80);
      std::vector<std::int64_t> rows;
      for (std::int64_t row = 0; row < one.length - 1; ++row) rows.push_back(row);
      std::vector<const float*> parts;
      for (const std::int64_t layer : features_.layers) parts.push_back(runner_.captured(layer));
      if (features_.normed) parts.push_back(runner_.captured_normed());
      const specrt::ObservedFeatures observed{
          id, 0, {parts, rows, runner_.config().hidden_size, runner_.device_features()}, tokens};
      drafter_->observe_features({&observed, 1});
      states.emplace_back(one.sampling, tokens.first(tokens.size() - 2),
                          runner_.config().vocab_size, nullptr);
      for (const TokenId token : tokens.last(2)) states.back().push(token);
      requests.push_back({id, tokens, one.nodes, one.depth, &one.sampling});
      requests.back().logits = &states.back();
    }
    std::vector<DraftTree> out(requests.size());
    const emulated::Counts before = emulated::counts();
    if (together) {
      drafter_->propose(requests, out);
    } else {
      for (std::size_t i = 0; i < requests.size(); ++i) {
        drafter_->propose({&requests[i], 1}, {&out[i], 1});
      }
    }
    copies_ = emulated::counts().to_host - before.to_host;
    for (const specrt::DraftRequest& one : requests) drafter_->release(one.id);
    return out;
  }
  std::int64_t copies() const { return copies_; }

 private:
  static specrt::RunnerOptions options(const specrt::TargetFeatures& features) {
    specrt::RunnerOptions options;
    options.kv_cache_bytes = std::int64_t{1} << 20;
    options.max_rows = 64;
    options.features = features;
    options.device = "cuda";
    options.team = std::make_shared<specrt::ThreadTeam>(1);
    return options;
  }

  Tokens text_;
  specrt::TargetFeatures features_;
  Runner runner_;
  std::shared_ptr<specrt::Drafter> drafter_;
  std::int64_t copies_ = 0;
};

specrt::SamplingParams sampled(double temperature, std::uint64_t seed) {
  specrt::SamplingParams out;
  out.temperature = temperature;
  out.seed = seed;
  return out;
}

void check_same(const std::vector<DraftTree>& got, const std::vector<DraftTree>& want,
                double tolerance = 0.0) {
  for (std::size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    CHECK(!want[i].empty());
    CHECK_EQ(got[i].size(), want[i].size());
    for (std::size_t node = 0; node < std::min(got[i].size(), want[i].size()); ++node) {
      CHECK_EQ(got[i].tokens()[node], want[i].tokens()[node]);
      CHECK_EQ(got[i].parents()[node], want[i].parents()[node]);
      CHECK_NEAR(got[i].log_probs()[node], want[i].log_probs()[node], tolerance);
    }
  }
}

}  // namespace

// A draft of more nodes than a device reranks makes its whole group grow on the host.
TEST(cuda_trees_are_those_of_the_host) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 51);
  const Model target = tiny::random_model(spec);
  for (const bool mapped : {false, true}) {
    emulated::reset();
    const HeadKind kind = mapped ? HeadKind::beside : HeadKind::fused;
    const Model head = tiny::random_head(spec, kind, Precision::bf16, 1.0, 9, [&](ModelConfig& c) {
      if (!mapped) return;
      c.head.own_lm_head = true;
      c.vocab_size = 40;
    });
    DraftHeadOptions own = tiny::head_options(kind, 3, 4);
    own.max_rows = 16;  // prompts come in pieces; a level of all five is just one pass
    for (TokenId id = 0; mapped && id < 40; ++id) own.target_of_draft.push_back(id + id / 2);
    Drafts drafts(target, head, own, tiny::random_tokens(6, 30, spec.vocab));
    std::vector<Drafts::Asked> asked = {{9, 20, 4}, {23, 5, 3}, {2, 2, 4}, {30, 256, 1}};
    const std::vector<DraftTree> together = drafts.of(asked, true);
    CHECK_EQ(drafts.copies(), 1);
    check_same(drafts.of(asked, false), together);
    asked.push_back({12, 257, 4});
    const std::vector<DraftTree> host = drafts.of(asked, true);
    CHECK(drafts.copies() >= 4);
    check_same(together, host);
    // And where nothing has come in between.
    check_same(drafts.of({asked[0]}, true), {host[0]});
  }
}

// Of requests that sample, or have penalties and masks, beside greedy ones: the host's own
// arithmetic is another one, so that log-probabilities differ in their last bits.
TEST(cuda_trees_follow_noise_penalties_and_masks) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 51);
  const Model target = tiny::random_model(spec);
  std::vector<specrt::SamplingParams> with(8);
  with[0] = sampled(0.8, 1);
  with[1] = sampled(1.0, 2);
  with[2] = sampled(1.3, 5);
  with[2].top_k = 9;
  with[2].top_p = 0.8;
  with[3].repetition_penalty = 1.8;
  with[3].presence_penalty = 0.7;
  with[4] = sampled(0.9, 6);
  with[4].frequency_penalty = 1.5;
  with[4].min_p = 0.02;
  with[5].logit_bias = {{7, 4.0f}, {12, 3.0f}, {7, 1.0f}};
  with[5].bad_words = {{12, 7}, {30}, {7, 7}, {1, 12}, {2, 7}};
  with[6] = sampled(2.0, 7);
  for (TokenId id = 1; id < spec.vocab; id += 4) with[6].allowed_token_ids.push_back(id);
  with[7].min_tokens = 4;  // two of which are there
  for (TokenId id = 0; id < spec.vocab; id += 2) with[7].stop_token_ids.push_back(id);
  for (const bool mapped : {false, true}) {
    emulated::reset();
    const HeadKind kind = mapped ? HeadKind::beside : HeadKind::fused;
    const Model head = tiny::random_head(spec, kind, Precision::bf16, 1.0, 9, [&](ModelConfig& c) {
      if (!mapped) return;
      c.head.own_lm_head = true;
      c.vocab_size = 40;
    });
    DraftHeadOptions own = tiny::head_options(kind, 3, 4);
    own.max_rows = 16;
    for (TokenId id = 0; mapped && id < 40; ++id) own.target_of_draft.push_back(id + id / 2);
    Drafts drafts(target, head, own, tiny::random_tokens(6, 30, spec.vocab));
    std::vector<std::vector<DraftTree>> all;
    for (std::size_t first = 0; first < with.size(); first += 2) {
      std::vector<Drafts::Asked> asked = {{9, 20, 4, with[first]},
                                          {23, 5, 3},
                                          {3, 12, 4, with[first + 1]},
                                          {30, 256, 2, with[first]}};
      const std::vector<DraftTree> together = drafts.of(asked, true);
      CHECK_EQ(drafts.copies(), 1);
      check_same(drafts.of(asked, false), together);
      asked.push_back({12, 257, 4});  // more than a device reranks
      const std::vector<DraftTree> host = drafts.of(asked, true);
      CHECK(drafts.copies() >= 4);
      check_same(together, host, 5e-5);
      all.push_back(together);
    }
    // Each of them has had its say.
    const std::vector<DraftTree> plain = drafts.of({{9, 20, 4}, {3, 12, 4}}, true);
    for (const auto& one : all) {
      CHECK(!std::ranges::equal(one[0].log_probs(), plain[0].log_probs()));
      CHECK(!std::ranges::equal(one[2].log_probs(), plain[1].log_probs()));
    }
  }
}

// Where a draft has a say in the text it is the host's, whoever else drafts: nothing of a batch may
// tell in what a seed repeats.
TEST(cuda_trees_that_change_texts_are_the_hosts) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 51);
  const Model target = tiny::random_model(spec);
  const Model head = tiny::random_head(spec, HeadKind::fused, Precision::bf16, 1.0, 9);
  DraftHeadOptions own = tiny::head_options(HeadKind::fused, 3, 4);
  own.max_rows = 16;
  Drafts drafts(target, head, own, tiny::random_tokens(6, 30, spec.vocab));
  specrt::SamplingParams typical = sampled(0.9, 4);
  typical.verification = specrt::Verification::typical;
  specrt::SamplingParams rejection = sampled(0.9, 5);
  rejection.verification = specrt::Verification::rejection;
  const std::vector<DraftTree> alone = drafts.of({{9, 12, 4, typical}}, true);
  CHECK(drafts.copies() >= 4);
  check_same({drafts.of({{9, 12, 4, typical}, {9, 12, 4, rejection}}, true)[0]}, alone);
  check_same({drafts.of({{9, 12, 4, typical}, {23, 12, 4}}, true)[0]}, alone);
}

// Levels of more rows than logits are made of at once.
TEST(cuda_trees_of_many_rows) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 51);
  const Model target = tiny::random_model(spec);
  const Model head = tiny::random_head(spec, HeadKind::fused, Precision::bf16, 1.0, 9);
  DraftHeadOptions own = tiny::head_options(HeadKind::fused, 16, 3);
  own.max_rows = 96;
  Drafts drafts(target, head, own, tiny::random_tokens(6, 30, spec.vocab));
  std::vector<Drafts::Asked> asked = {
      {9, 60, 3, sampled(0.9, 1)}, {12, 60, 3}, {15, 60, 3, sampled(1.2, 2)}, {18, 60, 3}};
  asked[1].sampling.repetition_penalty = 1.5;
  asked[2].sampling.frequency_penalty = 0.5;
  asked.push_back({21, 60, 3, asked[2].sampling});
  const std::vector<DraftTree> together = drafts.of(asked, true);
  CHECK_EQ(drafts.copies(), 1);
  check_same(drafts.of(asked, false), together);
  for (const DraftTree& one : together) CHECK_EQ(one.size(), 60u);
}

// With preemption, chunks and rounds of every size.
TEST(cuda_trees_give_the_bytes_of_plain_decoding) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 52);
  const Model target = tiny::random_model(spec);
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(800 + i, 3 + 4 * i, spec.vocab);
    requests[i].params.max_tokens = 10;
    if (i == 1) requests[i].params.temperature = 0.9;
    if (i > 0) requests[i].params.repetition_penalty = 1.0 + 0.2 * static_cast<double>(i);
    if (i == 2) requests[i].params.temperature = 0.5;
    if (i == 2) requests[i].params.top_p = 0.9;
  }
  std::vector<Output> expected;
  {
    Decoder decoder(target, decoder_options(target, 4, {}));
    expected = tiny::run(decoder, requests, tiny::fixed(0));
  }
  for (const HeadKind kind : {HeadKind::fused, HeadKind::beside}) {
    const Model head = tiny::random_head(spec, kind, Precision::bf16);
    DraftHeadOptions own = tiny::head_options(kind, 2, 3);
    own.device = "cuda";
    own.max_rows = 16;
    own.max_batch_size = 4;
    const auto drafter = specrt::make_head_drafter(head, target, own);
    for (Request& request : requests) request.drafter = drafter;
    for (const std::uint64_t preempt : {0, 3}) {
      Decoder decoder(target, decoder_options(target, 4, own.features));
      std::int64_t drafted = 0;
      const std::vector<Output> outputs =
          tiny::run(decoder, requests, tiny::restless(4, 6), preempt);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        CHECK_EQ(tiny::difference(outputs[i], expected[i]), "");
        drafted += outputs[i].counters.drafted;
      }
      CHECK(drafted > 20);
    }
  }
}

// A draft model's chains: those that the host makes of its logits, which it does as soon as one
// request of the batch samples by itself; over several rounds, of which one token or two are kept.
TEST(cuda_chains_are_those_of_the_host) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 53);
  const Model model = tiny::random_model(spec);
  specrt::DraftModelOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 20;
  options.max_batch_size = 5;
  options.max_rows = 16;
  options.threads = 1;
  options.device = "cuda";
  options.check_invariants = true;
  std::vector<specrt::SamplingParams> params(5);
  params[1] = sampled(1.0, 3);
  params[3] = sampled(0.7, 4);
  params[3].min_p = 0.05;
  params[2].repetition_penalty = 1.4;
  params[3].frequency_penalty = 0.5;
  params[4] = sampled(1.0, 5);
  params[4].verification = specrt::Verification::rejection;
  std::vector<std::vector<DraftTree>> drafts[2];
  for (const bool on_host : {false, true}) {
    const auto drafter = specrt::make_model_drafter(model, spec.vocab, options);
    std::vector<Tokens> texts;
    for (std::size_t i = 0; i < (on_host ? 5 : 4); ++i) {
      texts.push_back(tiny::random_tokens(20 + i, 3 + 11 * i, spec.vocab));
      drafter->admit(static_cast<specrt::SequenceId>(i), texts.back(), 60);
    }
    for (int round = 0; round < 4; ++round) {
      std::vector<specrt::DraftRequest> requests;
      std::vector<specrt::LogitsState> states;
      states.reserve(texts.size());
      for (std::size_t i = 0; i < texts.size(); ++i) {
        const auto steps = static_cast<std::int64_t>(1 + (i + static_cast<std::size_t>(round)) % 4);
        requests.push_back(
            {static_cast<specrt::SequenceId>(i), texts[i], steps, steps, &params[i]});
        states.emplace_back(params[i], texts[i], spec.vocab, nullptr);
        requests.back().logits = &states.back();
      }
      std::vector<DraftTree> out(requests.size());
      const emulated::Counts before = emulated::counts();
      drafter->propose(requests, out);
      const std::int64_t copies = emulated::counts().to_host - before.to_host;
      CHECK(on_host ? copies >= 3 : copies == 1);
      for (std::size_t i = 0; i < texts.size(); ++i) {
        if (round % 2 == 0) texts[i].push_back(out[i].tokens()[0]);
        texts[i].push_back(static_cast<TokenId>((7 + round) % spec.vocab));
      }
      out.resize(4);
      drafts[on_host].push_back(std::move(out));
    }
  }
  for (std::size_t round = 0; round < 4; ++round) {
    for (std::size_t i = 0; i < 4; ++i) CHECK_EQ(drafts[0][round][i].size(), 1 + (i + round) % 4);
    check_same(drafts[0][round], drafts[1][round], 1e-5);
  }
}

// A draft grows where its states are, and comes back in one small copy, noise or not.
TEST(cuda_heads_bring_one_copy_a_draft) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 47);
  const Model target = tiny::random_model(spec);
  const Model head = tiny::random_head(spec, HeadKind::beside, Precision::bf16);
  DraftHeadOptions own = tiny::head_options(HeadKind::beside, 2, 3);
  own.device = "cuda";
  own.check_invariants = false;
  own.max_rows = 16;
  own.max_batch_size = 2;
  DecoderOptions options = decoder_options(target, 2, own.features);
  options.check_invariants = false;
  for (const bool samples : {false, true}) {
    emulated::reset();
    Decoder decoder(target, options);
    const auto drafter = specrt::make_head_drafter(head, target, own);
    for (std::size_t i = 0; i < 2; ++i) {
      specrt::SamplingParams params;
      if (samples) params = sampled(0.8, i);
      params.max_tokens = 60;
      (void)decoder.add(tiny::random_tokens(i, 4, spec.vocab), params, drafter);
    }
    const auto round = [&] { (void)decoder.round(specrt::plan_fixed(decoder, 5)); };
    for (int i = 0; i < 4; ++i) round();
    const emulated::Counts before = emulated::counts();
    constexpr std::int64_t kRounds = 2;
    for (int i = 0; i < kRounds; ++i) round();
    const emulated::Counts& after = emulated::counts();
    // The drafts and the verdicts; three passes of the head, what grows in each, how large the
    // drafts may be, the target's pass, what decides, and the list of states that were committed.
    CHECK_EQ(after.to_host - before.to_host, 2 * kRounds);
    const std::int64_t sent = after.to_device - before.to_device;
    // Of those that sample, their parameters and whose each pass's rows are.
    const std::int64_t each = samples ? 14 : 10;
    CHECK(sent >= each * kRounds);
    CHECK(sent <= (each + 1) * kRounds);  // and, of accepted drafts, what moves
    CHECK_EQ(after.allocations, before.allocations);
  }
}

// A draft model takes what was told, what grows its chains included.
TEST(cuda_chains_take_what_was_told) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 54);
  const Model model = tiny::random_model(spec);
  specrt::DraftModelOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 20;
  options.max_batch_size = 3;
  options.max_rows = 16;
  options.threads = 1;
  options.device = "cuda";
  for (const std::int64_t vocab : {spec.vocab, spec.vocab + 9, spec.vocab - 1}) {
    const specrt::MemoryUse told =
        specrt::memory_of_draft_model(model.config(), model.precision(), options, vocab);
    {
      const auto drafter = specrt::make_model_drafter(model, vocab, options);
      CHECK_EQ(drafter->memory().weights, told.weights);
      CHECK_EQ(drafter->memory().kv_cache, told.kv_cache);
      CHECK_EQ(drafter->memory().workspace, told.workspace);
      CHECK(emulated::in_use() >= told.total() && emulated::in_use() < told.total() + 16 * 4096);
    }
    CHECK_EQ(emulated::in_use(), 0);
  }
}
