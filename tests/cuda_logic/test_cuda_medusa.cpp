// Medusa heads on the emulated device: what they say against the CPU, the bytes of plain decoding
// whatever they draft, and what a draft costs.

#include <cmath>
#include <memory>

#include "../native/check.h"
#include "../native/tiny_decode.h"
#include "../native/tiny_model.h"
#include "cpu/dispatch.h"
#include "decode/logits_state.h"
#include "emulated/emulated.h"
#include "model/runner.h"
#include "specrt/error.h"
#include "specrt/medusa.h"

namespace {

using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::DraftTree;
using specrt::MedusaConfig;
using specrt::MedusaHeads;
using specrt::Model;
using specrt::Precision;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;
namespace emulated = specrt::cuda::emulated;

constexpr std::int64_t kHeads = 3;

MedusaConfig config_for(const Model& target) {
  MedusaConfig config;
  config.vocab_size = config.outputs = target.config().vocab_size;
  config.hidden_size = target.config().hidden_size;
  config.num_heads = kHeads;
  return config;
}

/// `value` of a tensor's element, by name, row and column.
MedusaHeads build(
    const MedusaConfig& config, Precision precision,
    const std::function<float(const std::string&, std::int64_t, std::int64_t)>& value) {
  specrt::MedusaBuilder builder(config, precision);
  for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
    const std::int64_t columns = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
    std::vector<float> values;
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) values.push_back(value(tensor.name, i, j));
    }
    builder.set(tensor.name, tensor.shape, specrt::DType::f32, values.data());
  }
  return builder.build();
}

MedusaHeads random_heads(const MedusaConfig& config, Precision precision) {
  const tiny::Tokens noise = tiny::random_tokens(77, 1009, 2001);
  std::size_t at = 0;
  return build(config, precision, [&](const std::string&, std::int64_t, std::int64_t) {
    return static_cast<float>(noise[at++ % noise.size()] - 1000) / 2000.0f;
  });
}

specrt::StaticTree small_tree() {
  return specrt::StaticTree({{0}, {1}, {0, 0}, {0, 1}, {1, 0}, {0, 0, 0}, {2}, {0, 0, 1}});
}

specrt::MedusaOptions medusa_options(const char* device, int max_batch_size = 4) {
  specrt::MedusaOptions options;
  options.tree = small_tree();
  options.max_batch_size = max_batch_size;
  options.threads = 1;
  options.device = device;
  return options;
}

DecoderOptions decoder_options(const Model& model, int sequences, const char* device = "cuda") {
  DecoderOptions options = tiny::options_for(model, sequences, 80, 4);
  options.device = device;
  options.max_rows = 64;
  options.features.normed = true;
  return options;
}

// What heads draft behind every prefix of a text.
std::vector<Tokens> drafts_of(const char* device, const MedusaHeads& heads, const Model& target,
                              const Tokens& text, std::size_t first,
                              const specrt::SamplingParams& params) {
  specrt::RunnerOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 20;
  options.max_rows = 64;
  options.features.normed = true;
  options.device = device;
  options.team = std::make_shared<specrt::ThreadTeam>(1);
  specrt::Runner runner(target, options);
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, std::ssize(text));
  runner.begin();
  (void)runner.add_committed(0, text);
  runner.capture(0, runner.rows());
  runner.forward();
  const std::vector<const float*> parts = {runner.captured_normed()};
  const auto drafter = specrt::make_medusa_drafter(heads, medusa_options(device));
  drafter->admit(5, std::span(text).first(first), std::ssize(text) + 8);
  std::vector<Tokens> out;
  for (std::size_t length = first; length <= text.size(); ++length) {
    const auto tokens = std::span(text).first(length);
    const std::int64_t row = static_cast<std::int64_t>(length) - 2;
    const specrt::ObservedFeatures observed{
        5, row, {parts, {&row, 1}, target.config().hidden_size, runner.device_features()}, tokens};
    drafter->observe_features({&observed, 1});
    specrt::LogitsState state(params, tokens, target.config().vocab_size, nullptr);
    specrt::DraftRequest request{5, tokens, 8, 3, &params};
    request.logits = &state;
    DraftTree tree;
    drafter->propose({&request, 1}, {&tree, 1});
    out.emplace_back(tree.tokens().begin(), tree.tokens().end());
  }
  drafter->release(5);
  return out;
}

}  // namespace

TEST(cuda_medusa_drafts_as_on_the_cpu) {
  for (const Precision precision : {Precision::bf16, Precision::int4}) {
    if (tiny::kThinned && precision != Precision::bf16) continue;
    emulated::reset();
    emulated::settings().architecture = precision == Precision::bf16 ? 90 : 80;
    const tiny::Spec spec = tiny::small_spec(Precision::bf16, 61);
    const Model target = tiny::random_model(spec);
    MedusaConfig config = config_for(target);
    config.num_blocks = 2;
    config.logits_scale = 0.7;
    if (precision == Precision::int4) {
      config.shared_blocks = config.shared_projection = true;
      config.outputs = 40;
      config.bias = false;
      for (TokenId id = 0; id < 40; ++id) config.token_map.push_back(60 - id);
    }
    const MedusaHeads heads = random_heads(config, precision);
    const Tokens text = tiny::random_tokens(5, 24, spec.vocab);
    specrt::SamplingParams params;
    for (const int which : {0, 1, 2}) {  // what is likely, what noise favours, and with penalties
      params.temperature = which == 1 ? 0.8 : 0.0;
      params.seed = 11;
      params.top_k = 30;
      params.repetition_penalty = which == 2 ? 1.5 : 1.0;
      const std::vector<Tokens> want = drafts_of("cpu", heads, target, text, 8, params);
      const std::vector<Tokens> got = drafts_of("cuda", heads, target, text, 8, params);
      CHECK_EQ(got.size(), want.size());
      double equal = 0.0;
      double all = 0.0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        CHECK_EQ(want[i].size(), 8u);
        CHECK_EQ(got[i].size(), 8u);
        for (std::size_t k = 0; k < 8; ++k) equal += got[i][k] == want[i][k] ? 1 : 0;
        all += 8;
        if (i > 0) CHECK(want[i] != want[i - 1]);
      }
      if (equal < 0.9 * all) check::fail(__FILE__, __LINE__, std::to_string(equal / all));
    }
  }
  emulated::reset();
}

