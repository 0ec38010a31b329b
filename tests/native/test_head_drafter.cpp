// A draft head beside its target, from C++.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "decode/head_features.h"
#include "decode/head_modules.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_heads.h"
#include "tiny_model.h"

namespace {

using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Drafter;
using specrt::DraftHeadOptions;
using specrt::HeadKind;
using specrt::Model;
using specrt::Precision;
using specrt::TokenId;
using tiny::head_options;
using tiny::Output;
using tiny::random_head;
using tiny::random_modules;
using tiny::Request;
using tiny::Tokens;

/// Keeps the drafts of another drafter, by the length of the text before them.
class Recorder final : public specrt::Drafter {
 public:
  explicit Recorder(std::shared_ptr<Drafter> inner) : inner_(std::move(inner)) {}
  const std::string& name() const override { return inner_->name(); }
  void admit(specrt::SequenceId id, std::span<const TokenId> prompt, std::int64_t most) override {
    inner_->admit(id, prompt, most);
  }
  void propose(std::span<const specrt::DraftRequest> requests,
               std::span<specrt::DraftTree> out) override {
    inner_->propose(requests, out);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto& tokens = out[i].tokens();
      drafts[std::ssize(requests[i].tokens)] = Tokens(tokens.begin(), tokens.end());
    }
  }
  void observe(specrt::SequenceId, std::span<const TokenId>) override {}
  const specrt::TargetFeatures& features() const override { return inner_->features(); }
  std::int64_t known_positions(specrt::SequenceId id) const override {
    return inner_->known_positions(id);
  }
  void observe_features(std::span<const specrt::ObservedFeatures> batch) override {
    inner_->observe_features(batch);
  }
  void release(specrt::SequenceId id) override { inner_->release(id); }
  specrt::MemoryUse memory() const override { return inner_->memory(); }

  std::map<std::int64_t, Tokens> drafts;

 private:
  std::shared_ptr<Drafter> inner_;
};

std::vector<Request> requests_for(std::int64_t vocab) {
  std::vector<Request> requests(5);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(700 + i, 1 + 9 * i, vocab);
    requests[i].params.max_tokens = static_cast<std::int64_t>(25 + 6 * i);
    requests[i].params.logprobs = 1;
    requests[i].params.seed = 7 + i;
    requests[i].params.temperature = i < 2 ? 0.0 : 1.0;
  }
  requests[1].params.repetition_penalty = 1.5;
  requests[3].params.top_k = 9;
  requests[4].params.presence_penalty = 0.5;
  return requests;
}

}  // namespace

// Budgets that come and go (0 among them), prompts in pieces, memory that holds nothing NaN: the
// same bytes, whatever the head is, and every draft finds all positions before it.
TEST(head_drafter_gives_the_bytes_of_plain_decoding) {
  for (const Precision dtype : {Precision::f32, Precision::bf16}) {
    const tiny::Spec spec = tiny::small_spec(dtype, 91);
    const Model target = tiny::random_model(spec);
    const std::vector<Request> plain_requests = requests_for(spec.vocab);
    DecoderOptions options = tiny::options_for(target, 5, 128, 4);
    options.features.layers = {0, 2};
    options.features.normed = true;
    Decoder plain(target, options);
    const std::vector<Output> expected = tiny::run(plain, plain_requests, tiny::fixed(0));
    for (const HeadKind kind : {HeadKind::fused, HeadKind::beside}) {
      const Model head = random_head(spec, kind, dtype);
      for (const std::int64_t top_k : {1, 3}) {
        for (const int max_rows : {16, 512}) {
          DraftHeadOptions own = head_options(kind, top_k, 3);
          own.max_rows = max_rows;
          own.max_batch_size = 5;
          const auto drafter = specrt::make_head_drafter(head, target, own);
          std::vector<Request> requests = plain_requests;
          for (Request& request : requests) request.drafter = drafter;
          Decoder decoder(target, options);
          std::int64_t drafted = 0;
          for (int turn = 0; turn < 2; ++turn) {  // the second out of the prefix caches
            const auto outputs = tiny::run(decoder, requests, tiny::restless(4, 9));
            for (std::size_t i = 0; i < requests.size(); ++i) {
              CHECK_EQ(tiny::difference(outputs[i], expected[i]), "");
              drafted += outputs[i].counters.drafted;
            }
          }
          CHECK(drafted > 100);
          const auto use = specrt::memory_of(head.config(), head.precision(), own, spec.vocab);
          CHECK_EQ(drafter->memory().workspace, use.workspace);
          CHECK_EQ(drafter->memory().kv_cache, use.kv_cache);
          CHECK_EQ(drafter->memory().weights, use.weights);
        }
      }
    }
  }
}

