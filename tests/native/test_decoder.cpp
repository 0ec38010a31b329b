// Ends of sequences, limits, plans and capacity. Most run the counter model, whose every output
// is known by arithmetic.

#include <algorithm>
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

using specrt::CapacityError;
using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Drafter;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::DType;
using specrt::Finish;
using specrt::InvalidArgument;
using specrt::Model;
using specrt::SamplingParams;
using specrt::TokenId;
using tiny::Kind;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

constexpr std::int64_t kVocab = 64;

/// start, start + 1, ...
Tokens counting(TokenId start, std::size_t size) {
  Tokens tokens(size);
  for (std::size_t i = 0; i < size; ++i) {
    tokens[i] = static_cast<TokenId>((static_cast<std::size_t>(start) + i) % kVocab);
  }
  return tokens;
}

std::shared_ptr<tiny::ScriptedDrafter> counting_drafter(Kind kind, TokenId start) {
  return tiny::make_scripted(kind, {counting(start, 400)}, kVocab);
}

Request counting_request(TokenId start, std::int64_t max_tokens, Kind kind = Kind::oracle) {
  Request request;
  request.prompt = {start};
  request.params.max_tokens = max_tokens;
  request.params.logprobs = 1;
  if (kind != Kind::none) request.drafter = counting_drafter(kind, start);
  return request;
}

const Model& counter() {
  static const Model model = tiny::counter_model(kVocab);
  return model;
}

Output run_counter(const Request& request, std::int64_t gamma) {
  return tiny::run_alone(counter(), tiny::options_for(counter(), 1, 300, 4), request,
                         tiny::fixed(gamma));
}

}  // namespace

TEST(float16_is_refused_on_the_cpu) {
  const Model half = tiny::random_model(tiny::small_spec(specrt::Precision::f16));
  const Model model = tiny::random_model(tiny::small_spec());
  DecoderOptions options = tiny::options_for(half, 1, 32);
  CHECK_THROWS(Decoder(half, options), specrt::UnsupportedError, "on the CPU, got float16");
  CHECK_THROWS(specrt::memory_of(half.config(), half.precision(), options),
               specrt::UnsupportedError, "on the CPU, got float16");
  options = tiny::options_for(model, 1, 32);
  options.kv_cache_dtype = "float16";
  CHECK_THROWS(Decoder(model, options), specrt::UnsupportedError, "kv_cache_dtype");
  CHECK_THROWS(specrt::memory_of(model.config(), model.precision(), options),
               specrt::UnsupportedError, "kv_cache_dtype");
}

TEST(decoder_counts) {
  const Output output = run_counter(counting_request(3, 20, Kind::none), 0);
  CHECK(output.tokens == counting(4, 20));
  CHECK(output.finish == Finish::length);
  CHECK_EQ(output.counters.rounds, 19);
  CHECK_EQ(output.counters.drafted, 0);
}

// The stop token at every index of an accepted run, and as the very first token.
TEST(decoder_stops_inside_an_accepted_run) {
  for (const Kind kind : {Kind::oracle, Kind::tree, Kind::none}) {
    for (TokenId stop = 2; stop <= 12; ++stop) {
      Request request = counting_request(1, 40, kind);
      request.params.stop_token_ids = {0, stop, 63};
      const Output output = run_counter(request, 6);
      CHECK(output.finish == Finish::stop);
      CHECK(output.tokens == counting(2, static_cast<std::size_t>(stop - 1)));
      CHECK_EQ(output.logprobs.size(), output.tokens.size());
      if (kind != Kind::oracle || stop == 2) continue;
      // The prefill gives 2; rounds give 3 to 9, then 10 to 16.
      const std::int64_t in_round = stop <= 9 ? stop - 3 : stop - 10;
      CHECK_EQ(output.counters.accepted, stop <= 9 ? in_round : 6 + in_round);
      CHECK_EQ(output.counters.truncated_rounds, 1);
      CHECK_EQ(output.counters.full_rounds, stop <= 9 ? 0 : 1);
      CHECK_EQ(output.counters.drafted, stop <= 9 ? 6 : 12);
    }
  }
}

