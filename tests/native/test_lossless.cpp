// Speculation changes no byte of what comes out: ids, logprobs and how it ended.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "model/runner.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::CpuIsa;
using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::Finish;
using specrt::Model;
using specrt::Precision;
using specrt::SamplingParams;
using tiny::Kind;
using tiny::Output;
using tiny::Planner;
using tiny::Request;
using tiny::Tokens;

constexpr std::int64_t kLongest = 160;

/// Requests of unequal length: greedy, sampled, filtered in every way, and one that stops.
std::vector<Request> mixed_requests(std::int64_t vocab) {
  std::vector<Request> requests(7);
  const std::size_t prompts[] = {5, 33, 1, 16, 47, 12, 20};
  const std::int64_t max_tokens[] = {70, 40, 24, 90, 30, 18, 50};
  for (std::size_t i = 0; i < 7; ++i) {
    requests[i].prompt = tiny::random_tokens(100 + i, prompts[i], vocab);
    SamplingParams& params = requests[i].params;
    params.max_tokens = max_tokens[i];
    params.logprobs = 3;
    params.seed = 1000 + i * i;
  }
  // A prompt that repeats itself gives lookups something to find.
  Tokens& repeated = requests[3].prompt;
  for (std::size_t i = 8; i < repeated.size(); ++i) repeated[i] = repeated[i - 8];
  requests[1].params.temperature = 0.8;
  requests[2].params.temperature = 1.3;
  requests[2].params.top_k = 12;
  requests[4].params.temperature = 0.7;
  requests[4].params.top_p = 0.9;
  requests[4].params.sample_index = 3;
  requests[5].params.temperature = 1.0;
  requests[5].params.min_p = 0.05;
  requests[5].params.logprobs = -1;
  requests[6].params.temperature = 0.9;
  requests[6].params.top_k = 20;
  requests[6].params.top_p = 0.95;
  requests[6].params.min_p = 0.01;
  requests[6].params.logprobs = 0;
  return requests;
}

/// Prompts that fill their first segment of attention while they decode, or have filled it.
std::vector<Request> long_requests(std::int64_t vocab) {
  std::vector<Request> requests = mixed_requests(vocab);
  const std::size_t prompts[] = {505, 470, 1010, 500, 540, 3, 511};
  for (std::size_t i = 0; i < 7; ++i) {
    requests[i].prompt = tiny::random_tokens(200 + i, prompts[i], vocab);
    requests[i].params.max_tokens = 30 + 10 * static_cast<std::int64_t>(i % 3);
  }
  return requests;
}

DecoderOptions options_for(const Model& model, CpuIsa isa, int block_size, int threads,
                           const std::string& kv_cache_dtype = "auto",
                           std::int64_t longest = kLongest) {
  DecoderOptions options = tiny::options_for(model, 7, longest, block_size, kv_cache_dtype);
  options.cpu_isa = specrt::name_of(isa);
  options.threads = threads;
  return options;
}

/// Counts what the drafts of many runs came to.
class Tally {
 public:
  void add(const std::vector<Output>& outputs) {
    for (const Output& output : outputs) {
      drafted_ += output.counters.drafted;
      accepted_ += output.counters.accepted;
    }
  }
  void add(const std::vector<Request>& requests) {
    for (const Request& request : requests) {
      const auto* scripted = dynamic_cast<const tiny::ScriptedDrafter*>(request.drafter.get());
      if (scripted == nullptr) continue;
      later_siblings_ += scripted->stats().later_siblings;
      CHECK_EQ(scripted->open(), 0u);
    }
  }
  // A test whose drafts are all rejected, or all accepted, shows nothing.
  void check() const {
    const std::string text = std::to_string(accepted_) + " of " + std::to_string(drafted_) +
                             " accepted, " + std::to_string(later_siblings_) + " later siblings";
    if (accepted_ * 100 < drafted_ * 30 || (drafted_ - accepted_) * 100 < drafted_ * 10 ||
        accepted_ == 0 || later_siblings_ < 10) {
      check::fail(__FILE__, __LINE__, text);
    }
  }

 private:
  std::int64_t drafted_ = 0;
  std::int64_t accepted_ = 0;
  std::int64_t later_siblings_ = 0;
};