TEST(head_drafter_of_several_modules_gives_the_same_bytes) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 93);
  const Model target = tiny::random_model(spec);
  const std::vector<Request> plain_requests = requests_for(spec.vocab);
  DecoderOptions options = tiny::options_for(target, 5, 128, 4);
  options.features.normed = true;
  Decoder plain(target, options);
  const std::vector<Output> expected = tiny::run(plain, plain_requests, tiny::fixed(0));
  for (const std::int64_t count : {2, 3}) {
    const std::vector<Model> modules = random_modules(spec, Precision::bf16, count);
    DraftHeadOptions own = head_options(HeadKind::fused, count == 2 ? 3 : 1, 5);
    own.modules = count;
    own.max_rows = 16;
    own.max_batch_size = 5;
    const auto drafter = specrt::make_head_drafter(std::span(modules), target, own);
    std::vector<Request> requests = plain_requests;
    for (Request& request : requests) request.drafter = drafter;
    Decoder decoder(target, options);
    std::int64_t drafted = 0;
    for (int turn = 0; turn < 2; ++turn) {
      const auto outputs = tiny::run(decoder, requests, tiny::restless(4, 9));
      for (std::size_t i = 0; i < requests.size(); ++i) {
        CHECK_EQ(tiny::difference(outputs[i], expected[i]), "");
        drafted += outputs[i].counters.drafted;
      }
    }
    CHECK(drafted > 100);
    const auto use =
        specrt::memory_of(modules[0].config(), modules[0].precision(), own, spec.vocab);
    CHECK_EQ(drafter->memory().workspace, use.workspace);
    CHECK_EQ(drafter->memory().kv_cache, use.kv_cache);
    CHECK_EQ(drafter->memory().weights, use.weights);
  }
}

// Blocks of later modules are set aside as those of the first are, as the text grows: where the
// pool holds what there is of all requests but not their longest texts, all of them draft.
TEST(head_drafter_modules_set_room_aside_as_texts_grow) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 93);
  const Model target = tiny::random_model(spec);
  const std::vector<Model> modules = random_modules(spec, Precision::bf16, 2);
  DraftHeadOptions own = head_options(HeadKind::fused, 1, 2);
  own.modules = 2;
  own.max_rows = 16;
  own.max_batch_size = 4;
  own.max_model_len = 128;
  own.enable_prefix_caching = false;
  // 24 blocks a module, where a longest text takes 29.
  own.kv_cache_bytes = 2 * 24 * 4 * 2 * spec.kv_heads * spec.head_dim * 2;
  const auto drafter = specrt::make_head_drafter(std::span(modules), target, own);
  DecoderOptions options = tiny::options_for(target, 4, 128, 4);
  options.features.normed = true;
  Decoder decoder(target, options);
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(40 + i, 5, spec.vocab);
    requests[i].params.max_tokens = 110;
    requests[i].drafter = drafter;
  }
  std::vector<specrt::SequenceId> ids;
  for (const Request& request : requests) {
    ids.push_back(decoder.add(request.prompt, request.params, drafter));
  }
  specrt::Plan plan;
  for (const specrt::SequenceId id : ids) plan.push_back({id, 3});
  std::map<specrt::SequenceId, std::int64_t> drafted;
  for (int round = 0; round < 5; ++round) {
    for (const specrt::Progress& p : decoder.round(plan)) drafted[p.id] = p.counters->drafted;
  }
  for (const specrt::SequenceId id : ids) CHECK(drafted[id] > 0);
  for (const specrt::SequenceId id : ids) decoder.cancel(id);
}