// A stop that was drafted and not chosen stops nothing.
TEST(decoder_goes_on_past_a_rejected_stop) {
  Request request = counting_request(1, 100);
  request.params.stop_token_ids = {0};
  request.params.max_tokens = 50;
  request.drafter = std::make_shared<tiny::ScriptedDrafter>(
      "stops", std::vector<Tokens>(),
      [](const DraftRequest&, std::span<const TokenId>, DraftTree& tree) {
        tree.add(0, tree.add(0, DraftTree::kRoot));
      });
  const Output output = run_counter(request, 4);
  CHECK(output.finish == Finish::length);
  CHECK(output.tokens == counting(2, 50));
  CHECK_EQ(output.counters.accepted, 0);
}

TEST(decoder_stop_and_length_in_one_round) {
  for (const auto& [stop, finish, size] :
       {std::tuple{TokenId{4}, Finish::stop, 3}, std::tuple{TokenId{8}, Finish::length, 5},
        std::tuple{TokenId{6}, Finish::stop, 5}}) {
    for (const std::int64_t gamma : {0, 1, 6}) {
      Request request = counting_request(1, 5);
      request.params.stop_token_ids = {stop};
      const Output output = run_counter(request, gamma);
      CHECK(output.finish == finish);
      CHECK(output.tokens == counting(2, static_cast<std::size_t>(size)));
    }
  }
}

TEST(decoder_max_tokens_is_exact) {
  for (const std::int64_t max_tokens : {0, 1, 2, 3, 5, 6, 7, 13}) {
    for (const Kind kind : {Kind::none, Kind::oracle, Kind::tree, Kind::wrong}) {
      const Output output = run_counter(counting_request(1, max_tokens, kind), 5);
      CHECK(output.finish == Finish::length);
      CHECK(output.tokens == counting(2, static_cast<std::size_t>(max_tokens)));
      if (kind == Kind::oracle) {
        // Nothing is drafted that could not be used.
        CHECK_EQ(output.counters.drafted, output.counters.accepted);
        CHECK_EQ(output.counters.accepted + output.counters.rounds,
                 std::max<std::int64_t>(0, max_tokens - 1));
      }
    }
  }
}

// A drafter is never asked for more than can be used, and not at all where nothing can.
TEST(decoder_asks_for_no_more_than_fits) {
  std::vector<std::pair<std::int64_t, std::int64_t>> asked;  // tokens so far, depth
  Request request = counting_request(1, 12);
  request.drafter = std::make_shared<tiny::ScriptedDrafter>(
      "records", std::vector<Tokens>(),
      [&](const DraftRequest& r, std::span<const TokenId>, DraftTree& tree) {
        asked.emplace_back(std::ssize(r.tokens), r.max_depth);
        CHECK(r.max_depth >= 1 && r.max_depth <= r.max_nodes && r.max_nodes == 8);
        for (std::int64_t i = 0; i < r.max_depth; ++i) {
          tree.add(0, static_cast<std::int32_t>(i) - 1);
        }
      });
  const Output output = run_counter(request, 8);
  CHECK(output.tokens == counting(2, 12));
  for (const auto& [length, depth] : asked) {
    CHECK_EQ(depth, std::min<std::int64_t>(8, 13 - length - 1));
  }
  CHECK_EQ(asked.size(), 10u);  // 11 rounds, and the last can use no draft
}

