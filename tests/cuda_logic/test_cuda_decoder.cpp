// Whole decoders over the emulated device: the bytes of plain decoding whatever drafts, batches and
// chunks there are; against the CPU; what a round costs in copies, launches and memory.

#include <algorithm>
#include <cmath>
#include <memory>

#include "../native/check.h"
#include "../native/tiny_decode.h"
#include "../native/tiny_model.h"
#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "emulated/emulated.h"
#include "model/runner.h"
#include "specrt/cpu.h"
#include "specrt/device_error.h"
#include "specrt/error.h"

namespace {

using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Model;
using specrt::Precision;
using specrt::TokenId;
using tiny::Kind;
using tiny::Output;
using tiny::Request;
namespace emulated = specrt::cuda::emulated;

constexpr std::int64_t kLongest = 100;
constexpr std::int64_t kTokens = 12;

DecoderOptions cuda_options(const Model& model, int sequences = 4, int block_size = 16,
                            std::int64_t longest = kLongest) {
  DecoderOptions options = tiny::options_for(model, sequences, longest, block_size);
  options.device = "cuda";
  options.max_rows = 64;
  options.kv_cache_bytes =
      specrt::kv_cache_bytes_for(model.config(), model.precision(), options, sequences, longest);
  return options;
}

Request greedy(std::int64_t vocab, std::uint64_t seed = 1) {
  Request request;
  request.prompt = tiny::random_tokens(seed, 9, vocab);
  request.params.max_tokens = kTokens;
  return request;
}

Request seeded(std::int64_t vocab) {
  Request request = greedy(vocab, 2);
  request.prompt = tiny::random_tokens(2, 5, vocab);
  request.params.temperature = 0.8;
  request.params.seed = 7;
  return request;
}

// With everything that is processed on the device.
Request fussy(std::int64_t vocab) {
  Request request = seeded(vocab);
  request.prompt = tiny::random_tokens(3, 14, vocab);
  request.params.temperature = 1.0;
  request.params.seed = 11;
  request.params.top_k = 20;
  request.params.top_p = 0.9;
  request.params.min_p = 0.01;
  request.params.repetition_penalty = 1.2;
  request.params.frequency_penalty = 0.1;
  request.params.presence_penalty = 0.2;
  request.params.logit_bias = {{3, 1.0f}, {5, -2.0f}};
  request.params.bad_words = {{8}, {4, 9}};
  request.params.min_tokens = 6;
  request.params.stop_token_ids = {1};
  return request;
}

// Decided on the host, out of logits that are copied.
Request with_logprobs(std::int64_t vocab) {
  Request request = seeded(vocab);
  request.params.seed = 13;
  request.params.logprobs = 2;
  return request;
}

std::vector<Request> all_requests(std::int64_t vocab) {
  return {greedy(vocab), seeded(vocab), fussy(vocab), with_logprobs(vocab)};
}

// A model with its requests and what plain decoding makes of each alone.
struct Case {
  Model model;
  std::vector<Request> requests;
  std::vector<Output> plain;

  explicit Case(Precision precision, std::uint64_t seed)
      : model(tiny::random_model(tiny::small_spec(precision, seed))),
        requests(all_requests(model.config().vocab_size)) {
    Decoder decoder(model, cuda_options(model));
    for (const Request& request : requests) {
      plain.push_back(tiny::run(decoder, {request}, tiny::fixed(0))[0]);
      CHECK(plain.back().finish == specrt::Finish::length ||
            plain.back().finish == specrt::Finish::stop);
    }
  }

