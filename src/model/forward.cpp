#include <algorithm>
#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "model/runner.h"
#include "specrt/error.h"

// The forward pass: decoder layers over the rows of a pass, every op one parallel region
// over outputs, rows or attention tasks. Nothing here depends on how rows came together.

namespace specrt {

void Runner::prepare(Precision precision, const float* x, std::int64_t rows, std::int64_t width,
                     std::int64_t begin, std::int64_t end) {
  const cpu::Prepare body = kernels_->prepare[static_cast<int>(precision)];
  if (body == nullptr) return;
  body(x, rows, width, width, begin, end, prepared_);
}

void Runner::prepare(Precision precision, const float* x, std::int64_t rows, std::int64_t width) {
  for_rows(cpu::prepared_rows(rows), width, [&](std::int64_t begin, std::int64_t end) {
    prepare(precision, x, rows, width, begin, end);
  });
}

namespace {

// Panels that a thread takes at least: enough bytes to be worth taking, and whole pairs, which the
// tile unit does at once.
std::int64_t grain(const Matrix& matrix, cpu::Gate gate) {
  constexpr std::int64_t kBytes = 64 * 1024;
  const std::int64_t unit = gate == cpu::Gate::none ? 1 : 2;
  const std::int64_t bytes = unit * cpu::packed_bytes(cpu::kPanel, matrix.k, matrix.precision);
  return std::max<std::int64_t>(2, kBytes / bytes / 2 * 2);
}

}  // namespace

void Runner::gemm(const Matrix& matrix, const float* bias, const float* x, std::int64_t rows,
                  float* y, std::int64_t y_stride, Add add, cpu::Gate gate) {
  cpu::GemmArgs args = product_of(matrix, x, rows, prepared_);
  args.bias = bias;
  args.y = y;
  args.y_stride = y_stride;
  args.accumulate = add == Add::yes;
  args.gate = gate;
  args.round = model_.precision() != Precision::f32;
  const cpu::Gemm body = kernels_->gemm[static_cast<int>(matrix.precision)];
  pool_->parallel_balanced(
      (matrix.n + cpu::kPanel - 1) / cpu::kPanel, grain(matrix, gate),
      [&](int, std::int64_t begin, std::int64_t end) { body(args, begin, end); });
}

void Runner::embed(float* into) {
  const ModelData& data = *embedding_data_;
  const std::int64_t hidden = data.config.hidden_size;
  const auto scale = static_cast<float>(model_.config().embedding_scale);
  const HeadConfig& head = model_.config().head;
  const std::int64_t rows_of_table =
      head.kind == HeadKind::none ? model_.config().vocab_size : head.input_vocab;
  const DType dtype = activation_dtype(data.precision);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = tokens_[static_cast<std::size_t>(row)];
      float* out = into + row * hidden;
      if (token >= rows_of_table) {  // a padding id of the target, for a head with its own table
        std::fill(out, out + hidden, 0.0f);
        continue;
      }
      if (data.embedding == nullptr) {
        cpu::unpack_row(data.head.data, data.head.precision, hidden, token, out);
      } else {
        const auto* table = static_cast<const std::byte*>(data.embedding);
        kernels_->load(table + token * hidden * static_cast<std::int64_t>(size_of(dtype)), hidden,
                       dtype, out);
      }
      if (scale != 1.0f) kernels_->scale(out, hidden, scale);
    }
  });
}

void Runner::norm(const float* weight, Precision precision) {
  const std::int64_t hidden = model_.config().hidden_size;
  for_rows(cpu::prepared_rows(rows_), hidden, [&](std::int64_t begin, std::int64_t end) {
    // Without a norm here, what reads the stream still reads it in the weights' precision.
    for (std::int64_t row = begin; row < std::min(end, rows_); ++row) {
      normalise(x_ + row * hidden, hidden, weight, precision, normed_ + row * hidden);
    }
    prepare(precision, normed_, rows_, hidden, begin, end);
  });
}