TEST(decoder_context_edge) {
  tiny::Spec spec = tiny::small_spec();
  spec.max_positions = 64;
  const Model model = tiny::random_model(spec);
  for (const int block_size : {1, 4, 16}) {
    DecoderOptions options = tiny::options_for(model, 1, 32, block_size);
    options.max_model_len = 32;  // below the model's own
    specrt::DraftModelOptions draft_options;
    draft_options.kv_cache_bytes = 1 << 22;
    draft_options.threads = 1;
    for (std::size_t size = 26; size <= 31; ++size) {
      Request request;
      request.prompt = tiny::random_tokens(size, size, spec.vocab);
      request.params.max_tokens = 1000;
      request.params.logprobs = 0;
      const Output plain = tiny::run_alone(model, options, request, tiny::fixed(0));
      CHECK_EQ(plain.tokens.size(), 32 - size);
      CHECK(plain.finish == Finish::length);
      const Tokens text = tiny::joined(request.prompt, plain.tokens);
      std::vector<std::shared_ptr<Drafter>> drafters;
      for (const Kind kind : tiny::kDrafters) {
        drafters.push_back(tiny::make_drafter(kind, {text}, spec.vocab));
      }
      drafters.push_back(specrt::make_model_drafter(model, spec.vocab, draft_options));
      for (const auto& drafter : drafters) {
        request.drafter = drafter;
        const Output output = tiny::run_alone(model, options, request, tiny::fixed(5));
        CHECK_EQ(tiny::difference(output, plain), "");
      }
    }
    Decoder decoder(model, options);
    CHECK_EQ(decoder.max_model_len(), 32);
    CHECK_THROWS(decoder.add(Tokens(32, 1), {}), InvalidArgument,
                 "[prompt] expected fewer tokens than max_model_len = 32, got 32");
  }
}

// One row at a stop, one at max_tokens, one at the context limit, one without a draft, and one
// whose draft of 64 is all accepted, in one round.
TEST(decoder_every_end_in_one_round) {
  for (const specrt::Precision dtype : {specrt::Precision::f32, specrt::Precision::bf16}) {
    tiny::Spec spec = tiny::small_spec(dtype, 21);
    const Model model = tiny::random_model(spec);
    std::vector<Request> requests(5);
    for (std::size_t i = 0; i < 5; ++i) {
      const std::size_t size = i == 2 ? 256 - 15 : 3 + 9 * i;
      requests[i].prompt = tiny::random_tokens(50 + i, size, spec.vocab);
      requests[i].params.max_tokens = i == 1 ? 20 : 100;
      requests[i].params.logprobs = 3;
      requests[i].params.temperature = i % 2 == 0 ? 0.9 : 0.0;
      requests[i].params.seed = i;
    }
    DecoderOptions options = tiny::options_for(model, 5, 256, 4);
    options.threads = 2;
    Output first = tiny::run_alone(model, options, requests[0], tiny::fixed(0));
    std::size_t stop = 9;
    const auto seen_before = [&](std::size_t i) {
      const auto end = first.tokens.begin() + static_cast<std::ptrdiff_t>(i);
      return std::find(first.tokens.begin(), end, first.tokens[i]) != end;
    };
    while (seen_before(stop)) ++stop;
    requests[0].params.stop_token_ids = {first.tokens[stop]};

    std::vector<Output> plain;
    for (std::size_t i = 0; i < 5; ++i) {
      requests[i].drafter = nullptr;
      plain.push_back(tiny::run_alone(model, options, requests[i], tiny::fixed(0)));
      if (i != 3) {
        requests[i].drafter = tiny::make_scripted(
            Kind::oracle, {tiny::joined(requests[i].prompt, plain[i].tokens)}, spec.vocab);
      }
    }
    Decoder decoder(model, options);
    std::vector<specrt::SequenceId> ids;
    for (const Request& request : requests) {
      ids.push_back(decoder.add(request.prompt, request.params, request.drafter));
    }
    const std::int64_t none_left = decoder.free_kv_tokens();
    for (bool more = true; more;) {
      more = false;
      for (const auto& state : decoder.sequences()) more = more || state.prompt_left > 0;
      if (more) {
        specrt::Plan prefill;
        std::int64_t rows = decoder.max_rows();
        for (const auto& state : decoder.sequences()) {
          if (state.prompt_left == 0 || rows == 0) continue;
          const std::int64_t chunk = std::min(rows, state.prompt_left);
          prefill.push_back({state.id, chunk});
          rows -= chunk;
        }
        (void)decoder.round(prefill);
      }
    }
    const auto progress = decoder.round(specrt::plan_fixed(decoder, 64));
    CHECK_EQ(progress.size(), 5u);
    CHECK(progress[0].finish == Finish::stop);
    CHECK_EQ(progress[0].tokens.size(), stop);
    CHECK(progress[1].finish == Finish::length);
    CHECK_EQ(progress[1].tokens.size(), 19u);
    CHECK(progress[2].finish == Finish::length);
    CHECK_EQ(progress[2].tokens.size(), 14u);
    CHECK(progress[3].finish == Finish::none);
    CHECK_EQ(progress[3].tokens.size(), 1u);
    CHECK(progress[4].finish == Finish::none);
    CHECK_EQ(progress[4].tokens.size(), 65u);
    CHECK_EQ(progress[4].counters->accepted, 64);
    CHECK(decoder.free_kv_tokens() > none_left);
    while (!decoder.idle()) (void)decoder.round(specrt::plan_fixed(decoder, 64));

    // And from end to end.
    Decoder again(model, options);
    for (std::size_t i = 0; i < 5; ++i) {
      if (i != 3) {
        requests[i].drafter = tiny::make_scripted(
            Kind::oracle, {tiny::joined(requests[i].prompt, plain[i].tokens)}, spec.vocab);
      }
    }
    const std::vector<Output> outputs = tiny::run(again, requests, tiny::fixed(64));
    for (std::size_t i = 0; i < 5; ++i) CHECK_EQ(tiny::difference(outputs[i], plain[i]), "");
  }
}