// A drafter that was idle for many rounds drafts as one that never was.
void check_catching_up(HeadKind kind, std::span<const Model> modules, const Model& target,
                       std::int64_t vocab) {
  std::map<std::int64_t, Tokens> drafts[2];
  for (const int idle : {0, 30}) {
    DraftHeadOptions own = head_options(kind, 2, 3);
    own.modules = std::ssize(modules);
    own.max_rows = 8;  // its store overflows meanwhile
    own.max_batch_size = 2;
    const auto drafter =
        std::make_shared<Recorder>(specrt::make_head_drafter(modules, target, own));
    DecoderOptions options = tiny::options_for(target, 2, 128, 4);
    options.features = own.features;
    Decoder decoder(target, options);
    Request request;
    request.prompt = tiny::random_tokens(3, 20, vocab);
    request.params.max_tokens = 60;
    request.drafter = drafter;
    // Drafts of a node: texts of every length come by, since random heads are wrong.
    const auto outputs = tiny::run(decoder, {request}, [&](const Decoder& d, int) {
      specrt::Plan plan;
      for (const specrt::SequenceState& s : d.sequences()) {
        const bool waits = s.length < 20 + 1 + idle;
        plan.push_back({s.id, s.prompt_left > 0 ? s.prompt_left : waits ? 0 : 4});
      }
      return plan;
    });
    CHECK(outputs[0].counters.drafted > 0);
    drafts[idle == 0 ? 0 : 1] = drafter->drafts;
  }
  std::size_t compared = 0;
  for (const auto& [length, tokens] : drafts[1]) {
    const auto found = drafts[0].find(length);
    if (found == drafts[0].end()) continue;
    CHECK(found->second == tokens);
    ++compared;
  }
  CHECK(compared > 10);
}

TEST(head_drafter_catches_up) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 92);
  const Model target = tiny::random_model(spec);
  const Model head = random_head(spec, HeadKind::beside, Precision::f32);
  check_catching_up(HeadKind::beside, std::span(&head, 1), target, spec.vocab);
  const std::vector<Model> modules = random_modules(spec, Precision::f32, 3);
  check_catching_up(HeadKind::fused, modules, target, spec.vocab);
}

// Sequences that outgrow the head's cache while it is idle, so that it learns so when it reads what
// waits, behind others' rounds, in a preemption or at the end: each goes on without drafts, and
// what comes later gets some.
TEST(head_drafter_without_room_lets_go) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 95);
  const Model target = tiny::random_model(spec);
  const Model head = random_head(spec, HeadKind::fused, Precision::f32);
  DraftHeadOptions own = head_options(HeadKind::fused, 2, 3);
  own.max_rows = 8;
  own.max_batch_size = 2;
  own.max_model_len = 64;
  own.kv_cache_bytes = specrt::kv_cache_bytes_for(head.config(), head.precision(), own, 1, 16);
  DecoderOptions options = tiny::options_for(target, 2, 64, 4);
  options.features = own.features;
  for (const bool preempted : {false, true}) {
    const std::shared_ptr<Drafter> drafter = specrt::make_head_drafter(head, target, own);
    Decoder decoder(target, options);
    specrt::SamplingParams params;
    params.max_tokens = 40;
    for (int turn = 0; turn < 12; ++turn) {
      const Tokens prompt =
          tiny::random_tokens(800 + static_cast<std::uint64_t>(turn), 6, spec.vocab);
      const specrt::SequenceId id = decoder.add(prompt, params, drafter);
      bool waits = preempted;
      while (!decoder.idle()) {
        decoder.round({{id, decoder.sequences()[0].prompt_left}});
        if (waits && decoder.sequences()[0].length == 30) {
          waits = false;
          decoder.preempt(id);
          decoder.resume(id);
        }
      }
    }
    Request request;
    request.prompt = tiny::random_tokens(900, 5, spec.vocab);
    request.params.max_tokens = 9;
    request.drafter = drafter;
    const auto outputs = tiny::run(decoder, {request}, [](const Decoder& d, int) {
      specrt::Plan plan;
      for (const specrt::SequenceState& s : d.sequences()) {
        plan.push_back({s.id, s.prompt_left > 0 ? s.prompt_left : 3});
      }
      return plan;
    });
    CHECK(outputs[0].counters.drafted > 0);
  }
}

