// Passes of a Runner over the emulated device: against the definition in double precision, against
// the CPU's Runner, and row for row the same bits however rows come together.

#include <cmath>
#include <cstring>

#include "../native/check.h"
#include "../native/tiny_model.h"
#include "../native/tiny_oracle.h"
#include "cpu/dispatch.h"
#include "emulated/emulated.h"
#include "model/runner.h"

namespace {

using specrt::DraftTree;
using specrt::Model;
using specrt::ModelConfig;
using specrt::Precision;
using specrt::Runner;
using specrt::RunnerOptions;
using specrt::reference::Vector;
using Logits = std::vector<std::vector<float>>;
namespace emulated = specrt::cuda::emulated;

RunnerOptions options_of(const char* device, int max_rows = 128) {
  RunnerOptions options;
  options.kv_cache_bytes = std::int64_t{4} << 20;
  options.max_batch_size = 4;
  options.max_rows = max_rows;
  options.device = device;
  options.poison = true;
  options.team = std::make_shared<specrt::ThreadTeam>(1);
  return options;
}

// Of every row of the pass.
Logits all_logits(Runner& runner) {
  Logits out;
  for (std::int64_t row = 0; row < runner.rows(); ++row) {
    const std::span<const float> logits = runner.logits({&row, 1});
    out.emplace_back(logits.begin(), logits.end());
  }
  return out;
}

Logits logits_at_once(const Model& model, const char* device, const tiny::Tokens& text) {
  Runner runner(model, options_of(device));
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, std::ssize(text));
  runner.begin();
  (void)runner.add_committed(0, text);
  runner.forward();
  return all_logits(runner);
}

template <typename Row>
void check_near(const Logits& got, const std::vector<Row>& want, double tolerance,
                const std::string& what) {
  CHECK_EQ(got.size(), want.size());
  for (std::size_t r = 0; r < got.size(); ++r) {
    double norm = 0.0;
    double error = 0.0;
    for (std::size_t i = 0; i < want[r].size(); ++i) {
      norm += double{want[r][i]} * want[r][i];
      error += std::pow(double{got[r][i]} - want[r][i], 2);
    }
    if (!(std::sqrt(error) <= tolerance * std::sqrt(norm))) {
      check::fail(__FILE__, __LINE__,
                  what + ", row " + std::to_string(r) + ": relative error " +
                      std::to_string(std::sqrt(error / norm)));
    }
  }
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

TEST(cuda_forward_agrees_with_double_precision) {
  for (const int architecture : {80, 90}) {
    for (const Precision precision :
         {Precision::bf16, Precision::f16, Precision::int8, Precision::int4}) {
      const bool codes = precision == Precision::int8 || precision == Precision::int4;
      if (architecture == 90 && codes) continue;  // expanded by the same kernel on both
      if (tiny::kThinned && precision != Precision::int4) continue;
      emulated::reset();
      emulated::settings().architecture = architecture;
      tiny::Spec spec = tiny::small_spec(precision, 3);
      spec.hidden = 72;
      spec.heads = 6;
      spec.kv_heads = 3;
      spec.head_dim = 16;
      spec.ffn = 53;
      spec.vocab = 131;
      // A chunk of attention ends inside, and the head is or is not the table.
      for (const bool tied : {false, true}) {
        spec.tied = tied;
        spec.qkv_bias = spec.output_bias = spec.mlp_bias = tied;
        spec.attention_scale = tied ? 0.2 : 0.0;
        const tiny::Tensors tensors = tiny::random_tensors(spec);
        const Model model = tiny::build(tiny::config_of(spec), precision, tensors);
        const tiny::Tokens text = tiny::random_tokens(70, tied ? 9 : 70, spec.vocab);
        check_near(logits_at_once(model, "cuda", text), tiny::Oracle(spec, tensors).logits(text),
                   precision == Precision::f16 ? 4e-3 : 3e-2,
                   std::string(specrt::name_of(precision)) + " " + std::to_string(architecture) +
                       (tied ? " tied" : ""));
      }
    }
  }
  emulated::reset();
}

// What other families have: norms of heads, norms behind blocks, scales, windows, caps, a part of
// each head that turns.
TEST(cuda_forward_agrees_with_the_cpu_on_every_family) {
  emulated::reset();
  const auto check = [](const char* what, const std::function<void(ModelConfig&)>& change) {
    const tiny::Spec spec = tiny::small_spec(Precision::bf16, 5);
    ModelConfig config = tiny::config_of(spec);
    change(config);
    tiny::Tensors tensors;
    std::uint64_t seed = 50;
    for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
      std::int64_t count = 1;
      for (const std::int64_t size : tensor.shape) count *= size;
      std::vector<float>& values = tensors[tensor.name];
      const auto tokens = tiny::random_tokens(++seed, static_cast<std::size_t>(count), 2001);
      for (const specrt::TokenId token : tokens) {
        const float uniform = static_cast<float>(token - 1000) / 1000.0f;
        values.push_back(tensor.shape.size() == 2 ? 0.5f * uniform : 1.0f + 0.2f * uniform);
      }
    }
    const Model model = tiny::build(config, Precision::bf16, tensors);
    const tiny::Tokens text = tiny::random_tokens(1, 20, spec.vocab);
    check_near(logits_at_once(model, "cuda", text), logits_at_once(model, "cpu", text), 3e-2, what);
  };
  check("head norms", [](ModelConfig& c) { c.qk_norm = specrt::QkNorm::head; });
  if (tiny::kThinned) return;
  check("whole norms behind blocks", [](ModelConfig& c) {
    c.qk_norm = specrt::QkNorm::whole;
    c.norm_placement = specrt::NormPlacement::post;
  });
  check("sandwich, caps, windows, gelu", [](ModelConfig& c) {
    c.norm_placement = specrt::NormPlacement::sandwich;
    c.attention_softcap = 5.0;
    c.final_softcap = 3.0;
    c.windows = {6, 0};
    c.activation = specrt::Activation::gelu_tanh;
    c.embedding_scale = 1.5;
    c.rope_local_inv_freq = c.rope_inv_freq;
    for (float& factor : c.rope_local_inv_freq) factor *= 0.5f;
  });
  check("scales, a part that turns", [](ModelConfig& c) {
    c.residual_scale = 0.22;
    c.logits_scale = 0.125;
    c.rope_inv_freq.resize(2);
    c.rope_scale = 1.2;
  });
}

