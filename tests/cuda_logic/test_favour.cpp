// The tokens that the target's noise favours, on the device, against the race that the CPU's
// Chooser runs over the same rows.

#include <cmath>
#include <limits>

#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "kernels/favour.h"
#include "model/cuda_sampling.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;
using specrt::Chooser;
using specrt::SamplingParams;
using specrt::TokenId;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<SamplingParams> all_params() {
  std::vector<SamplingParams> out(12);
  for (std::size_t i = 1; i < out.size(); ++i) {
    SamplingParams& p = out[i];
    p.temperature = i % 3 == 0 ? 1.8 : i % 3 == 1 ? 1.0 : 0.6;
    p.seed = 0x9E3779B97F4A7C15u * i;
    p.sample_index = static_cast<std::uint32_t>(i / 3);
    if (i % 4 == 2 || i == 11) p.top_k = i == 10 ? 3 : 40;
    if (i % 4 == 3) p.top_p = i == 3 ? 0.2 : 0.9;
    if (i % 5 == 4 || i == 11) p.min_p = 0.02;
  }
  return out;  // the first one is greedy
}

struct Asked {
  std::int64_t vocab;
  std::int32_t count;
  bool raw = false;
  bool mapped = false;
};

// Rows of logits, the last ones without numbers, and what they come to.
class Rows {
 public:
  explicit Rows(const Asked& asked) : asked_(asked), params_(all_params()) {
    stride_ = asked.vocab + 5;
    const auto sequences = static_cast<std::int32_t>(params_.size());
    for (std::int32_t i = 0; i < 2 * sequences + 3; ++i) {
      rows_.push_back({(i * 5 + 1) % sequences, -1, 3 + 2 * i, -1});
    }
    rows_[4].sequence = -1;
    for (const SamplingParams& p : params_) states_.push_back(specrt::sampling_state(p));
    logits_ = random_floats(rows_.size() * static_cast<std::size_t>(stride_), 23, 3.0f);
    for (std::size_t i = 0; i < logits_.size(); ++i) {
      if (i / static_cast<std::size_t>(stride_) % 2 == 1) {
        logits_[i] = std::round(logits_[i] * 2.0f) / 2.0f;  // many equal ones
      }
    }
    float* const first = row(5);  // two tokens that may come at all
    for (std::int64_t id = 0; id < asked.vocab; ++id) {
      if (id != 1 && id + 2 != asked.vocab) first[id] = -kInfinity;
    }
    row(6)[asked.vocab / 2] = NAN;
    row(7)[asked.vocab - 1] = kInfinity;
    std::fill_n(row(8), asked.vocab, -kInfinity);
    for (std::int64_t id = 0; asked.mapped && id < asked.vocab; ++id) {
      map_.push_back(static_cast<std::int32_t>(id + id / 3));
    }
    likely_.resize(rows_.size() * static_cast<std::size_t>(asked.count));
    for (std::size_t i = 0; i < likely_.size(); ++i) {
      likely_[i] = {static_cast<std::int32_t>(i), -0.25f * static_cast<float>(i)};
    }
    scores_.assign(likely_.size(), NAN);
  }

  void run(Order order) {
    const auto count = std::ssize(rows_);
    const std::int64_t chunks = chunks_of(asked_.vocab);
    std::vector<ChunkTop> tops(static_cast<std::size_t>(count * chunks));
    std::vector<ChunkShare> shares(tops.size());
    std::vector<std::int32_t> found(static_cast<std::size_t>(count * asked_.vocab), -1);
    std::vector<Cut> cuts(rows_.size(), {0xFFFFFFFFu, 0});
    std::vector<FavouredToken> favoured(tops.size() * static_cast<std::size_t>(asked_.count));
    Floats sums(tops.size(), NAN);
    FavourArgs args;
    args.choose.logits = logits_.data();
    args.choose.stride = stride_;
    args.choose.vocab = asked_.vocab;
    args.choose.chunks = chunks;
    args.choose.rows = rows_.data();
    args.choose.states = states_.data();
    args.choose.tops = tops.data();
    args.choose.shares = shares.data();
    args.choose.found = found.data();
    args.target_of_draft = asked_.mapped ? map_.data() : nullptr;
    args.count = asked_.count;
    args.raw = asked_.raw;
    args.cuts = cuts.data();
    args.found = favoured.data();
    args.sums = sums.data();
    args.out = likely_.data();
    args.scores = scores_.data();
    run_grid<FindTops>({chunks, count}, args.choose, order);
    run_grid<Weigh>({chunks, count}, args.choose, order);
    run_grid<FindCuts>({count}, args, order);
    run_grid<FavourInChunk>({chunks, count}, args, order);
    run_grid<Favour>({count}, args, order);
  }