TEST(decoder_max_tokens_zero_beside_others) {
  Decoder decoder(counter(), tiny::options_for(counter(), 2, 100));
  const auto none = decoder.add(Tokens{5}, counting_request(5, 0).params);
  const auto some = decoder.add(Tokens{1}, counting_request(1, 2).params);
  // It need not even be planned.
  const auto progress = decoder.round({{some, 1}});
  CHECK_EQ(progress.size(), 2u);
  CHECK_EQ(progress[0].id, none);
  CHECK(progress[0].finish == Finish::length && progress[0].tokens.empty());
  CHECK_EQ(progress[0].counters->tokens, 0);
  CHECK_EQ(progress[1].tokens[0], 2);
}

TEST(decoder_refuses_bad_requests) {
  const DecoderOptions options = tiny::options_for(counter(), 2, 100);
  Decoder decoder(counter(), options);
  const std::int64_t free = decoder.free_kv_tokens();
  SamplingParams params;
  CHECK_THROWS(decoder.add({}, params), InvalidArgument, "[prompt] expected at least one token");
  CHECK_THROWS(decoder.add(Tokens{64}, params), InvalidArgument, "ids in [0, 64), got 64");
  CHECK_THROWS(decoder.add(Tokens{-1}, params), InvalidArgument, "got -1");
  params.top_p = 0;
  CHECK_THROWS(decoder.add(Tokens{1}, params), InvalidArgument, "[top_p]");
  CHECK_THROWS(decoder.check(Tokens{1}, params), InvalidArgument, "[top_p]");
  CHECK(decoder.idle());
  CHECK_EQ(decoder.free_kv_tokens(), free);
  CHECK_THROWS(decoder.cancel(0), InvalidArgument, "[sequence]");
  CHECK_THROWS(decoder.stop(0, 0), InvalidArgument, "[sequence]");
  CHECK_THROWS(specrt::plan_fixed(decoder, -1), InvalidArgument, "[num_speculative_tokens]");
}

