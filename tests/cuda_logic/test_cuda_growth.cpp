// Draft trees that a head grows on the emulated device: those that it grows on the host, of the
// same passes, and the bytes of plain decoding.

#include <memory>

#include "../native/check.h"
#include "../native/tiny_decode.h"
#include "../native/tiny_heads.h"
#include "../native/tiny_model.h"
#include "cpu/dispatch.h"
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
  };
  /// All in one call, or each by itself.
  std::vector<DraftTree> of(const std::vector<Asked>& asked, bool together) {
    std::vector<specrt::DraftRequest> requests;
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
      requests.push_back({id, tokens, one.nodes, one.depth, &params_});
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
  specrt::SamplingParams params_;
  std::int64_t copies_ = 0;
};

void check_same(const std::vector<DraftTree>& got, const std::vector<DraftTree>& want) {
  for (std::size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    CHECK(!want[i].empty());
    CHECK_EQ(got[i].size(), want[i].size());
    for (std::size_t node = 0; node < std::min(got[i].size(), want[i].size()); ++node) {
      CHECK_EQ(got[i].tokens()[node], want[i].tokens()[node]);
      CHECK_EQ(got[i].parents()[node], want[i].parents()[node]);
      CHECK_EQ(got[i].log_probs()[node], want[i].log_probs()[node]);
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

// With preemption, chunks and rounds of every size.
TEST(cuda_trees_give_the_bytes_of_plain_decoding) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 52);
  const Model target = tiny::random_model(spec);
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(800 + i, 3 + 4 * i, spec.vocab);
    requests[i].params.max_tokens = 10;
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
// request of the batch samples; over several rounds, of which one token or two are kept.
TEST(cuda_chains_are_those_of_the_host) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 53);
  const Model model = tiny::random_model(spec);
  specrt::DraftModelOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 20;
  options.max_batch_size = 4;
  options.max_rows = 16;
  options.threads = 1;
  options.device = "cuda";
  options.check_invariants = true;
  std::vector<std::vector<DraftTree>> drafts[2];
  for (const bool samples : {false, true}) {
    const auto drafter = specrt::make_model_drafter(model, spec.vocab, options);
    specrt::SamplingParams greedy;
    specrt::SamplingParams sampled;
    sampled.temperature = 1.0;
    sampled.seed = 3;
    std::vector<Tokens> texts;
    for (std::size_t i = 0; i < (samples ? 4 : 3); ++i) {
      texts.push_back(tiny::random_tokens(20 + i, 3 + 11 * i, spec.vocab));
      drafter->admit(static_cast<specrt::SequenceId>(i), texts.back(), 60);
    }
    for (int round = 0; round < 4; ++round) {
      std::vector<specrt::DraftRequest> requests;
      for (std::size_t i = 0; i < texts.size(); ++i) {
        const auto steps = static_cast<std::int64_t>(1 + (i + static_cast<std::size_t>(round)) % 4);
        requests.push_back({static_cast<specrt::SequenceId>(i), texts[i], steps, steps,
                            i == 3 ? &sampled : &greedy});
      }
      std::vector<DraftTree> out(requests.size());
      const emulated::Counts before = emulated::counts();
      drafter->propose(requests, out);
      const std::int64_t copies = emulated::counts().to_host - before.to_host;
      CHECK(samples ? copies >= 3 : copies == 1);
      for (std::size_t i = 0; i < texts.size(); ++i) {
        if (round % 2 == 0) texts[i].push_back(out[i].tokens()[0]);
        texts[i].push_back(static_cast<TokenId>((7 + round) % spec.vocab));
      }
      drafts[samples].push_back(std::move(out));
    }
  }
  for (std::size_t round = 0; round < 4; ++round) {
    for (std::size_t i = 0; i < 3; ++i) {
      const DraftTree& got = drafts[0][round][i];
      const DraftTree& want = drafts[1][round][i];
      CHECK_EQ(got.size(), 1 + (i + round) % 4);
      CHECK_EQ(got.size(), want.size());
      for (std::size_t node = 0; node < std::min(got.size(), want.size()); ++node) {
        CHECK_EQ(got.tokens()[node], want.tokens()[node]);
        CHECK_EQ(got.parents()[node], want.parents()[node]);
        CHECK_NEAR(got.log_probs()[node], want.log_probs()[node], 1e-5);
      }
    }
  }
}

// A draft grows where its states are, and comes back in one small copy.
TEST(cuda_heads_bring_one_copy_a_draft) {
  emulated::reset();
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
  Decoder decoder(target, options);
  const auto drafter = specrt::make_head_drafter(head, target, own);
  for (std::size_t i = 0; i < 2; ++i) {
    specrt::SamplingParams params;
    params.max_tokens = 60;
    (void)decoder.add(tiny::random_tokens(i, 4, spec.vocab), params, drafter);
  }
  const auto round = [&] { (void)decoder.round(specrt::plan_fixed(decoder, 5)); };
  for (int i = 0; i < 4; ++i) round();
  const emulated::Counts before = emulated::counts();
  constexpr std::int64_t kRounds = 2;
  for (int i = 0; i < kRounds; ++i) round();
  const emulated::Counts& after = emulated::counts();
  // The drafts and the verdicts; three passes of the head, what grows in each, how large the drafts
  // may be, the target's pass, what decides, and the list of states that were committed.
  CHECK_EQ(after.to_host - before.to_host, 2 * kRounds);
  const std::int64_t sent = after.to_device - before.to_device;
  CHECK(sent >= 10 * kRounds && sent <= 11 * kRounds);  // and, of accepted drafts, what moves
  CHECK_EQ(after.allocations, before.allocations);
}
