// The target's hidden states as drafters get them.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "model/runner.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Drafter;
using specrt::Model;
using specrt::ObservedFeatures;
using specrt::Precision;
using specrt::SequenceId;
using specrt::TargetFeatures;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

/// Drafts as another drafter does and keeps what it is told.
class Listener final : public Drafter {
 public:
  struct Heard {
    std::int64_t first = -1;
    std::vector<std::vector<float>> rows;  // from `first` on
    Tokens tokens;
  };

  Listener(std::shared_ptr<Drafter> inner, TargetFeatures features)
      : inner_(std::move(inner)), features_(std::move(features)) {}

  const std::string& name() const override { return name_; }
  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    inner_->admit(id, prompt, max_length);
  }
  void propose(std::span<const specrt::DraftRequest> requests,
               std::span<specrt::DraftTree> out) override {
    inner_->propose(requests, out);
  }
  void observe(SequenceId id, std::span<const TokenId> committed) override {
    inner_->observe(id, committed);
  }
  const TargetFeatures& features() const override { return features_; }
  bool wants_features(SequenceId) const override { return wants; }
  std::int64_t known_positions(SequenceId id) const override {
    return known >= 0 ? known : Drafter::known_positions(id);
  }
  void observe_features(std::span<const ObservedFeatures> batch) override {
    if (fails) throw specrt::InvalidArgument("not these");
    for (const ObservedFeatures& one : batch) {
      Heard& h = heard[one.id];
      if (h.first < 0) h.first = one.first;
      if (!features_.last_only) {
        CHECK_EQ(one.first, h.first + static_cast<std::int64_t>(h.rows.size()));
      }
      CHECK(one.first + one.rows.size() < static_cast<std::int64_t>(one.tokens.size()));
      h.tokens.assign(one.tokens.begin(), one.tokens.end());
      for (std::int64_t i = 0; i < one.rows.size(); ++i) {
        std::vector<float> row(static_cast<std::size_t>(one.rows.width()));
        one.rows.copy(i, row.data());
        if (features_.last_only) {
          last[one.id][one.first + i] = std::move(row);
        } else {
          h.rows.push_back(std::move(row));
        }
      }
    }
  }
  void release(SequenceId id) override { inner_->release(id); }
  specrt::MemoryUse memory() const override { return {}; }

  std::map<SequenceId, Heard> heard;
  std::map<SequenceId, std::map<std::int64_t, std::vector<float>>> last;
  bool wants = true;
  bool fails = false;
  std::int64_t known = -1;

 private:
  std::string name_ = "listener";
  std::shared_ptr<Drafter> inner_;
  TargetFeatures features_;
};

/// The same features out of one plain pass over a text.
std::vector<std::vector<float>> expected(const Model& model, const Tokens& tokens,
                                         const TargetFeatures& features) {
  specrt::RunnerOptions options;
  options.kv_cache_bytes = 1 << 22;
  options.max_rows = 256;
  options.features = features;
  specrt::Runner runner(model, options);
  runner.cache().add(0, static_cast<std::int64_t>(tokens.size()));
  runner.begin();
  runner.add_committed(0, tokens);
  runner.capture(0, runner.rows());
  runner.forward();
  std::vector<std::vector<float>> rows(tokens.size());
  const std::int64_t hidden = model.config().hidden_size;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(tokens.size()); ++i) {
    const auto add = [&](const float* base) {
      rows[static_cast<std::size_t>(i)].insert(rows[static_cast<std::size_t>(i)].end(),
                                               base + i * hidden, base + (i + 1) * hidden);
    };
    for (const std::int64_t layer : features.layers) add(runner.captured(layer));
    if (features.normed) add(runner.captured_normed());
  }
  return rows;
}

struct Case {
  Model model;
  std::vector<Request> requests;
  std::vector<Output> plain;
  std::vector<Tokens> texts;
};