TEST(decoder_refuses_bad_options) {
  const DecoderOptions good = tiny::options_for(counter(), 2, 100);
  const auto refuse = [&](auto change, const char* text) {
    DecoderOptions options = good;
    change(options);
    CHECK_THROWS(Decoder(counter(), options), specrt::Error, text);
    CHECK_THROWS(specrt::memory_of(counter().config(), counter().precision(), options),
                 specrt::Error, text);
  };
  refuse([](DecoderOptions& o) { o.kv_cache_bytes = 0; }, "[kv_cache_bytes]");
  refuse([](DecoderOptions& o) { o.kv_cache_bytes = 100; }, "[kv_cache_bytes] expected at least");
  refuse([](DecoderOptions& o) { o.max_model_len = 513; }, "[max_model_len] expected from 1 to");
  refuse([](DecoderOptions& o) { o.max_model_len = -1; }, "[max_model_len]");
  refuse([](DecoderOptions& o) { o.max_batch_size = 0; }, "[max_batch_size]");
  refuse([](DecoderOptions& o) { o.max_rows = 1; }, "[max_rows]");
  refuse([](DecoderOptions& o) { o.block_size = 0; }, "[block_size]");
  refuse([](DecoderOptions& o) { o.kv_cache_dtype = "fp8"; }, "[kv_cache_dtype] expected");
  DecoderOptions options = good;
  options.cpu_isa = "avx1024";
  CHECK_THROWS(Decoder(counter(), options), InvalidArgument, "avx1024");
  CHECK_THROWS(Decoder(Model(), good), InvalidArgument, "[decoder] expected a loaded model");
  for (const char* const kv_cache_dtype : {"auto", "float32", "fp32", "bfloat16", "bf16", "int8"}) {
    const DecoderOptions one = tiny::options_for(counter(), 2, 100, 16, kv_cache_dtype);
    const specrt::MemoryUse told =
        specrt::memory_of(counter().config(), counter().precision(), one);
    const specrt::MemoryUse taken = Decoder(counter(), one).memory();
    CHECK_EQ(told.weights, taken.weights);
    CHECK_EQ(told.kv_cache, taken.kv_cache);
    CHECK_EQ(told.workspace, taken.workspace);
    CHECK_EQ(taken.kv_cache, one.kv_cache_bytes);
  }
}

// What a token takes: two vectors a head and layer, and their scales.
TEST(decoder_kv_cache_bytes_by_dtype) {
  const specrt::ModelConfig& config = counter().config();
  const std::int64_t vectors = 2 * config.num_layers * config.num_kv_heads;
  const auto bytes = [&](const char* kv_cache_dtype, specrt::Precision dtype) {
    DecoderOptions options;
    options.kv_cache_dtype = kv_cache_dtype;
    const auto of = [&](std::int64_t tokens) {
      return specrt::kv_cache_bytes_for(config, dtype, options, 1, tokens);
    };
    return of(32) - of(16);
  };
  CHECK_EQ(bytes("float32", specrt::Precision::bf16), 16 * vectors * config.head_dim * 4);
  CHECK_EQ(bytes("bf16", specrt::Precision::f32), 16 * vectors * config.head_dim * 2);
  CHECK_EQ(bytes("int8", specrt::Precision::f32), 16 * vectors * (config.head_dim + 4));
  CHECK_EQ(bytes("auto", specrt::Precision::f32), bytes("fp32", specrt::Precision::f32));
  CHECK_EQ(bytes("auto", specrt::Precision::bf16), bytes("bfloat16", specrt::Precision::bf16));
  CHECK_EQ(specrt::resolve_kv_cache_dtype("auto", specrt::DType::bf16), "bfloat16");
  CHECK_EQ(specrt::resolve_kv_cache_dtype("fp32", specrt::DType::bf16), "float32");
  for (const char* const name : {"", "int4", "fp8_e5m2", "Int8"}) {
    CHECK_THROWS(specrt::resolve_kv_cache_dtype(name, specrt::DType::f32), InvalidArgument,
                 "[kv_cache_dtype]");
  }
}