// What each module makes of the last position, where the second is another: that of all behind it
// differs, though none of them reads the first.
TEST(head_modules_read_the_one_before) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 94);
  const Model target = tiny::random_model(spec);
  DraftHeadOptions own = head_options(HeadKind::fused, 1, 4);
  own.modules = 4;
  own.max_batch_size = 2;
  const Tokens text = tiny::random_tokens(5, 12, spec.vocab);
  const std::int64_t count = std::ssize(text) - 1;
  const auto size = static_cast<std::size_t>(count * spec.hidden);
  std::vector<float> features;
  for (const TokenId one : tiny::random_tokens(6, size, 201)) {
    features.push_back(static_cast<float>(one - 100) / 57.0f);
  }
  const auto states = [&](const std::vector<Model>& modules) {
    const specrt::HeadSizes sizes(modules.front().config(), own);
    specrt::RunnerOptions options = sizes.runner;
    options.team = std::make_shared<specrt::ThreadTeam>(1);
    specrt::Runner head(modules.front(), options, target);
    const std::span<const Model> all = modules;
    specrt::HeadModules later(all.subspan(1), target, sizes, options, spec.vocab, false);
    head.cache().add(1, count, {});
    later.admit(1, text, count, count, count, 0);
    head.begin();
    const auto tokens = std::span(text).subspan(1);
    const std::int64_t row = head.add_committed(1, tokens);
    std::vector<const float*> inputs;
    for (std::int64_t i = 0; i < count; ++i) inputs.push_back(features.data() + i * spec.hidden);
    std::vector<float*> outputs;
    for (std::int64_t i = 0; i < count; ++i) outputs.push_back(later.input(row + i));
    head.forward_head(inputs, outputs, false);
    const specrt::HeadModules::Piece piece{1, 0, row, tokens};
    later.follow(std::span(&piece, 1));
    std::vector<std::vector<float>> out;
    for (std::int64_t k = 1; k < own.modules; ++k) {
      const float* last = later.last_state(1, k);
      out.emplace_back(last, last + spec.hidden);
    }
    return out;
  };
  std::vector<Model> modules = random_modules(spec, Precision::f32, own.modules);
  const auto before = states(modules);
  modules[1] = random_head(spec, HeadKind::fused, Precision::f32, 1.0, 4321);
  const auto after = states(modules);
  CHECK(before[0] == after[0]);
  CHECK(before[1] != after[1]);
  CHECK(before[2] != after[2]);
}

TEST(head_drafter_refuses_what_does_not_fit) {
  const tiny::Spec spec = tiny::small_spec(Precision::f32, 93);
  const Model target = tiny::random_model(spec);
  const Model head = random_head(spec, HeadKind::fused, Precision::f32);
  DraftHeadOptions own = head_options(HeadKind::fused, 2, 3);
  own.features.layers = {1};
  CHECK_THROWS(specrt::make_head_drafter(head, target, own), specrt::InvalidArgument, "features");
  own = head_options(HeadKind::fused, 65, 3);
  CHECK_THROWS(specrt::make_head_drafter(head, target, own), specrt::InvalidArgument, "top_k");
  own = head_options(HeadKind::fused, 1, 0);
  CHECK_THROWS(specrt::make_head_drafter(head, target, own), specrt::InvalidArgument, "depth");
  own = head_options(HeadKind::fused, 1, 3);
  own.target_of_draft = {1, 2, 3};
  CHECK_THROWS(specrt::make_head_drafter(head, target, own), specrt::InvalidArgument,
               "target_of_draft");
  own.target_of_draft.clear();
  CHECK_THROWS(specrt::make_head_drafter(target, target, own), specrt::InvalidArgument, "head");
  tiny::Spec other = spec;
  other.hidden = 64;
  CHECK_THROWS(specrt::make_head_drafter(head, tiny::random_model(other), own),
               specrt::InvalidArgument, "hidden_size");
  CHECK_THROWS(head.save("/tmp/specrt_head_not_written"), specrt::UnsupportedError, "draft head");
}