/// A model of one level and precision with its requests and what plain decoding makes of them,
/// each request by itself.
class Case {
 public:
  Case(CpuIsa isa, const tiny::Spec& spec, const std::string& kv_cache_dtype = "auto",
       bool far = false)
      : isa_(isa),
        model_(tiny::random_model(spec)),
        kv_cache_dtype_(kv_cache_dtype),
        longest_(far ? 1100 : kLongest),
        requests_(far ? long_requests(spec.vocab) : mixed_requests(spec.vocab)) {
    const DecoderOptions options = options_for(model_, isa, 16, 1, kv_cache_dtype_, longest_);
    Decoder decoder(model_, options);
    const auto plain = [&](const Request& request) {
      return tiny::run(decoder, {request}, tiny::fixed(0))[0];
    };
    // One request ends at a stop token: one that its text holds somewhere in the middle.
    const Output free = plain(requests_[0]);
    for (std::size_t i = 20; i < free.tokens.size(); ++i) {
      if (std::find(free.tokens.begin(), free.tokens.begin() + static_cast<std::ptrdiff_t>(i),
                    free.tokens[i]) == free.tokens.begin() + static_cast<std::ptrdiff_t>(i)) {
        requests_[0].params.stop_token_ids = {free.tokens[i]};
        break;
      }
    }
    for (const Request& request : requests_) {
      plain_.push_back(plain(request));
      texts_.push_back(tiny::joined(request.prompt, plain_.back().tokens));
    }
  }

  const Model& model() const { return model_; }
  const std::vector<Request>& requests() const { return requests_; }
  const std::vector<Output>& plain() const { return plain_; }

  /// Runs the chosen requests, each with its kind of drafter, and compares.
  void compare(const std::vector<std::size_t>& chosen, const std::vector<Kind>& kinds,
               int block_size, int threads, const Planner& planner, Tally& tally,
               const std::string& what, int spread_arrivals = 0) {
    std::vector<Request> requests;
    for (std::size_t k = 0; k < chosen.size(); ++k) {
      Request request = requests_[chosen[k]];
      request.drafter =
          tiny::make_drafter(kinds[k], {texts_[chosen[k]]}, model_.config().vocab_size);
      request.arrival = static_cast<int>(k) * spread_arrivals;
      requests.push_back(std::move(request));
    }
    Decoder decoder(model_,
                    options_for(model_, isa_, block_size, threads, kv_cache_dtype_, longest_));
    CHECK(decoder.cpu_isa() == isa_);
    CHECK_EQ(decoder.threads(), threads);
    const std::vector<Output> outputs = tiny::run(decoder, requests, planner);
    for (std::size_t k = 0; k < chosen.size(); ++k) {
      const std::string text = tiny::difference(outputs[k], plain_[chosen[k]]);
      if (!text.empty()) {
        check::fail(__FILE__, __LINE__,
                    std::string(specrt::name_of(isa_)) + " " + specrt::name_of(model_.precision()) +
                        ", " + what + ", request " + std::to_string(chosen[k]) + ", block size " +
                        std::to_string(block_size) + ", threads " + std::to_string(threads) + ": " +
                        text);
      }
    }
    tally.add(outputs);
    tally.add(requests);
  }

 private:
  CpuIsa isa_;
  Model model_;
  std::string kv_cache_dtype_;
  std::int64_t longest_;
  std::vector<Request> requests_;
  std::vector<Output> plain_;
  std::vector<Tokens> texts_;
};

std::vector<std::pair<CpuIsa, Precision>> levels() {
  std::vector<std::pair<CpuIsa, Precision>> all;
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    for (const Precision dtype :
         {Precision::f32, Precision::bf16, Precision::int8, Precision::int4, Precision::w8a8}) {
      all.emplace_back(isa, dtype);
    }
  }
  return all;
}

constexpr int kBlockSizes[] = {1, 4, 16};
constexpr std::int64_t kGammas[] = {1, 3, 8, 64};
const std::vector<std::size_t> kEveryRequest{0, 1, 2, 3, 4, 5, 6};

}  // namespace

// One request at a time: every drafter, every draft length, greedy and sampled.
TEST(lossless_alone) {
  for (const auto& [isa, dtype] : levels()) {
    Case test(isa, tiny::small_spec(dtype, 11));
    Tally tally;
    std::size_t number = 0;
    for (const Kind kind : tiny::kDrafters) {
      for (const std::int64_t gamma : kGammas) {
        for (const int threads : {1, 2}) {
          for (const int block_size : kBlockSizes) {
            ++number;
            if (tiny::kThinned && number % 7 != 0) continue;
            for (const std::size_t request : {number % 2 * 3, 1 + number % 5}) {
              test.compare({request}, {kind}, block_size, threads, tiny::fixed(gamma), tally,
                           "drafter " + std::to_string(static_cast<int>(kind)) + ", draft length " +
                               std::to_string(gamma));
            }
          }
        }
      }
    }
    tally.check();
  }
}