  void check() {
    const specrt::cpu::FpMode mode;
    const std::int64_t target_vocab = asked_.mapped ? map_.back() + 1 : asked_.vocab;
    Chooser chooser(specrt::cpu::scalar_kernels(), target_vocab);
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      const std::size_t at = r * static_cast<std::size_t>(asked_.count);
      const auto left_alone = [&](std::size_t i) {
        return likely_[i].id == static_cast<std::int32_t>(i) &&
               likely_[i].value == -0.25f * static_cast<float>(i);
      };
      const std::int32_t sequence = rows_[r].sequence;
      if (sequence <= 0) {
        for (std::size_t i = at; i < at + static_cast<std::size_t>(asked_.count); ++i) {
          CHECK(left_alone(i));
          CHECK(sequence < 0 ? std::isnan(scores_[i]) : scores_[i] == likely_[i].value);
        }
        continue;
      }
      std::vector<Chooser::Pick> picks;
      const SamplingParams& p = params_[static_cast<std::size_t>(sequence)];
      Floats target(static_cast<std::size_t>(target_vocab), -kInfinity);
      for (std::int64_t id = 0; id < asked_.vocab; ++id) target[in_target(id)] = row(r)[id];
      if (r < 6 || r > 8) {
        const auto found = chooser.ranked(target, p, rows_[r].position, asked_.count);
        picks.assign(found.begin(), found.end());
        CHECK(!picks.empty());
      }
      double shares = 0.0;
      for (const Chooser::Pick& one : picks) shares += picks.front().key / one.key;
      for (std::size_t n = 0; n < static_cast<std::size_t>(asked_.count); ++n) {
        const LikelyToken& got = likely_[at + n];
        if (n >= picks.size()) {
          CHECK_EQ(got.id, -1);
          CHECK_EQ(got.value, -kInfinity);
          CHECK_EQ(scores_[at + n], -kInfinity);
          continue;
        }
        CHECK(got.id >= 0);
        if (got.id < 0) continue;
        const Chooser::Pick& want = picks[n];
        CHECK_EQ(static_cast<TokenId>(in_target(got.id)), want.token);
        const float log_prob = asked_.raw ? chooser.logprob(target, want.token) : want.log_prob;
        CHECK_NEAR(got.value, log_prob, 2e-5 * std::max(1.0f, std::fabs(log_prob)));
        const double share = std::log(picks.front().key / want.key / shares);
        CHECK_NEAR(scores_[at + n], share, 2e-5 * std::max(1.0, std::fabs(share)));
      }
    }
  }

  const std::vector<LikelyToken>& likely() const { return likely_; }
  const Floats& scores() const { return scores_; }

 private:
  float* row(std::size_t r) { return logits_.data() + static_cast<std::int64_t>(r) * stride_; }
  std::size_t in_target(std::int64_t id) const {
    return static_cast<std::size_t>(asked_.mapped ? map_[static_cast<std::size_t>(id)] : id);
  }

  Asked asked_;
  std::vector<SamplingParams> params_;
  std::int64_t stride_ = 0;
  std::vector<LogitRow> rows_;
  std::vector<SamplingState> states_;
  Floats logits_;
  std::vector<std::int32_t> map_;
  std::vector<LikelyToken> likely_;
  Floats scores_;
};

}  // namespace

TEST(cuda_favours_what_wins_the_targets_race) {
  for (const Asked& asked : {Asked{4097, 1, true}, Asked{4097, 10}, Asked{777, 64},
                             Asked{8192, 3, false, true}, Asked{90, 64, true, true}, Asked{5, 4}}) {
    Rows rows(asked);
    rows.run(Order::forward);
    rows.check();
    Rows again(asked);
    again.run(Order::shuffled);
    CHECK(same_bits(again.likely(), rows.likely()));
    CHECK(same_bits(again.scores(), rows.scores()));
  }
}
