// What choosing one token costs, by what the request asks for: microseconds a row, and how many
// times the pass of exponentials that every sampled row needs.
//
//   bench_sampling [isa ...]      default: every available level but scalar

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "bench_support.h"
#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "decode/logits_state.h"
#include "specrt/constraint.h"

namespace {

using namespace specrt;

constexpr int kRepeats = 60;

/// Lower quartile: what a call takes when nothing else ran meanwhile.
template <typename Call>
double microseconds(const Call& call) {
  std::vector<double> times;
  for (int i = 0; i < kRepeats; ++i) {
    const double start = bench::now();
    call(i);
    times.push_back((bench::now() - start) * 1e6);
  }
  return bench::quartile(times);
}

/// One token in eight may come next, as after a schema's opening quote.
class EveryEighth final : public TokenConstraint {
 public:
  void fill_bitmask(std::span<std::uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0x01010101u);
  }
  void advance(TokenId) override {}
  bool finished() const override { return false; }
  std::int64_t accepts(std::span<const TokenId> tokens) override { return std::ssize(tokens); }
  std::unique_ptr<TokenConstraint> fork() const override { return std::make_unique<EveryEighth>(); }
};

void measure(const cpu::Kernels& kernels, std::int64_t vocab, bool flat) {
  std::mt19937 engine(7);
  // Peaked as a model's rows are: a wide bulk, and a few tokens well above it.
  std::normal_distribution<float> normal(0.0f, flat ? 1.0f : 2.5f);
  std::vector<float> logits(static_cast<std::size_t>(vocab));
  for (float& x : logits) x = normal(engine);
  if (!flat) {
    for (int i = 0; i < 40; ++i) {
      logits[engine() % logits.size()] = 16.0f - 0.15f * static_cast<float>(i);
    }
  }
  std::vector<TokenId> prompt;
  for (int i = 0; i < 2000; ++i) prompt.push_back(static_cast<TokenId>(engine() % logits.size()));
  Chooser chooser(kernels, vocab);
  const auto row = [&](const char* name, const SamplingParams& params,
                       std::shared_ptr<TokenConstraint> constraint, double unit) {
    LogitsState state(params, prompt, vocab, std::move(constraint));
    std::int64_t sum = 0;
    const double time = microseconds([&](int i) {
      sum += chooser.choose(chooser.processed(logits, state, state.constraint()), params, i);
    });
    std::printf("%-7s %6d %-6s %-22s %8.1f us  %5.2f exp  (%lld)\n", kernels.name,
                static_cast<int>(vocab), flat ? "flat" : "peaked", name, time, time / unit,
                static_cast<long long>(sum));
  };
  std::vector<float> weights(logits.size());
  const float top = *std::max_element(logits.begin(), logits.end());
  const double unit = microseconds(
      [&](int) { kernels.exp_weights(logits.data(), vocab, top, 1.25f, weights.data()); });
  SamplingParams params;
  row("greedy", params, nullptr, unit);
  params.temperature = 0.8;
  params.seed = 11;
  row("temperature", params, nullptr, unit);
  const SamplingParams sampled = params;
  params.top_k = 50;
  row("top_k 50", params, nullptr, unit);
  params.top_k = 5000;
  row("top_k 5000", params, nullptr, unit);
  params = sampled;
  params.top_p = 0.9;
  row("top_p 0.9", params, nullptr, unit);
  params.top_k = 50;
  row("top_k 50, top_p 0.9", params, nullptr, unit);
  params = sampled;
  params.min_p = 0.05;
  row("min_p 0.05", params, nullptr, unit);
  params = SamplingParams();
  params.repetition_penalty = 1.1;
  params.frequency_penalty = 0.2;
  row("penalties, greedy", params, nullptr, unit);
  row("penalties, mask", params, std::make_shared<EveryEighth>(), unit);
  params = sampled;
  params.logprobs = 5;
  TokenLogprobs told;
  const double time = microseconds([&](int i) { chooser.logprobs(logits, i, 5, told); });
  std::printf("%-7s %6d %-6s %-22s %8.1f us  %5.2f exp\n", kernels.name, static_cast<int>(vocab),
              flat ? "flat" : "peaked", "logprobs 5", time, time / unit);
}

}  // namespace

int main(int argc, char** argv) {
  const cpu::FpMode mode;
  std::vector<CpuIsa> isas;
  for (int i = 1; i < argc; ++i) isas.push_back(cpu_isa_from_name(argv[i]));
  if (isas.empty()) {
    for (const CpuIsa isa : available_cpu_isas()) {
      if (isa == CpuIsa::avx2 || isa == CpuIsa::avx512) isas.push_back(isa);
    }
  }
  for (const CpuIsa isa : isas) {
    for (const std::int64_t vocab : {49152, 151936}) {
      for (const bool flat : {false, true}) measure(cpu::kernels_of(isa), vocab, flat);
    }
  }
  return 0;
}
