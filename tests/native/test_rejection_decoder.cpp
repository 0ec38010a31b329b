#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>

#include "check.h"
#include "reference/rejection.h"
#include "specrt/decoder.h"
#include "tiny_model.h"

// The law that comes out of a whole Decoder whose draft model has quite another one: temperature
// and filters included, every position of a round.

namespace {

using Table = std::vector<std::vector<float>>;
using specrt::Verification;
using specrt::reference::Law;
using specrt::reference::law_of_model;
using specrt::reference::Text;

constexpr int kVocab = 5;
constexpr double kTemperature = 0.6;
constexpr std::int64_t kTopK = 4;

Table table(double shift) {
  Table out(kVocab, std::vector<float>(kVocab));
  for (int last = 0; last < kVocab; ++last) {
    for (int next = 0; next < kVocab; ++next) {
      out[static_cast<std::size_t>(last)][static_cast<std::size_t>(next)] =
          static_cast<float>(1.2 * std::sin(1.7 * last + 2.3 * next + shift));
    }
  }
  return out;
}

// Temperature, then the kTopK most likely: what the sampler's definition says.
Law warped(const std::vector<float>& logits) {
  std::vector<double> order(logits.begin(), logits.end());
  std::sort(order.begin(), order.end(), std::greater<>());
  Law law;
  double sum = 0.0;
  for (const float x : logits) {
    const bool kept = double{x} >= order[kTopK - 1];
    law.push_back(kept ? std::exp(double{x} / kTemperature) : 0.0);
    sum += law.back();
  }
  for (double& value : law) value /= sum;
  return law;
}

/// The target's and the draft model's have the same fields for this.
template <typename Options>
Options options_of(int batch) {
  Options options;
  options.kv_cache_bytes = 1 << 20;
  options.max_model_len = 16;
  options.max_batch_size = batch;
  options.max_rows = 128;
  options.block_size = 4;
  options.threads = 1;
  return options;
}

struct Outcome {
  std::map<Text, std::int64_t> counts;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
};

Outcome run(Verification verification, std::int64_t draws) {
  constexpr int kBatch = 32;
  const specrt::Model target = tiny::bigram_model(table(0.0));
  const specrt::Model draft = tiny::bigram_model(table(0.9));
  specrt::Decoder decoder(target, options_of<specrt::DecoderOptions>(kBatch));
  const auto drafter =
      specrt::make_model_drafter(draft, kVocab, options_of<specrt::DraftModelOptions>(kBatch));
  specrt::SamplingParams params;
  params.max_tokens = 4;
  params.temperature = kTemperature;
  params.top_k = kTopK;
  params.verification = verification;
  Outcome outcome;
  const std::vector<specrt::TokenId> prompt = {2};
  for (std::int64_t done = 0; done < draws; done += kBatch) {
    std::map<specrt::SequenceId, Text> texts;
    for (int i = 0; i < kBatch; ++i) {
      params.seed = static_cast<std::uint64_t>(done + i);
      texts[decoder.add(prompt, params, drafter)] = {};
    }
    while (!decoder.idle()) {
      for (const specrt::Progress& p : decoder.round(specrt::plan_fixed(decoder, 2))) {
        CHECK_EQ(p.error, std::string());
        for (const specrt::TokenId token : p.tokens) texts[p.id].push_back(token);
        if (p.finish != specrt::Finish::none) {
          outcome.drafted += p.counters->drafted;
          outcome.accepted += p.counters->accepted;
        }
      }
    }
    for (const auto& [id, text] : texts) ++outcome.counts[text];
  }
  return outcome;
}

std::int64_t draw_count() { return tiny::kThinned ? 1600 : 64000; }

}  // namespace