  void compare(const std::vector<std::size_t>& chosen, Kind kind, const tiny::Planner& planner,
               int block_size, const std::string& what, std::uint64_t preempt = 0) {
    std::vector<Request> batch;
    for (const std::size_t at : chosen) {
      batch.push_back(requests[at]);
      batch.back().drafter = tiny::make_drafter(
          kind, {tiny::joined(requests[at].prompt, plain[at].tokens)}, model.config().vocab_size);
    }
    Decoder decoder(model, cuda_options(model, static_cast<int>(chosen.size()), block_size));
    const std::vector<Output> outputs = tiny::run(decoder, batch, planner, preempt);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const std::string text = tiny::difference(outputs[i], plain[chosen[i]]);
      if (!text.empty()) check::fail(__FILE__, __LINE__, what + ": " + text);
      accepted += outputs[i].counters.accepted;
      drafted += outputs[i].counters.drafted;
    }
  }
  std::int64_t accepted = 0;
  std::int64_t drafted = 0;
};

TEST(cuda_decoder_same_bytes_alone) {
  emulated::reset();
  Case test(Precision::bf16, 21);
  for (const Kind kind : {Kind::half, Kind::tree, Kind::bushy}) {
    for (std::size_t at = 0; at < 4; ++at) {
      if (tiny::kThinned && kind != Kind::bushy) continue;
      const std::int64_t gamma = kind == Kind::tree ? 3 : 6;
      test.compare(
          {at}, kind, tiny::fixed(gamma), at % 2 == 0 ? 16 : 4,
          "drafter " + std::to_string(static_cast<int>(kind)) + ", request " + std::to_string(at));
    }
  }
  CHECK(test.accepted > 10 && test.accepted < test.drafted);
}

TEST(cuda_decoder_same_bytes_in_batches) {
  emulated::reset();
  Case test(Precision::bf16, 22);
  test.compare({0, 1, 2}, Kind::tree, tiny::fixed(5), 16, "tree");
  if (tiny::kThinned) return;
  test.compare({0, 1, 2, 3}, Kind::half, tiny::restless(1, 7), 16, "restless");
  test.compare({3, 0, 1}, Kind::oracle, tiny::restless(2, 4), 1, "restless, blocks of one");
  test.compare({0, 1, 2}, Kind::none, tiny::fixed(0), 16, "plain");
  CHECK(test.accepted > 10 && test.accepted < test.drafted);
}

// Its cache is too small for all of them.
TEST(cuda_decoder_same_bytes_after_preemption) {
  emulated::reset();
  Case test(Precision::bf16, 23);
  test.compare({0, 1, 2, 3}, Kind::half, tiny::fixed(3), 4, "preempted", 5);
}

TEST(cuda_decoder_same_bytes_in_other_precisions) {
  if (tiny::kThinned) return;
  for (const Precision precision : {Precision::f16, Precision::int8, Precision::int4}) {
    emulated::reset();
    Case test(precision, 24);
    test.compare({0, 2, 3}, Kind::tree, tiny::restless(3, 6), 16, specrt::name_of(precision));
    CHECK(test.accepted > 0);
  }
}

// Weights as wgmma reads them, and threads in another order.
TEST(cuda_decoder_same_bytes_on_another_architecture) {
  if (tiny::kThinned) return;
  emulated::reset();
  emulated::settings().architecture = 90;
  emulated::settings().order = specrt::simt::Order::shuffled;
  Case test(Precision::bf16, 25);
  test.compare({0, 1, 2}, Kind::tree, tiny::fixed(4), 16, "sm_90");
  CHECK(test.accepted > 0);
  emulated::reset();
}

// Prompts that begin alike share blocks, which are copied before they are written.
TEST(cuda_decoder_shares_prefixes) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 26));
  const std::int64_t vocab = model.config().vocab_size;
  Request request = greedy(vocab);
  request.prompt = tiny::random_tokens(9, 22, vocab);
  request.params.max_tokens = 6;
  Decoder decoder(model, cuda_options(model, 2, 4));
  const Output first = tiny::run(decoder, {request}, tiny::fixed(0))[0];
  const Output again = tiny::run(decoder, {request}, tiny::fixed(0))[0];
  CHECK(again.counters.cached_prompt_tokens > 0);
  CHECK(first.tokens == again.tokens);
}

