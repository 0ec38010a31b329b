// What weights alone tell about the sizes of a matrix's inputs.

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "model/input_moments.h"
#include "specrt/model.h"
#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::InputMoments;

namespace {

specrt::ModelConfig small() {
  specrt::ModelConfig config;
  config.vocab_size = 2;
  config.hidden_size = 2;
  config.intermediate_size = 3;
  config.num_layers = 1;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 2;
  return config;
}

void observe(InputMoments& moments, const char* name, std::int64_t n, const Floats& values) {
  const std::int64_t k = std::ssize(values) / n;
  moments.observe(name, n, k,
                  [&](std::int64_t r, float* out) { std::copy_n(values.begin() + r * k, k, out); });
}

void check_near(const Floats& got, const Floats& expected) {
  CHECK_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::fabs(got[i] - expected[i]) < 1e-6f);
}

}  // namespace

TEST(input_moments_go_through_a_layer) {
  InputMoments moments(small());
  CHECK(moments.inputs_of("layers.0.attention.q").empty());
  observe(moments, "embedding", 2, {1, 3, 3, 1});  // mean squares 5 and 5
  CHECK(moments.inputs_of("layers.0.attention.q").empty());
  observe(moments, "layers.0.attention_norm", 2, {1, 2});  // read: 1 and 4
  for (const char* name : {"q", "k", "v"}) {
    check_near(moments.inputs_of(std::string("layers.0.attention.") + name), {0.25f, 1});
  }
  CHECK(moments.inputs_of("layers.0.attention.o").empty());
  // Values: 1, 4, 16 and 0, of two heads that two query heads share each.
  observe(moments, "layers.0.attention.v", 4, {1, 0, 0, 1, 0, -2, 0, 0});
  const float s = 1.0f / 16;
  check_near(moments.inputs_of("layers.0.attention.o"), {s, 4 * s, s, 4 * s, 1, 0, 1, 0});
  // 0.3 * (1 * 1) and 0.3 * (10^2 * 16 + 0): the stream has 5.3 and 485.
  observe(moments, "layers.0.attention.o", 2, {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 5});
  observe(moments, "layers.0.mlp_norm", 2, {1, 1});
  check_near(moments.inputs_of("layers.0.mlp.gate"), {5.3f / 485, 1});
  CHECK(moments.inputs_of("layers.0.mlp.down").empty());
  observe(moments, "layers.0.mlp.gate", 3, {0, 0, 0, 1, 0, 1});
  observe(moments, "layers.0.mlp.up", 3, {0, 1, 0, 1, 0, 3});
  check_near(moments.inputs_of("layers.0.mlp.down"), {0, 1.0f / 9, 1});
  CHECK(moments.inputs_of("norm").empty());
  CHECK(moments.inputs_of("lm_head").empty());
}

TEST(input_moments_without_what_they_need) {
  InputMoments moments(small());
  observe(moments, "layers.0.attention.v", 4, {1, 0, 0, 1, 0, -2, 0, 0});
  observe(moments, "layers.0.attention.o", 2, Floats(16, 1.0f));
  CHECK(moments.inputs_of("layers.0.attention.o").empty());
  // Weights that are no numbers, and none at all.
  observe(moments, "embedding", 2, {1, std::numeric_limits<float>::quiet_NaN(), 0, 0});
  observe(moments, "layers.0.attention_norm", 2, {1, 1});
  CHECK(moments.inputs_of("layers.0.attention.q").empty());
  observe(moments, "embedding", 2, {0, 0, 0, 0});
  CHECK(moments.inputs_of("layers.0.attention.q").empty());
}