// Heads that know how a counter goes on are believed to the last token.
TEST(cuda_medusa_is_accepted_as_on_the_cpu) {
  emulated::reset();
  constexpr std::int64_t kVocab = 24;
  std::vector<std::vector<float>> logits(kVocab, std::vector<float>(kVocab, 0.0f));
  for (std::size_t i = 0; i < kVocab; ++i) logits[i][(i + 1) % kVocab] = 40.0f;
  const Model target = tiny::bigram_model(logits, 128, Precision::bf16);
  const MedusaHeads heads =
      build(config_for(target), Precision::bf16,
            [](const std::string& name, std::int64_t row, std::int64_t column) {
              if (name.find("projection") == std::string::npos) return 0.0f;
              const std::int64_t head = name[6] - '0';  // heads.N.projection
              return row == (column + head + 2) % kVocab ? 1.0f : 0.0f;
            });
  Request request;
  request.prompt = {3, 4, 5};
  request.params.max_tokens = 17;
  request.drafter = specrt::make_medusa_drafter(heads, medusa_options("cuda"));
  Decoder decoder(target, decoder_options(target, 2));
  const Output out = tiny::run(decoder, {request}, tiny::fixed(8))[0];
  for (std::size_t i = 0; i < out.tokens.size(); ++i) {
    CHECK_EQ(out.tokens[i], static_cast<TokenId>((6 + i) % kVocab));
  }
  CHECK_EQ(out.counters.first_rejections, 0);
  CHECK_EQ(out.counters.accepted, 12);
}

TEST(cuda_medusa_gives_the_bytes_of_plain_decoding) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 62);
  const Model target = tiny::random_model(spec);
  std::vector<Request> requests(tiny::kThinned ? 1 : 3);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(30 + i, 3 + 5 * i, spec.vocab);
    requests[i].params.max_tokens = 6;
    requests[i].params.seed = i;
    requests[i].params.temperature = i == 1 ? 0.9 : 0.0;
  }
  Decoder plain(target, decoder_options(target, 3));
  const std::vector<Output> expected = tiny::run(plain, requests, tiny::fixed(0));
  const MedusaHeads heads = random_heads(config_for(target), Precision::bf16);
  const auto drafter = specrt::make_medusa_drafter(heads, medusa_options("cuda"));
  for (Request& request : requests) request.drafter = drafter;
  Decoder decoder(target, decoder_options(target, 3));
  std::int64_t drafted = 0;
  for (const std::uint64_t preempt : {0, 3}) {
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::restless(6, 8), preempt);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK_EQ(tiny::difference(outputs[i], expected[i]), "");
      drafted += outputs[i].counters.drafted;
    }
  }
  CHECK(drafted > 20);
}

// Drafts come back in one copy, noise or not; memory is what was told, and refusals come with a
// name.
TEST(cuda_medusa_costs_what_was_told) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 63);
  const Model target = tiny::random_model(spec);
  const MedusaConfig config = config_for(target);
  {
    const auto drafter = specrt::make_medusa_drafter(random_heads(config, Precision::bf16),
                                                     medusa_options("cuda", 2));
    const specrt::MemoryUse use = specrt::memory_of_medusa(config, Precision::bf16, 2, "cuda");
    CHECK_EQ(drafter->memory().total(), use.total());
    CHECK(emulated::in_use() >= use.total() && emulated::in_use() < use.total() + 8 * 4096);
    DecoderOptions options = decoder_options(target, 1);
    options.check_invariants = false;
    Decoder decoder(target, options);
    specrt::SamplingParams params;
    params.max_tokens = 60;
    for (const double temperature : {0.0, 0.9}) {
      params.temperature = temperature;
      const auto id = decoder.add(tiny::random_tokens(1, 3, spec.vocab), params, drafter);
      const auto round = [&] { (void)decoder.round(specrt::plan_fixed(decoder, 8)); };
      for (int i = 0; i < 4; ++i) round();
      const emulated::Counts before = emulated::counts();
      for (int i = 0; i < 3; ++i) round();
      CHECK_EQ(emulated::counts().to_host - before.to_host, 2 * 3);
      CHECK_EQ(emulated::counts().allocations, before.allocations);
      decoder.cancel(id);
    }
  }
  CHECK_EQ(emulated::in_use(), 0);
  CHECK_THROWS(
      specrt::make_medusa_drafter(random_heads(config, Precision::f32), medusa_options("cuda")),
      specrt::UnsupportedError, "dtype");
}