// What it chooses is what the CPU finds best, or as good as best.
TEST(cuda_decoder_agrees_with_the_cpu) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 27));
  const Request request = greedy(model.config().vocab_size);
  Decoder decoder(model, cuda_options(model));
  const Output out = tiny::run(decoder, {request}, tiny::fixed(0))[0];
  const tiny::Tokens text = tiny::joined(request.prompt, out.tokens);

  specrt::RunnerOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 24;
  specrt::Runner cpu(model, options);
  const specrt::cpu::FpMode mode;
  cpu.cache().add(0, std::ssize(text));
  cpu.begin();
  (void)cpu.add_committed(0, text);
  cpu.forward();
  for (std::size_t t = 0; t < out.tokens.size(); ++t) {
    const auto row = static_cast<std::int64_t>(request.prompt.size() + t) - 1;
    const std::span<const float> logits = cpu.logits({&row, 1});
    const float best = *std::max_element(logits.begin(), logits.end());
    CHECK_NEAR(logits[static_cast<std::size_t>(out.tokens[t])], best, 0.15);
  }
}

// A draft model on the device, and the target's own first layers.
TEST(cuda_decoder_with_models_that_draft) {
  emulated::reset();
  Case test(Precision::bf16, 28);
  specrt::DraftModelOptions draft;
  draft.max_batch_size = 2;
  draft.max_rows = 64;
  draft.threads = 1;
  draft.device = "cuda";
  draft.kv_cache_bytes = std::int64_t{1} << 20;
  const std::int64_t vocab = test.model.config().vocab_size;
  const auto models = {specrt::make_model_drafter(test.model, vocab, draft),
                       specrt::make_layers_drafter(test.model, 1)};
  std::int64_t number = 0;
  for (const auto& drafter : models) {
    std::vector<Request> batch = {test.requests[0], test.requests[1]};
    for (Request& one : batch) one.drafter = drafter;
    Decoder decoder(test.model, cuda_options(test.model, 2));
    const std::vector<Output> outputs = tiny::run(decoder, batch, tiny::fixed(3));
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK_EQ(tiny::difference(outputs[i], test.plain[i]), "");
      // A draft model that is the target guesses every token of it.
      if (number == 0) CHECK_EQ(outputs[i].counters.first_rejections, 0);
      CHECK(outputs[i].counters.drafted > 0);
    }
    ++number;
    if (tiny::kThinned) return;
  }
}

// A round brings its verdicts back in one copy, and takes no memory once it has run before.
TEST(cuda_decoder_round_is_one_copy_back) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 29));
  const std::int64_t vocab = model.config().vocab_size;
  DecoderOptions options = cuda_options(model, 3);
  options.check_invariants = false;
  Decoder decoder(model, options);
  std::vector<Request> requests = {greedy(vocab), seeded(vocab), fussy(vocab)};
  for (const Request& request : requests) {
    specrt::SamplingParams params = request.params;
    params.max_tokens = 60;
    params.stop_token_ids.clear();
    (void)decoder.add(request.prompt, params);
  }
  for (int i = 0; i < 3; ++i) (void)decoder.round(specrt::plan_fixed(decoder, 0));
  const emulated::Counts before = emulated::counts();
  constexpr std::int64_t kRounds = 10;
  for (int i = 0; i < kRounds; ++i) (void)decoder.round(specrt::plan_fixed(decoder, 0));
  const emulated::Counts& after = emulated::counts();
  CHECK_EQ(after.to_host - before.to_host, kRounds);
  CHECK_EQ(after.to_device - before.to_device, 2 * kRounds);  // the pass, and what decides
  CHECK_EQ(after.graph_launches - before.graph_launches, 2 * kRounds);
  CHECK_EQ(after.captures, before.captures);
  CHECK_EQ(after.allocations, before.allocations);
  // Kernels of a round: by layer 8 or, where a product's k is split, a few more.
  CHECK((after.launches - before.launches) / kRounds < 40);
}

