// The whole forward pass against its definition in double precision.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "model/runner.h"
#include "reference/kernels.h"
#include "tiny_decode.h"
#include "tiny_model.h"
#include "tiny_oracle.h"

namespace {

using specrt::Precision;
using specrt::reference::Vector;
using tiny::Oracle;

void compare(const tiny::Spec& spec, std::size_t length,
             const std::string& kv_cache_dtype = "auto") {
  const tiny::Tensors tensors = tiny::random_tensors(spec);
  const specrt::Model model = tiny::build(tiny::config_of(spec), spec.dtype, tensors);
  const tiny::Tokens text = tiny::random_tokens(length, length, spec.vocab);
  const std::vector<Vector> expected = Oracle(spec, tensors).logits(text);
  const bool exact =
      spec.dtype == Precision::f32 && (kv_cache_dtype == "auto" || kv_cache_dtype == "float32");
  const double tolerance = exact ? 1e-5 : spec.dtype == Precision::w8a8 ? 6e-2 : 3e-2;
  for (const specrt::CpuIsa isa : specrt::available_cpu_isas()) {
    specrt::RunnerOptions options;
    options.kv_cache_bytes = std::int64_t{1} << 30;
    options.cpu_isa = specrt::name_of(isa);
    options.kv_cache_dtype = kv_cache_dtype;
    options.max_rows = 600;
    options.team = std::make_shared<specrt::ThreadTeam>(1);
    specrt::Runner runner(model, options);
    const specrt::cpu::FpMode mode;
    runner.cache().add(0, static_cast<std::int64_t>(length));
    runner.begin();
    (void)runner.add_committed(0, text);
    runner.forward();
    for (std::size_t r = 0; r < length; ++r) {
      const std::int64_t row = static_cast<std::int64_t>(r);
      const std::span<const float> got = runner.logits({&row, 1});
      // Relative to how far logits spread.
      double norm = 0.0;
      double error = 0.0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        norm += expected[r][i] * expected[r][i];
        const double miss = static_cast<double>(got[i]) - expected[r][i];
        error += miss * miss;
      }
      CHECK(std::isfinite(error));
      if (std::sqrt(error) > tolerance * std::sqrt(norm)) {
        check::fail(__FILE__, __LINE__,
                    std::string(specrt::name_of(isa)) + " " + specrt::name_of(spec.dtype) +
                        " row " + std::to_string(r) + ": relative error " +
                        std::to_string(std::sqrt(error / norm)));
      }
    }
  }
}

}  // namespace

TEST(forward_agrees_with_double_precision) {
  for (const Precision dtype :
       {Precision::f32, Precision::bf16, Precision::int8, Precision::int4, Precision::w8a8}) {
    tiny::Spec spec;
    spec.dtype = dtype;
    for (const std::size_t length : {1, 2, 31, 32, 33, 70}) compare(spec, length);
  }
}

TEST(forward_agrees_with_any_kv_cache) {
  for (const Precision dtype : {Precision::f32, Precision::bf16}) {
    tiny::Spec spec;
    spec.dtype = dtype;
    spec.max_positions = 600;
    for (const char* const kv_cache_dtype : {"float32", "bfloat16", "int8"}) {
      compare(spec, 40, kv_cache_dtype);
    }
    compare(spec, 530);
  }
}

TEST(forward_agrees_where_shapes_are_odd) {
  for (const Precision dtype :
       {Precision::f32, Precision::bf16, Precision::int8, Precision::int4, Precision::w8a8}) {
    tiny::Spec spec = tiny::small_spec(dtype, 2);
    spec.hidden = 36;
    spec.heads = 6;
    spec.kv_heads = 3;
    spec.head_dim = 10;  // heads * head_dim is not hidden
    spec.ffn = 53;
    spec.vocab = 131;
    compare(spec, 35);
    spec.tied = true;
    spec.qkv_bias = true;
    compare(spec, 35);
    spec.output_bias = true;
    spec.mlp_bias = true;
    spec.attention_scale = 0.2;
    spec.rope_scale = 1.25;
    spec.layers = 3;
    compare(spec, 35);
    spec.kv_heads = 1;
    compare(spec, 35);
    spec.kv_heads = 6;
    compare(spec, 35);
    spec.head_dim = 40;
    compare(spec, 35);
  }
}