Case make_case(Precision dtype) {
  Case c;
  tiny::Spec spec = tiny::small_spec(dtype, 81);
  spec.layers = 3;
  c.model = tiny::random_model(spec);
  c.requests.resize(4);
  for (std::size_t i = 0; i < c.requests.size(); ++i) {
    c.requests[i].prompt = tiny::random_tokens(900 + i, 1 + 11 * i, spec.vocab);
    c.requests[i].params.max_tokens = static_cast<std::int64_t>(20 + 7 * i);
    c.requests[i].params.temperature = i % 2 == 0 ? 0.0 : 1.0;
    c.requests[i].params.seed = i;
  }
  Decoder decoder(c.model, tiny::options_for(c.model, 4, 128, 4));
  c.plain = tiny::run(decoder, c.requests, tiny::fixed(0));
  for (std::size_t i = 0; i < c.requests.size(); ++i) {
    c.texts.push_back(tiny::joined(c.requests[i].prompt, c.plain[i].tokens));
  }
  return c;
}

}  // namespace

// What arrives is, bit for bit, what one pass over the finished text has at these places: in order,
// without gaps, accepted drafts included, chunked prompts too.
TEST(features_of_committed_tokens_arrive_in_order) {
  for (const Precision dtype : {Precision::f32, Precision::bf16}) {
    const Case c = make_case(dtype);
    TargetFeatures features;
    features.layers = {2, 0, 3, 1};
    features.normed = true;
    for (const tiny::Kind kind : {tiny::Kind::oracle, tiny::Kind::tree, tiny::Kind::bushy}) {
      for (const bool restless : {false, true}) {
        const auto listener = std::make_shared<Listener>(
            tiny::make_drafter(kind, c.texts, c.model.config().vocab_size), features);
        std::vector<Request> requests = c.requests;
        for (Request& request : requests) request.drafter = listener;
        requests[2].drafter = nullptr;  // and captures nothing
        DecoderOptions options = tiny::options_for(c.model, 4, 128, 4);
        options.features.layers = {0, 1, 2, 3};
        options.features.normed = true;
        options.max_rows = 48;
        Decoder decoder(c.model, options);
        const std::vector<Output> outputs =
            tiny::run(decoder, requests, restless ? tiny::restless(5, 6) : tiny::fixed(5));
        CHECK_EQ(listener->heard.size(), std::size_t{3});
        for (std::size_t i = 0; i < requests.size(); ++i) {
          CHECK_EQ(tiny::difference(outputs[i], c.plain[i]), "");
          if (requests[i].drafter == nullptr) continue;
          const Listener::Heard& heard = listener->heard.at(outputs[i].id);
          CHECK_EQ(heard.first, 0);
          CHECK(heard.tokens == c.texts[i]);
          // The last token was never run.
          CHECK_EQ(heard.rows.size(), c.texts[i].size() - 1);
          const auto right = expected(c.model, c.texts[i], features);
          for (std::size_t t = 0; t < heard.rows.size(); ++t) CHECK(heard.rows[t] == right[t]);
        }
      }
    }
  }
}

TEST(features_of_the_last_token_alone) {
  const Case c = make_case(Precision::f32);
  TargetFeatures features;
  features.normed = true;
  features.last_only = true;
  const auto listener = std::make_shared<Listener>(
      tiny::make_drafter(tiny::Kind::tree, c.texts, c.model.config().vocab_size), features);
  std::vector<Request> requests = c.requests;
  for (Request& request : requests) request.drafter = listener;
  DecoderOptions options = tiny::options_for(c.model, 4, 128, 4);
  options.features.normed = true;
  Decoder decoder(c.model, options);
  for (int turn = 0; turn < 2; ++turn) {  // the second out of the prefix cache, which it may use
    listener->last.clear();
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(4));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK_EQ(tiny::difference(outputs[i], c.plain[i]), "");
      if (turn == 1 && requests[i].prompt.size() > 8) {
        CHECK(outputs[i].counters.cached_prompt_tokens > 0);
      }
      const auto right = expected(c.model, c.texts[i], features);
      const auto& last = listener->last.at(outputs[i].id);
      CHECK_EQ(static_cast<std::int64_t>(last.size()), 1 + outputs[i].counters.rounds);
      for (const auto& [position, row] : last) {
        CHECK(row == right[static_cast<std::size_t>(position)]);
      }
    }
  }
}