// Blocks are shared by keys that tell all that a position follows from, the first token too.
TEST(head_keys_tell_first_tokens_apart) {
  for (const std::int64_t vocab : {std::int64_t{16}, std::int64_t{128256}, std::int64_t{262144}}) {
    const specrt::HeadKeys keys(vocab);
    CHECK(keys.usable(4));
    std::map<Tokens, TokenId> seen;
    for (std::int64_t first = 0; first < vocab;
         first += std::max<std::int64_t>(1, vocab / 16 - 1)) {
      const Tokens text = {static_cast<TokenId>(first), 3, static_cast<TokenId>(vocab - 1), 0, 5};
      Tokens one;
      keys.append(std::span(text).first(2), one);  // piece by piece, and at once
      keys.append(text, one);
      Tokens other;
      keys.append(text, other);
      CHECK(one == other);
      CHECK_EQ(one.size(), std::size_t{4});
      for (const TokenId key : one) CHECK(key >= 0);
      CHECK(seen.emplace(one, text[0]).second);
    }
  }
}

// Trees that a head samples keep the target's law, three tokens deep.
TEST(head_drafter_rejection_keeps_the_law) {
  const std::int64_t vocab = 5;
  std::vector<std::vector<float>> table(vocab, std::vector<float>(vocab));
  for (std::size_t a = 0; a < 5; ++a) {
    for (std::size_t b = 0; b < 5; ++b) {
      table[a][b] = static_cast<float>((a * 7 + b * 3) % 5) * 0.6f;
    }
  }
  const Model target = tiny::bigram_model(table, 64);
  tiny::Spec spec;
  spec.vocab = spec.hidden = vocab;
  spec.layers = 1;
  spec.ffn = 16;
  spec.max_positions = 64;
  const Model head = random_head(spec, HeadKind::fused, Precision::f32, 0.5);
  std::vector<std::vector<double>> law(5, std::vector<double>(5));
  for (std::size_t a = 0; a < 5; ++a) {
    double sum = 0;
    for (std::size_t b = 0; b < 5; ++b) sum += law[a][b] = std::exp(double{table[a][b]});
    for (double& p : law[a]) p /= sum;
  }
  for (const auto verification : {specrt::Verification::rejection, specrt::Verification::block}) {
    DraftHeadOptions own = head_options(HeadKind::fused, 3, 2);
    own.max_batch_size = 1;
    const auto drafter = specrt::make_head_drafter(head, target, own);
    DecoderOptions options = tiny::options_for(target, 1, 16, 4);
    options.features.normed = true;
    options.check_invariants = false;
    Decoder decoder(target, options);
    const int trials = tiny::kThinned ? 1500 : 6000;
    std::vector<double> counts(125);
    std::int64_t accepted = 0;
    for (int trial = 0; trial < trials; ++trial) {
      Request request;
      request.prompt = {1, 2};
      request.params.max_tokens = 4;
      request.params.temperature = 1.0;
      request.params.seed = static_cast<std::uint64_t>(trial) * 77 + 5;
      request.params.verification = verification;
      request.drafter = drafter;
      const Output output = tiny::run(decoder, {request}, tiny::fixed(6))[0];
      // The first token comes from prefill; the next three are what drafts may touch.
      const Tokens& t = output.tokens;
      counts[static_cast<std::size_t>(t[1] * 25 + t[2] * 5 + t[3])] += 1;
      accepted += output.counters.accepted;
    }
    CHECK(accepted > trials / 4);
    double chi = 0;
    for (std::size_t a = 0; a < 5; ++a) {
      for (std::size_t b = 0; b < 5; ++b) {
        for (std::size_t c = 0; c < 5; ++c) {
          double p = 0;
          for (std::size_t f = 0; f < 5; ++f) p += law[2][f] * law[f][a] * law[a][b] * law[b][c];
          const double mean = p * trials;
          const double off = counts[a * 25 + b * 5 + c] - mean;
          chi += off * off / mean;
        }
      }
    }
    CHECK(chi < 190.0);  // 124 degrees of freedom: one in ten thousand is above 190
  }
}