void Runner::rotate_and_store(std::int64_t index) {
  const ModelConfig& c = model_.config();
  const LayerWeights& w = model_.data().layers[static_cast<std::size_t>(index)];
  const auto group = static_cast<std::size_t>(group_of_[static_cast<std::size_t>(index)]);
  const bool local = c.window_of(index) > 0;
  const float* cos = local ? local_cos_ : cos_;
  const float* sin = local ? local_sin_ : sin_;
  const auto pairs = static_cast<std::int64_t>(c.rope_inv_freq.size());
  const auto eps = static_cast<float>(c.norm_eps);
  const std::int64_t q_width = c.num_heads * c.head_dim;
  const std::int64_t kv_width = c.num_kv_heads * c.head_dim;
  const std::int64_t width = q_width + 2 * kv_width;
  const std::int64_t slot_bytes = kv_width * static_cast<std::int64_t>(size_of(kv_dtype_));
  std::byte* k_plane = storage_.plane(index, 0);
  std::byte* v_plane = storage_.plane(index, 1);
  float* k_scales = kv_scales(index, 0);
  float* v_scales = kv_scales(index, 1);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t position = positions_[static_cast<std::size_t>(row)];
      float* q = qkv_ + row * width;
      float* k = q + q_width;
      if (c.qk_norm == QkNorm::head) {
        kernels_->rms_norm(q, c.head_dim, w.q_norm, eps, c.num_heads, c.head_dim, false, q,
                           c.head_dim);
        kernels_->rms_norm(k, c.head_dim, w.k_norm, eps, c.num_kv_heads, c.head_dim, false, k,
                           c.head_dim);
      } else if (c.qk_norm == QkNorm::whole) {
        kernels_->rms_norm(q, q_width, w.q_norm, eps, 1, q_width, false, q, q_width);
        kernels_->rms_norm(k, kv_width, w.k_norm, eps, 1, kv_width, false, k, kv_width);
      }
      const float* row_cos = cos + position * pairs;
      const float* row_sin = sin + position * pairs;
      const std::int64_t heads = c.num_heads + c.num_kv_heads;
      if (2 * pairs == c.head_dim) {
        // Keys lie right behind the queries and turn with them.
        kernels_->rope(q, heads, c.head_dim, row_cos, row_sin);
      } else {
        for (std::int64_t head = 0; head < heads; ++head) {
          kernels_->rope(q + head * c.head_dim, 1, 2 * pairs, row_cos, row_sin);
        }
      }
      const std::int64_t slot = slots_[group][static_cast<std::size_t>(row)];
      const std::int64_t scale = k_scales == nullptr ? 0 : slot * c.num_kv_heads;
      kernels_->store_kv(k, c.num_kv_heads, c.head_dim, kv_dtype_, k_plane + slot * slot_bytes,
                         k_scales + scale);
      kernels_->store_kv(k + kv_width, c.num_kv_heads, c.head_dim, kv_dtype_,
                         v_plane + slot * slot_bytes, v_scales + scale);
    }
  });
}

void Runner::attend(std::int64_t index) {
  const ModelConfig& c = model_.config();
  const std::int64_t group = group_of_[static_cast<std::size_t>(index)];
  cpu::AttentionArgs args;
  args.k = storage_.plane(index, 0);
  args.v = storage_.plane(index, 1);
  args.k_scales = kv_scales(index, 0);
  args.v_scales = kv_scales(index, 1);
  args.kv_dtype = kv_dtype_;
  args.block_size = cache_.layout().block_size;
  args.path_base = cache_.scratch_slot(group, 0);
  args.q_heads = c.num_heads;
  args.kv_heads = c.num_kv_heads;
  args.head_dim = c.head_dim;
  args.scale = c.attention_scale > 0 ? static_cast<float>(c.attention_scale)
                                     : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  args.softcap = static_cast<float>(c.attention_softcap);
  args.window = c.window_of(index);
  args.round_output = model_.precision() != Precision::f32;
  args.partials = partials_;
  attention_plans_[static_cast<std::size_t>(group)].run(args, *kernels_, *pool_);
}

float* Runner::kv_scales(std::int64_t layer, std::int64_t plane) const {
  if (kv_dtype_ != KvDType::i8) return nullptr;
  return reinterpret_cast<float*>(storage_.plane(layer, 2 + plane));
}

// The residual stream gains a block's output: x += scale * norm(W in + bias).
void Runner::add_block(const Matrix& matrix, const float* bias, const float* in, std::int64_t width,
                       const float* post_norm) {
  const std::int64_t hidden = model_.config().hidden_size;
  const auto scale = static_cast<float>(model_.config().residual_scale);
  const auto eps = static_cast<float>(model_.config().norm_eps);
  prepare(matrix.precision, in, rows_, width);
  if (post_norm == nullptr && scale == 1.0f) {
    gemm(matrix, bias, in, rows_, x_, hidden, Add::yes, cpu::Gate::none);
    return;
  }
  gemm(matrix, bias, in, rows_, block_out_, hidden, Add::no, cpu::Gate::none);
  for_rows(rows_, hidden, [&](std::int64_t begin, std::int64_t end) {
    float* out = block_out_ + begin * hidden;
    if (post_norm != nullptr) {
      kernels_->rms_norm(out, hidden, post_norm, eps, end - begin, hidden, false, out, hidden);
    }
    kernels_->add_scaled(x_ + begin * hidden, out, (end - begin) * hidden, scale);
  });
}