TEST(cuda_forward_row_by_row_the_same_bits) {
  emulated::reset();
  tiny::Spec spec = tiny::small_spec(Precision::bf16, 6);
  const Model model = tiny::random_model(spec);
  const tiny::Tokens text = tiny::random_tokens(2, 70, spec.vocab);
  const Logits whole = logits_at_once(model, "cuda", text);
  // In chunks, beside another sequence, and a graph's padding behind it.
  Runner runner(model, options_of("cuda"));
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, 80);
  runner.cache().add(1, 80);
  const tiny::Tokens other = tiny::random_tokens(3, 70, spec.vocab);
  std::size_t at = 0;
  for (const std::size_t count : {1, 1, 5, 30, 1, 27, 5}) {
    runner.begin();
    (void)runner.add_committed(1, std::span(other).subspan(at, count));
    const std::int64_t first = runner.add_committed(0, std::span(text).subspan(at, count));
    runner.forward();
    const Logits got = all_logits(runner);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(same(got[static_cast<std::size_t>(first) + i], whole[at + i]));
    }
    runner.advance(0, static_cast<std::int64_t>(count));
    runner.advance(1, static_cast<std::int64_t>(count));
    at += count;
  }
}

// A tree's node sees its path as if it had been committed, and is moved where it would have been.
TEST(cuda_forward_trees_see_their_paths) {
  emulated::reset();
  tiny::Spec spec = tiny::small_spec(Precision::bf16, 7);
  const Model model = tiny::random_model(spec);
  const tiny::Tokens text = tiny::random_tokens(4, 72, spec.vocab);
  const Logits whole = logits_at_once(model, "cuda", text);
  Runner runner(model, options_of("cuda"));
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, 80);
  constexpr std::size_t kKnown = 61;  // so that the path crosses a chunk
  runner.begin();
  (void)runner.add_committed(0, std::span(text).first(kKnown));
  runner.forward();
  runner.advance(0, kKnown);

  // The text's own continuation stands among other branches.
  runner.begin();
  (void)runner.add_committed(0, std::span(text).subspan(kKnown, 1));
  DraftTree tree;
  std::vector<std::int32_t> path;
  std::int32_t parent = DraftTree::kRoot;
  for (std::size_t i = kKnown + 1; i < kKnown + 6; ++i) {
    const std::int32_t wrong = tree.add((text[i] + 1) % 61, parent);
    (void)tree.add((text[i] + 2) % 61, wrong);
    parent = tree.add(text[i], parent);
    path.push_back(parent);
  }
  const std::int64_t first = runner.add_tree(0, tree);
  runner.forward();
  Logits got = all_logits(runner);
  CHECK(same(got[0], whole[kKnown]));
  for (std::size_t i = 0; i < path.size(); ++i) {
    CHECK(same(got[static_cast<std::size_t>(first + path[i])], whole[kKnown + 1 + i]));
  }
  runner.advance(0, 1);
  std::vector<std::int32_t> slots;
  for (const std::int32_t node : path) slots.push_back(runner.scratch_of(first + node));
  runner.commit(0, slots);
  runner.begin();
  (void)runner.add_committed(0, std::span(text).subspan(kKnown + 6));
  runner.forward();
  got = all_logits(runner);
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(same(got[i], whole[kKnown + 6 + i]));
}