// Passes of every size: few graphs, and those that are not there run all the same.
TEST(cuda_decoder_graphs_are_bounded) {
  emulated::reset();
  using Key = std::int64_t;
  specrt::CudaGraphs<Key> graphs;
  const specrt::cuda::OwnStream stream;
  const specrt::cuda::DeviceBuffer at(8);
  std::int64_t runs = 0;
  const auto work = [&](specrt::cuda::Stream on) {
    ++runs;
    specrt::cuda::fill(at.data(), 1, 8, on);
  };
  for (int turn = 0; turn < 3; ++turn) {
    for (Key key = 0; key < 20; ++key) graphs.run(key, stream.get(), work);
  }
  CHECK_EQ(graphs.size(), 20u);
  CHECK_EQ(runs, 40);  // each once by itself and once to capture it
  CHECK_EQ(emulated::counts().captures, 20);
  CHECK_EQ(emulated::counts().graph_launches, 40);
  for (Key key = 100; key < 200; ++key) graphs.run(key, stream.get(), work);
  CHECK_EQ(graphs.size(), specrt::CudaGraphs<Key>::kMost);
  // A capture that fails leaves nothing, and the stream goes on.
  const auto fails = [&](specrt::cuda::Stream) { throw specrt::InternalError("no"); };
  graphs.run(199, stream.get(), work);
  CHECK_THROWS(graphs.run(198, stream.get(), fails), specrt::InternalError, "");
  graphs.run(198, stream.get(), work);
  specrt::cuda::synchronize(stream.get());
}

// A batch of two and drafts of 7 and 8: rows that no graph was made for.
TEST(cuda_decoder_with_passes_of_odd_sizes) {
  emulated::reset();
  Case test(Precision::bf16, 30);
  for (const std::int64_t gamma : {7, 8}) {
    test.compare({0, 1}, Kind::half, tiny::fixed(gamma), 16, "two");
    if (tiny::kThinned) return;
    test.compare({1}, Kind::half, tiny::fixed(gamma), 16, "one");
  }
}

TEST(cuda_decoder_nan_ends_one_request) {
  emulated::reset();
  // Token 5's embedding is no number: whoever reads it fails, and nobody else.
  tiny::Spec spec = tiny::small_spec(Precision::bf16, 31);
  tiny::Tensors tensors = tiny::random_tensors(spec);
  for (std::int64_t i = 0; i < spec.hidden; ++i) tensors["embedding"][5 * spec.hidden + i] = NAN;
  const Model model = tiny::build(tiny::config_of(spec), spec.dtype, tensors);
  Request good = greedy(spec.vocab);
  for (TokenId& token : good.prompt) token = token == 5 ? 6 : token;
  good.params.logit_bias = {{5, -100.0f}};
  Request bad = good;
  bad.prompt.back() = 5;
  const Output alone = tiny::run_alone(model, cuda_options(model), good, tiny::fixed(0));
  Decoder decoder(model, cuda_options(model));
  std::vector<Request> both = {bad, good};
  const std::vector<Output> out = tiny::run(decoder, both, tiny::fixed(0));
  CHECK(out[0].finish == specrt::Finish::error);
  CHECK(out[0].error.find("finite") != std::string::npos);
  CHECK_EQ(tiny::difference(out[1], alone), "");
}