void Runner::layer(std::int64_t index) {
  const ModelConfig& c = model_.config();
  const LayerWeights& w = model_.data().layers[static_cast<std::size_t>(index)];
  const std::int64_t q_width = c.num_heads * c.head_dim;

  // A head's first layer may read two states, which combine() has left there.
  if (w.qkv.k == c.hidden_size) norm(w.attention_norm, w.qkv.precision);
  note(&LayerTrace::attention, normed_, c.hidden_size);
  gemm(w.qkv, w.qkv_bias, normed_, rows_, qkv_, w.qkv.n, Add::no, cpu::Gate::none);
  rotate_and_store(index);
  attend(index);
  note(&LayerTrace::output, attended_, q_width);
  add_block(w.output, w.output_bias, attended_, q_width, w.attention_post_norm);

  norm(w.mlp_norm, w.gate_up.precision);
  note(&LayerTrace::mlp, normed_, c.hidden_size);
  const auto gate = c.activation == Activation::silu ? cpu::Gate::silu : cpu::Gate::gelu_tanh;
  gemm(w.gate_up, w.gate_up_bias, normed_, rows_, activated_, c.intermediate_size, Add::no, gate);
  note(&LayerTrace::down, activated_, c.intermediate_size);
  add_block(w.down, w.down_bias, activated_, c.intermediate_size, w.mlp_post_norm);
}

void Runner::note(std::vector<float> LayerTrace::* which, const float* x, std::int64_t width) {
  if (trace_ == nullptr) return;
  std::vector<float>& kept = trace_->*which;
  kept.insert(kept.end(), x, x + rows_ * width);
}

// What drafters read of the rows that were asked for; `layer` is the one that comes next.
void Runner::keep_features(std::int64_t layer) {
  if (captured_rows_.empty()) return;
  const std::int64_t hidden = model_.config().hidden_size;
  const auto count = static_cast<std::int64_t>(captured_rows_.size());
  const bool norm_too = wanted_.normed && layer == model_.config().num_layers;
  const auto eps = static_cast<float>(model_.config().norm_eps);
  for (std::size_t i = 0; i < wanted_.layers.size() + (norm_too ? 1 : 0); ++i) {
    const bool normed = i == wanted_.layers.size();
    if (!normed && wanted_.layers[i] != layer) continue;
    float* kept = normed ? normed_features_ : features_[i];
    for_rows(count, hidden, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t c = begin; c < end; ++c) {
        const std::int64_t at = captured_rows_[static_cast<std::size_t>(c)] * hidden;
        if (normed) {
          kernels_->rms_norm(x_ + at, hidden, model_.data().norm, eps, 1, hidden, false, kept + at,
                             hidden);
        } else {
          std::copy(x_ + at, x_ + at + hidden, kept + at);
        }
      }
    });
  }
}

void Runner::plan_attention() {
  const ModelConfig& c = model_.config();
  const std::int64_t q_width = c.num_heads * c.head_dim;
  const std::int64_t qkv_width = q_width + 2 * c.num_kv_heads * c.head_dim;
  for (std::size_t g = 0; g < attention_rows_.size(); ++g) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      const auto r = static_cast<std::size_t>(row);
      cpu::AttentionRow& out = attention_rows_[g][r];
      out.q = qkv_ + row * qkv_width;
      out.out = attended_ + row * q_width;
      out.table = cache_.table(owners_[r], static_cast<std::int64_t>(g)).data();
      out.table_positions = positions_[r] + 1 - path_length_[r];
      out.path = paths_.data() + path_begin_[r];
      out.path_length = path_length_[r];
    }
    attention_plans_[g].make(std::span(attention_rows_[g]).first(static_cast<std::size_t>(rows_)));
  }
}

PassRows Runner::pass_rows() const {
  return {rows_,        tokens_, positions_,
          slots_,       owners_, path_begin_,
          path_length_, paths_,  !captured_rows_.empty(),
          {},           {},      nullptr};
}

void Runner::forward(std::int64_t layers) {
  if (rows_ == 0) return;
  if (cuda_ != nullptr) {
    cuda_->forward(pass_rows(), cache_, layers);
    return;
  }
  plan_attention();
  embed(x_);
  for (std::int64_t i = 0; i < layers; ++i) {
    keep_features(i);
    layer(i);
  }
  keep_features(layers);
}

void Runner::forward_grown(const LevelGrowth& growth) {
  if (rows_ == 0) return;
  if (cuda_ == nullptr) throw InternalError("[model] tokens that a device fills in, without one");
  PassRows pass = pass_rows();
  pass.growth = &growth;
  cuda_->forward(pass, cache_, model_.config().num_layers);
}

void Runner::forward_traced(std::span<const float> stream, LayerTrace& trace) {
  require_cpu("traced passes");
  const std::int64_t hidden = model_.config().hidden_size;
  if (std::ssize(stream) != rows_ * hidden) {
    throw InternalError(expected_got("stream", "the pass's rows", std::to_string(stream.size())));
  }
  plan_attention();
  std::copy(stream.begin(), stream.end(), x_);
  trace_ = &trace;
  for (std::int64_t i = 0; i < model_.config().num_layers; ++i) layer(i);
  note(&LayerTrace::stream, x_, hidden);
  trace_ = nullptr;
}

}  // namespace specrt
