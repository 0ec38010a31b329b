// The best logits without the logits.

#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/dispatch.h"
#include "model/runner.h"
#include "tiny_decode.h"
#include "tiny_model.h"

using specrt::CpuIsa;
using specrt::Precision;
using specrt::Runner;

namespace {

void compare(CpuIsa isa, const tiny::Spec& spec, int threads) {
  const specrt::Model model = tiny::random_model(spec);
  specrt::RunnerOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 30;
  options.cpu_isa = specrt::name_of(isa);
  options.team = std::make_shared<specrt::ThreadTeam>(threads);
  Runner runner(model, options);
  const specrt::cpu::FpMode mode;
  const tiny::Tokens text = tiny::random_tokens(50, 50, spec.vocab);
  runner.cache().add(0, std::ssize(text));
  runner.begin();
  (void)runner.add_committed(0, text);
  runner.forward();
  for (const std::int64_t count : {1, 2, 17, 50}) {
    std::vector<std::int64_t> rows;
    for (std::int64_t i = 0; i < count; ++i) rows.push_back((i * 7) % 50);
    const auto logits = runner.logits(rows);
    const std::vector<float> all(logits.begin(), logits.end());
    const auto best = runner.best(rows);
    CHECK_EQ(std::ssize(best), count);
    const auto vocab = static_cast<std::ptrdiff_t>(spec.vocab);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto row = all.begin() + i * vocab;
      const auto at = std::max_element(row, row + vocab);  // the first of equals
      CHECK(best[i].finite);
      CHECK_EQ(best[i].index, at - row);
      CHECK_EQ(best[i].value, *at);
    }
    for (const std::int64_t wanted : {1, 3, 10}) {
      const auto top = runner.top(rows, wanted);
      CHECK_EQ(std::ssize(top), count * wanted);
      for (std::int64_t i = 0; i < count; ++i) {
        const float* row = all.data() + i * vocab;
        std::vector<std::int32_t> ids(static_cast<std::size_t>(vocab));
        for (std::size_t id = 0; id < ids.size(); ++id) ids[id] = static_cast<std::int32_t>(id);
        std::stable_sort(ids.begin(), ids.end(),
                         [&](std::int32_t a, std::int32_t b) { return row[a] > row[b]; });
        for (std::int64_t j = 0; j < wanted; ++j) {
          CHECK_EQ(top[i * wanted + j].token, ids[static_cast<std::size_t>(j)]);
          CHECK_EQ(top[i * wanted + j].logit, row[ids[static_cast<std::size_t>(j)]]);
        }
      }
    }
  }
}

}  // namespace

TEST(head_best_and_top_are_those_of_the_logits) {
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    for (const int threads : {1, 3}) {
      for (const Precision precision : {Precision::f32, Precision::bf16, Precision::int4}) {
        for (const std::int64_t vocab : {11, 96, 700}) {
          tiny::Spec spec = tiny::small_spec(precision, 21);
          spec.vocab = vocab;
          compare(isa, spec, threads);
        }
      }
    }
  }
}

// Equal logits go to the lower id, wherever the threads' shares end.
TEST(head_best_prefers_the_lower_id) {
  tiny::Spec spec = tiny::small_spec(Precision::f32, 22);
  spec.vocab = 400;
  tiny::Tensors tensors = tiny::random_tensors(spec);
  const specrt::ModelConfig config = tiny::config_of(spec);
  std::vector<float>& head = tensors.at(config.tied_embeddings ? "embedding" : "lm_head");
  for (std::size_t id = 1; id < 400; ++id) {
    std::copy_n(head.begin(), spec.hidden,
                head.begin() + static_cast<std::ptrdiff_t>(id) * spec.hidden);
  }
  const specrt::Model model = tiny::build(config, Precision::f32, tensors);
  for (const int threads : {1, 2, 4}) {
    specrt::RunnerOptions options;
    options.kv_cache_bytes = std::int64_t{1} << 30;
    options.team = std::make_shared<specrt::ThreadTeam>(threads);
    Runner runner(model, options);
    const specrt::cpu::FpMode mode;
    runner.cache().add(0, 3);
    runner.begin();
    (void)runner.add_committed(0, tiny::Tokens{1, 2, 3});
    runner.forward();
    const std::int64_t row = 2;
    CHECK_EQ(runner.best(std::span(&row, 1))[0].index, 0);
    const auto top = runner.top(std::span(&row, 1), 5);
    for (int i = 0; i < 5; ++i) CHECK_EQ(top[i].token, i);
  }
}