TEST(rejection_through_a_draft_model_keeps_the_law) {
  const Table logits = table(0.0);
  const specrt::reference::Model target = [&](const Text& text) {
    return warped(logits[static_cast<std::size_t>(text.empty() ? 2 : text.back())]);
  };
  const auto law = law_of_model(target, 4);
  for (const Verification verification : {Verification::rejection, Verification::block}) {
    const Outcome outcome = run(verification, draw_count());
    CHECK(outcome.accepted * 10 > outcome.drafted * 3);
    CHECK(outcome.drafted - outcome.accepted > outcome.drafted / 10);
    double statistic = 0.0;
    double degrees = -1.0;
    for (const auto& [text, probability] : law) {
      if (probability > 0.0) degrees += 1.0;
    }
    for (const auto& [text, count] : outcome.counts) {
      const auto found = law.find(text);
      CHECK(found != law.end() && found->second > 0.0);
      const double expected = found->second * static_cast<double>(draw_count());
      statistic +=
          2.0 * static_cast<double>(count) * std::log(static_cast<double>(count) / expected);
    }
    CHECK(statistic < degrees + 5.0 * std::sqrt(2.0 * degrees));
  }
}

TEST(rejection_accepts_more_than_coupled_and_block_no_less) {
  const auto rate = [](const Outcome& outcome) {
    return static_cast<double>(outcome.accepted) / static_cast<double>(outcome.drafted);
  };
  const std::int64_t draws = tiny::kThinned ? 1600 : 16000;
  const double coupled = rate(run(Verification::coupled, draws));
  const double rejection = rate(run(Verification::rejection, draws));
  const double block = rate(run(Verification::block, draws));
  CHECK(rejection > coupled);
  CHECK(block > rejection - 0.01);
}

TEST(rejection_repeats_whatever_the_batch) {
  const Outcome once = run(Verification::rejection, 320);
  const Outcome again = run(Verification::rejection, 320);
  CHECK(once.counts == again.counts);
  CHECK_EQ(once.accepted, again.accepted);
}

TEST(rejection_refuses_drafts_that_it_cannot_judge) {
  // The request that drafted so ends with an error; the one beside it goes on.
  class Bad : public specrt::Drafter {
   public:
    explicit Bad(bool tree) : tree_(tree) {}
    const std::string& name() const override { return name_; }
    void admit(specrt::SequenceId, std::span<const specrt::TokenId>, std::int64_t) override {}
    void propose(std::span<const specrt::DraftRequest> requests,
                 std::span<specrt::DraftTree> out) override {
      for (std::size_t i = 0; i < requests.size(); ++i) {
        out[i].add(1, specrt::DraftTree::kRoot);
        if (tree_) {
          out[i].add(2, specrt::DraftTree::kRoot);
        } else {
          out[i].set_draw(specrt::Draw::without_replacement);  // and no distribution
        }
      }
    }
    void observe(specrt::SequenceId, std::span<const specrt::TokenId>) override {}
    void release(specrt::SequenceId) override {}
    specrt::MemoryUse memory() const override { return {}; }

   private:
    bool tree_;
    std::string name_ = "bad";
  };
  specrt::Decoder decoder(tiny::bigram_model(table(0.0)), options_of<specrt::DecoderOptions>(2));
  specrt::SamplingParams params;
  params.max_tokens = 6;
  params.temperature = 1.0;
  const std::vector<specrt::TokenId> prompt = {2};
  for (const auto& [verification, tree, text] :
       {std::tuple{Verification::block, true, "a chain"},
        std::tuple{Verification::block, false, "probabilities"},
        std::tuple{Verification::rejection, false, "probabilities"}}) {
    params.verification = verification;
    const specrt::SequenceId bad = decoder.add(prompt, params, std::make_shared<Bad>(tree));
    const specrt::SequenceId good = decoder.add(prompt, params);
    std::map<specrt::SequenceId, specrt::Finish> ends;
    while (!decoder.idle()) {
      for (const specrt::Progress& p : decoder.round(specrt::plan_fixed(decoder, 2))) {
        if (p.finish != specrt::Finish::none) ends[p.id] = p.finish;
        if (p.id == bad && p.finish == specrt::Finish::error) {
          CHECK(p.error.find(text) != std::string::npos);
        }
      }
    }
    CHECK(ends[bad] == specrt::Finish::error);
    CHECK(ends[good] == specrt::Finish::length);
  }
}