// Seven at once, with all drafters and none side by side: every drafter meets every request.
TEST(lossless_batch_of_seven) {
  constexpr Kind kinds[] = {Kind::none, Kind::ngram, Kind::oracle, Kind::half,
                            Kind::tree, Kind::bushy, Kind::wrong};
  for (const auto& [isa, dtype] : levels()) {
    Case test(isa, tiny::small_spec(dtype, 12));
    Tally tally;
    std::size_t number = 0;
    for (std::size_t turn = 0; turn < 7; ++turn) {
      std::vector<Kind> chosen;
      for (std::size_t k = 0; k < 7; ++k) chosen.push_back(kinds[(turn + k) % 7]);
      for (const std::int64_t gamma : kGammas) {
        for (const int threads : {1, 2}) {
          ++number;
          if (tiny::kThinned && number % 3 != 0) continue;
          test.compare(kEveryRequest, chosen, kBlockSizes[(turn + number) % 3], threads,
                       tiny::fixed(gamma), tally,
                       "turn " + std::to_string(turn) + ", draft length " + std::to_string(gamma));
        }
      }
    }
    tally.check();
  }
}

// Another node budget every round, prompts in pieces while others decode, late arrivals.
TEST(lossless_whatever_the_plan) {
  constexpr Kind kinds[] = {Kind::oracle, Kind::bushy, Kind::tree,  Kind::none,
                            Kind::half,   Kind::ngram, Kind::oracle};
  for (const auto& [isa, dtype] : levels()) {
    Case test(isa, tiny::small_spec(dtype, 13));
    Tally tally;
    for (std::size_t seed = 0; seed < (tiny::kThinned ? 2 : 6); ++seed) {
      std::vector<Kind> chosen;
      for (std::size_t k = 0; k < 7; ++k) chosen.push_back(kinds[(seed + k) % 7]);
      test.compare(kEveryRequest, chosen, kBlockSizes[seed % 3], 1 + static_cast<int>(seed % 2),
                   tiny::restless(seed, seed % 2 == 0 ? 6 : 20), tally,
                   "seed " + std::to_string(seed), static_cast<int>(seed % 3) * 2);
    }
    tally.check();
  }
}

// Every pair of logits at the top is a tie, or nearly one.
TEST(lossless_where_the_top_is_close) {
  for (const auto& [isa, dtype] : levels()) {
    for (const double gap : {0.0, 1e-7, 0.004}) {
      tiny::Spec spec = tiny::small_spec(dtype, 14);
      spec.twins = true;
      spec.twin_gap = gap;
      Case test(isa, spec);
      Tally tally;
      // The tree's first wrong sibling is the token beside the right one.
      for (const Kind kind : {Kind::tree, Kind::oracle, Kind::half}) {
        test.compare(kEveryRequest, std::vector<Kind>(7, kind), 4, 1, tiny::fixed(8), tally,
                     "gap " + std::to_string(gap));
      }
      tally.check();
      if (gap > 0.0) continue;
      const Output& greedy = test.plain()[3];
      for (std::size_t i = 0; i < greedy.tokens.size(); ++i) {
        // Of two equal logits the lower id wins and ranks first.
        CHECK_EQ(greedy.tokens[i] % 2, 0);
        CHECK_EQ(greedy.logprobs[i].rank, 1);
        CHECK_EQ(greedy.logprobs[i].top[0].first, greedy.tokens[i]);
        if (greedy.tokens[i] == 60) continue;  // the last id has no twin
        CHECK_EQ(greedy.logprobs[i].top[1].first, greedy.tokens[i] + 1);
        CHECK_EQ(greedy.logprobs[i].top[1].second, greedy.logprobs[i].logprob);
      }
    }
  }
}

// Keys and values in another precision than the weights.
TEST(lossless_with_any_kv_cache) {
  for (const auto& [isa, dtype] : levels()) {
    const char* const other = dtype == Precision::f32 ? "bfloat16" : "float32";
    for (const char* const kv_cache_dtype : {other, "int8"}) {
      Case test(isa, tiny::small_spec(dtype, 17), kv_cache_dtype);
      Tally tally;
      std::size_t number = 0;
      for (const Kind kind : {Kind::half, Kind::tree, Kind::bushy, Kind::ngram}) {
        ++number;
        test.compare(kEveryRequest, std::vector<Kind>(7, kind), kBlockSizes[number % 3],
                     1 + static_cast<int>(number % 2), tiny::fixed(3 * number), tally,
                     kv_cache_dtype);
        test.compare(kEveryRequest, std::vector<Kind>(7, kind), 4, 2, tiny::restless(number, 9),
                     tally, kv_cache_dtype);
      }
      tally.check();
    }
  }
}