TEST(decoder_refuses_bad_plans_and_changes_nothing) {
  DecoderOptions options = tiny::options_for(counter(), 2, 100);
  options.max_rows = 8;
  Decoder decoder(counter(), options);
  const Request request = counting_request(1, 30);
  const auto a = decoder.add(request.prompt, request.params, request.drafter);
  const auto b = decoder.add(request.prompt, request.params);
  CHECK_THROWS(decoder.finish_round(), InvalidArgument, "[finish_round]");
  const auto progress = decoder.round({{a, 1}, {b, 1}});
  CHECK_EQ(progress.size(), 2u);
  const std::int64_t free = decoder.free_kv_tokens();
  CHECK_THROWS(decoder.begin_round({{a, 0}, {99, 0}}), InvalidArgument, "got 99");
  CHECK_THROWS(decoder.begin_round({{a, 0}, {a, 0}}), InvalidArgument, "twice");
  CHECK_THROWS(decoder.begin_round({{a, -1}}), InvalidArgument, "[plan]");
  CHECK_THROWS(decoder.begin_round({{a, 7}, {b, 0}}), InvalidArgument, "max_rows = 8 rows, got 9");
  // What the last round said can still be read, and no round is open.
  CHECK_EQ(progress[0].tokens[0], 2);
  CHECK_EQ(decoder.free_kv_tokens(), free);
  CHECK_THROWS(decoder.finish_round(), InvalidArgument, "[finish_round]");
  decoder.begin_round({{a, 6}, {b, 0}});
  CHECK_THROWS(decoder.begin_round({}), InvalidArgument, "[begin_round]");
  CHECK_THROWS(decoder.cancel(a), InvalidArgument, "[cancel]");
  CHECK_THROWS(decoder.stop(a, 0), InvalidArgument, "[stop]");
  const auto next = decoder.finish_round();
  CHECK(Tokens(next[0].tokens.begin(), next[0].tokens.end()) == counting(3, 7));
  CHECK(Tokens(next[1].tokens.begin(), next[1].tokens.end()) == counting(3, 1));
  CHECK(decoder.round({}).empty());
  decoder.check_invariants();
}

TEST(decoder_capacity) {
  // Room for 16 tokens in all.
  DecoderOptions options = tiny::options_for(counter(), 4, 4, 4);
  Decoder decoder(counter(), options);
  CHECK_EQ(decoder.free_kv_tokens(), 16);
  SamplingParams params;
  params.max_tokens = 17;
  // 1 + 17 tokens need 17 places: the last token's K/V are never needed.
  CHECK_THROWS(decoder.add(Tokens{1}, params), CapacityError,
               "[kv_cache_bytes] expected room for 17 tokens of this request, got 16");
  CHECK_THROWS(decoder.check(Tokens{1}, params), CapacityError, "[kv_cache_bytes]");
  CHECK(!decoder.can_add(1, 17));
  CHECK(decoder.can_add(1, 16));
  params.max_tokens = 16;
  const auto first = decoder.add(Tokens{1}, params);
  CHECK_EQ(decoder.free_kv_tokens(), 0);
  params.max_tokens = 1;
  CHECK(!decoder.can_add(1, 1));
  CHECK_THROWS(decoder.add(Tokens{1}, params), CapacityError, "[kv cache]");
  // It runs to its end in a pool that is exactly full, and then the next is served.
  while (!decoder.idle()) (void)decoder.round(specrt::plan_fixed(decoder, 0));
  CHECK_EQ(decoder.free_kv_tokens(), 16);
  CHECK_THROWS(decoder.cancel(first), InvalidArgument, "[sequence]");
  for (int i = 0; i < 4; ++i) (void)decoder.add(Tokens{1}, params);
  CHECK_THROWS(decoder.add(Tokens{1}, params), CapacityError, "[max_batch_size]");
  CHECK(!decoder.can_add(1, 0));
}

// The accepted path crosses block edges up to the last slot of a pool that is exactly full.
TEST(decoder_accepts_across_the_last_block_edge) {
  for (const int block_size : {1, 3, 4, 16}) {
    for (std::int64_t max_tokens = 14; max_tokens <= 34; ++max_tokens) {
      Request request = counting_request(1, max_tokens, Kind::tree);
      const DecoderOptions options = tiny::options_for(counter(), 1, max_tokens, block_size);
      for (const std::int64_t gamma : {3, 64}) {
        request.drafter = counting_drafter(gamma == 3 ? Kind::oracle : Kind::tree, 1);
        const Output output = tiny::run_alone(counter(), options, request, tiny::fixed(gamma));
        CHECK(output.tokens == counting(2, static_cast<std::size_t>(max_tokens)));
      }
    }
  }
}