// Positions that the target skips have no features: a hit ends where the drafter has them.
TEST(features_end_a_prefix_hit_where_they_are_missing) {
  const Case c = make_case(Precision::f32);
  TargetFeatures features;
  features.layers = {1};
  const auto listener = std::make_shared<Listener>(
      tiny::make_drafter(tiny::Kind::oracle, c.texts, c.model.config().vocab_size), features);
  Request request = c.requests[3];  // 34 prompt tokens
  request.drafter = listener;
  DecoderOptions options = tiny::options_for(c.model, 4, 128, 4);
  options.features.layers = {1};
  Decoder decoder(c.model, options);
  const std::int64_t cached[] = {0, 0, 12, 16, 32};
  const std::int64_t known[] = {-1, -1, 13, 16, 1000};
  for (std::size_t turn = 0; turn < 5; ++turn) {
    listener->known = known[turn];
    listener->heard.clear();
    const Output output = tiny::run(decoder, {request}, tiny::fixed(4))[0];
    CHECK_EQ(tiny::difference(output, c.plain[3]), "");
    CHECK_EQ(output.counters.cached_prompt_tokens, cached[turn]);
    CHECK_EQ(listener->heard.at(output.id).first, cached[turn]);
  }
}

TEST(features_nobody_wants_are_not_captured) {
  const Case c = make_case(Precision::f32);
  TargetFeatures features;
  features.layers = {3};
  const auto listener = std::make_shared<Listener>(
      tiny::make_drafter(tiny::Kind::oracle, c.texts, c.model.config().vocab_size), features);
  listener->wants = false;
  Request request = c.requests[1];
  request.drafter = listener;
  DecoderOptions options = tiny::options_for(c.model, 4, 128, 4);
  options.features.layers = {3};
  Decoder decoder(c.model, options);
  CHECK_EQ(tiny::difference(tiny::run(decoder, {request}, tiny::fixed(4))[0], c.plain[1]), "");
  CHECK(listener->heard.empty());

  // An error while listening ends the requests of that call, and no other.
  listener->wants = true;
  listener->fails = true;
  const std::vector<Output> outputs = tiny::run(decoder, {request, c.requests[0]}, tiny::fixed(4));
  CHECK(outputs[0].error.find("listener") != std::string::npos);
  CHECK(outputs[0].error.find("not these") != std::string::npos);
  CHECK_EQ(tiny::difference(outputs[1], c.plain[0]), "");
}

TEST(features_are_checked_and_counted) {
  const Case c = make_case(Precision::f32);
  DecoderOptions options = tiny::options_for(c.model, 4, 128, 4);
  const std::int64_t without =
      specrt::memory_of(c.model.config(), Precision::f32, options).workspace;
  options.features.layers = {0, 3};
  options.features.normed = true;
  const specrt::MemoryUse use = specrt::memory_of(c.model.config(), Precision::f32, options);
  const std::int64_t floats = options.max_rows * c.model.config().hidden_size;
  CHECK_EQ(use.workspace - without, 3 * 4 * ((floats + 15) / 16 * 16));
  Decoder decoder(c.model, options);
  CHECK_EQ(decoder.memory().workspace, use.workspace);

  TargetFeatures other;
  other.layers = {2};
  const auto listener = std::make_shared<Listener>(
      tiny::make_drafter(tiny::Kind::oracle, c.texts, c.model.config().vocab_size), other);
  CHECK_THROWS(decoder.add(c.requests[0].prompt, c.requests[0].params, listener),
               specrt::InvalidArgument, "features that it reads");
  CHECK(decoder.idle());
  options.features.layers = {4};
  CHECK_THROWS(Decoder(c.model, options), specrt::InvalidArgument, "from 0 to 3");
  options.features.layers = {-1};
  CHECK_THROWS(specrt::memory_of(c.model.config(), Precision::f32, options),
               specrt::InvalidArgument, "from 0 to 3");
}