TEST(cuda_decoder_out_of_memory_is_survived) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 32));
  const DecoderOptions options = cuda_options(model);
  const specrt::MemoryUse use = specrt::memory_of(model.config(), model.precision(), options);
  {
    Decoder decoder(model, options);
    CHECK_EQ(decoder.memory().weights, use.weights);
    CHECK_EQ(decoder.memory().kv_cache, use.kv_cache);
    CHECK_EQ(decoder.memory().workspace, use.workspace);
    // All but the filling-up of pages is told.
    CHECK(emulated::in_use() >= use.total() && emulated::in_use() < use.total() + 8 * 4096);
  }
  CHECK_EQ(emulated::in_use(), 0);
  emulated::settings().memory = use.total() / 2;
  try {
    Decoder decoder(model, options);
    check::fail(__FILE__, __LINE__, "there is memory where there is none");
  } catch (const specrt::CapacityError& error) {
    CHECK(std::string(error.what()).find("can go on") != std::string::npos);
  }
  CHECK_EQ(emulated::in_use(), 0);
  emulated::settings().memory = 2 * use.total();
  const Request request = greedy(model.config().vocab_size);
  CHECK_EQ(std::ssize(tiny::run_alone(model, options, request, tiny::fixed(0)).tokens), kTokens);

  // A request that needs more than is left is refused, and the others go on.
  Decoder decoder(model, options);
  (void)decoder.add(request.prompt, request.params);
  emulated::settings().memory = emulated::in_use();
  Request large = fussy(model.config().vocab_size);
  for (int i = 0; i < 2000; ++i) large.params.bad_words.push_back({1, 2, 3});
  CHECK_THROWS(decoder.add(large.prompt, large.params), specrt::CapacityError, "");
  std::int64_t tokens = 0;
  while (!decoder.idle()) {
    for (const specrt::Progress& p : decoder.round(specrt::plan_fixed(decoder, 0))) {
      tokens += std::ssize(p.tokens);
    }
  }
  CHECK_EQ(tokens, kTokens);
  emulated::reset();
}

TEST(cuda_decoder_lost_device_says_so) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 33));
  const Request request = greedy(model.config().vocab_size);
  {
    Decoder decoder(model, cuda_options(model));
    (void)decoder.add(request.prompt, request.params);
    (void)decoder.round(specrt::plan_fixed(decoder, 0));
    emulated::settings().fail_at = emulated::counts().launches + 5;
    for (int i = 0; i < 2; ++i) {
      try {
        (void)decoder.round(specrt::plan_fixed(decoder, 0));
        check::fail(__FILE__, __LINE__, "a device that failed goes on");
      } catch (const specrt::DeviceError& error) {
        CHECK(!error.usable());
        CHECK(std::string(error.what()).find("cannot use the device") != std::string::npos);
      }
    }
  }
  emulated::reset();
}

TEST(cuda_decoder_refuses_by_name) {
  emulated::reset();
  const auto refused = [](Precision precision, const std::string& word,
                          const std::function<void(DecoderOptions&)>& change) {
    const Model model = tiny::random_model(tiny::small_spec(precision, 34));
    DecoderOptions options = cuda_options(model);
    change(options);
    for (const bool planned : {true, false}) {
      try {
        if (planned) {
          (void)specrt::memory_of(model.config(), model.precision(), options);
        } else {
          Decoder decoder(model, options);
        }
        check::fail(__FILE__, __LINE__, word + " is not refused");
      } catch (const specrt::UnsupportedError& error) {
        if (std::string(error.what()).find(word) == std::string::npos) {
          check::fail(__FILE__, __LINE__, error.what());
        }
      }
    }
  };
  const auto nothing = [](DecoderOptions&) {};
  refused(Precision::f32, "dtype", nothing);
  refused(Precision::w8a8, "dtype", nothing);
  refused(Precision::bf16, "kv_cache_dtype", [](DecoderOptions& o) { o.kv_cache_dtype = "int8"; });
  refused(Precision::bf16, "kv_cache_dtype", [](DecoderOptions& o) { o.kv_cache_dtype = "fp16"; });
  refused(Precision::f16, "kv_cache_dtype", [](DecoderOptions& o) { o.kv_cache_dtype = "bf16"; });
  refused(Precision::bf16, "block_size", [](DecoderOptions& o) { o.block_size = 12; });

  CHECK(!specrt::cuda_device_of("cpu").has_value());
  CHECK_EQ(specrt::cuda_device_of("cuda").value(), 0);
  CHECK_EQ(specrt::cuda_device_of("cuda:12").value(), 12);
  for (const char* const wrong : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda1", ""}) {
    CHECK_THROWS(specrt::cuda_device_of(wrong), specrt::InvalidArgument, "");
  }
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 34));
  DecoderOptions options = cuda_options(model);
  options.device = "cuda:1";
  CHECK_THROWS(Decoder(model, options), specrt::InvalidArgument, "");
}

}  // namespace