// Segments of attention end under a draft, under a chunk of a prompt, and far behind.
TEST(lossless_across_segments) {
  for (const auto& [isa, dtype] : levels()) {
    if (tiny::kThinned && isa != specrt::best_cpu_isa()) continue;
    for (const char* const kv_cache_dtype : {"auto", "int8"}) {
      tiny::Spec spec = tiny::small_spec(dtype, 18);
      spec.max_positions = 1200;
      Case test(isa, spec, kv_cache_dtype, true);
      Tally tally;
      std::size_t number = 0;
      for (const Kind kind : {Kind::half, Kind::bushy, Kind::tree}) {
        ++number;
        if (tiny::kThinned && kind == Kind::tree) continue;
        test.compare(kEveryRequest, std::vector<Kind>(7, kind), kBlockSizes[number % 3],
                     static_cast<int>(number), tiny::fixed(9), tally, kv_cache_dtype);
        for (const std::size_t request : {0, 2, 6}) {
          test.compare({request}, {kind}, 16, 1 + static_cast<int>(number % 2), tiny::fixed(12),
                       tally, kv_cache_dtype);
        }
      }
      tally.check();
    }
  }
}

// A shared drafter, and a pass too small for all the rows that are asked for.
TEST(lossless_in_tight_passes) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 15);
  Case test(specrt::best_cpu_isa(), spec);
  std::vector<Tokens> texts;
  for (std::size_t i = 0; i < 7; ++i) {
    texts.push_back(tiny::joined(test.requests()[i].prompt, test.plain()[i].tokens));
  }
  for (const int max_rows : {7, 8, 20, 67}) {
    Tally tally;
    const auto shared = tiny::make_scripted(Kind::tree, texts, spec.vocab);
    std::vector<Request> requests = test.requests();
    for (Request& request : requests) request.drafter = shared;
    DecoderOptions options = options_for(test.model(), specrt::best_cpu_isa(), 4, 1);
    options.max_rows = max_rows;
    Decoder decoder(test.model(), options);
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(5));
    for (std::size_t i = 0; i < 7; ++i) {
      CHECK_EQ(tiny::difference(outputs[i], test.plain()[i]), "");
    }
    tally.add(outputs);
    tally.add({requests[0]});
    tally.check();
  }
}

// Every logprob that came out of rounds is that of the whole text run through the model at once.
TEST(lossless_against_teacher_forcing) {
  for (const auto& [isa, dtype] : levels()) {
    Case test(isa, tiny::small_spec(dtype, 16));
    std::vector<Request> requests = test.requests();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].params.logprobs = 3;
      requests[i].drafter =
          tiny::make_drafter(i % 2 == 0 ? Kind::tree : Kind::half,
                             {tiny::joined(requests[i].prompt, test.plain()[i].tokens)},
                             test.model().config().vocab_size);
    }
    Decoder decoder(test.model(), options_for(test.model(), isa, 4, 1));
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::restless(3, 9));
    specrt::RunnerOptions runner_options;
    runner_options.kv_cache_bytes = std::int64_t{1} << 30;
    runner_options.cpu_isa = specrt::name_of(isa);
    runner_options.team = std::make_shared<specrt::ThreadTeam>(1);
    specrt::Runner runner(test.model(), runner_options);
    specrt::Chooser chooser(runner.kernels(), test.model().config().vocab_size);
    const specrt::cpu::FpMode mode;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Tokens text = tiny::joined(requests[i].prompt, outputs[i].tokens);
      runner.cache().add(0, std::ssize(text));
      runner.begin();
      (void)runner.add_committed(0, text);
      runner.forward();
      Output forced = outputs[i];
      for (std::size_t t = 0; t < forced.tokens.size(); ++t) {
        const auto row = static_cast<std::int64_t>(requests[i].prompt.size() + t) - 1;
        const auto logits = runner.logits({&row, 1});
        forced.tokens[t] = chooser.choose(logits, requests[i].params, row + 1);
        chooser.logprobs(logits, forced.tokens[t], 3, forced.logprobs[t]);
      }
      CHECK_EQ(tiny::difference(outputs[i], forced), "");
      runner.cache().remove(0);
    }
  }
}