// Several segments, with partial results in one launch or in many.
TEST(cuda_forward_across_segments) {
  if (tiny::kThinned) return;
  emulated::reset();
  tiny::Spec spec = tiny::small_spec(Precision::bf16, 8);
  spec.layers = 1;
  spec.max_positions = 1100;
  const tiny::Tensors tensors = tiny::random_tensors(spec);
  const Model model = tiny::build(tiny::config_of(spec), spec.dtype, tensors);
  const tiny::Tokens text = tiny::random_tokens(5, 1030, spec.vocab);
  RunnerOptions options = options_of("cuda", 300);
  Runner cuda(model, options);
  options.device = "cpu";
  Runner cpu(model, options);
  const specrt::cpu::FpMode mode;
  for (Runner* runner : {&cuda, &cpu}) runner->cache().add(0, std::ssize(text));
  for (std::size_t at = 0; at < text.size(); at += 300) {
    const std::size_t count = std::min<std::size_t>(300, text.size() - at);
    Logits last[2];
    for (Runner* runner : {&cuda, &cpu}) {
      runner->begin();
      (void)runner->add_committed(0, std::span(text).subspan(at, count));
      runner->forward();
      const auto row = static_cast<std::int64_t>(count) - 1;
      const std::span<const float> logits = runner->logits({&row, 1});
      last[runner == &cuda ? 0 : 1] = {{logits.begin(), logits.end()}};
      runner->advance(0, static_cast<std::int64_t>(count));
    }
    check_near(last[0], last[1], 3e-2, "behind " + std::to_string(at + count));
  }
}

TEST(cuda_forward_best_is_the_largest_logit) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 9));
  Runner runner(model, options_of("cuda"));
  runner.cache().add(0, 8);
  runner.begin();
  (void)runner.add_committed(0, tiny::random_tokens(6, 7, 61));
  runner.forward();
  const Logits all = all_logits(runner);
  const std::vector<std::int64_t> rows = {6, 0, 3};
  const std::span<const specrt::cpu::ArgMax> best = runner.best(rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::vector<float>& row = all[static_cast<std::size_t>(rows[i])];
    const auto largest = std::max_element(row.begin(), row.end());
    CHECK_EQ(best[i].index, largest - row.begin());
    CHECK_EQ(best[i].value, *largest);
    CHECK(best[i].finite);
  }
}

// Padding rows of a graph write nothing: 3 rows in a graph of 4 beside cached blocks.
TEST(cuda_forward_padding_leaves_the_cache_alone) {
  emulated::reset();
  const Model model = tiny::random_model(tiny::small_spec(Precision::bf16, 10));
  RunnerOptions options = options_of("cuda");
  options.poison = false;
  options.block_size = 4;
  Runner runner(model, options);
  runner.cache().add(0, 40);
  runner.begin();
  (void)runner.add_committed(0, tiny::random_tokens(7, 20, 61));
  runner.forward();
  runner.advance(0, 20);
  runner.cuda()->wait();
  runner.cache().add(1, 40);
  const std::int64_t bytes = 2 * 8 * 2;  // of a slot: two heads of 8
  const std::int64_t slots =
      runner.cache().layout().groups[0].num_blocks * 4 + runner.cache().layout().scratch_slots;
  const auto plane = [&](std::int64_t layer, std::int64_t which) {
    return emulated::look(runner.cuda()->plane(layer, which),
                          static_cast<std::size_t>(slots * bytes));
  };
  std::vector<std::byte> before[4];
  for (std::size_t p = 0; p < 4; ++p) before[p] = plane(p / 2, p % 2);
  for (int round = 0; round < 3; ++round) {
    runner.begin();
    (void)runner.add_committed(1, tiny::random_tokens(8 + round, 3, 61));
    runner.forward();
    runner.advance(1, 3);
    runner.cuda()->wait();
  }
  CHECK(emulated::counts().graph_launches >= 2);
  std::vector<bool> written(static_cast<std::size_t>(slots));
  for (std::int64_t position = 0; position < 9; ++position) {
    written[static_cast<std::size_t>(runner.cache().slot(1, 0, position))] = true;
  }
  for (std::size_t p = 0; p < 4; ++p) {
    const std::vector<std::byte> after = plane(p / 2, p % 2);
    for (std::size_t slot = 0; slot < written.size(); ++slot) {
      const bool unchanged =
          std::memcmp(before[p].data() + slot * bytes, after.data() + slot * bytes, bytes) == 0;
      CHECK_EQ(unchanged, !written[slot]);
    }
  }
}

}  // namespace
