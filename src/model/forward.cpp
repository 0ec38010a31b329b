#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "model/runner.h"
#include "specrt/error.h"

// The forward pass: decoder layers over the rows of a pass, every op one parallel region
// over outputs, rows or attention tasks. Nothing here depends on how rows came together.

namespace specrt {

void Runner::gemm(const Matrix& matrix, const float* bias, const float* x, std::int64_t rows,
                  std::int64_t x_stride, float* y, std::int64_t y_stride, bool accumulate) {
  cpu::GemmArgs args;
  args.x = x;
  args.rows = rows;
  args.x_stride = x_stride;
  args.weight = matrix.data;
  args.n = matrix.n;
  args.k = matrix.k;
  args.bias = bias;
  args.y = y;
  args.y_stride = y_stride;
  args.accumulate = accumulate;
  const bool bf16 = model_.dtype() == DType::bf16;
  if (bf16 && kernels_->prepare_bf16 != nullptr) {
    const auto prepare = [&](std::int64_t begin, std::int64_t end) {
      kernels_->prepare_bf16(x, rows, x_stride, matrix.k, begin, end, prepared_);
    };
    const std::int64_t padded = (rows + 15) / 16 * 16;
    // Waking the others costs more than a few rows do.
    if (rows * matrix.k < 65536) {
      prepare(0, padded);
    } else {
      pool_->parallel(padded, prepare);
    }
    args.prepared = prepared_;
  }
  const auto body = bf16 ? kernels_->gemm_bf16 : kernels_->gemm_f32;
  pool_->parallel((matrix.n + cpu::kPanel - 1) / cpu::kPanel,
                  [&](std::int64_t begin, std::int64_t end) { body(args, begin, end); });
}

void Runner::embed() {
  const ModelData& data = model_.data();
  const std::int64_t hidden = data.config.hidden_size;
  const auto scale = static_cast<float>(data.config.embedding_scale);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = tokens_[static_cast<std::size_t>(row)];
      float* out = x_ + row * hidden;
      if (data.embedding == nullptr) {
        cpu::unpack_row(data.head.data, data.dtype, hidden, token, out);
      } else {
        const auto* table = static_cast<const std::byte*>(data.embedding);
        kernels_->load(table + token * hidden * static_cast<std::int64_t>(size_of(data.dtype)),
                       hidden, data.dtype, out);
      }
      if (scale != 1.0f) kernels_->scale(out, hidden, scale);
    }
  });
}

void Runner::norm(const float* x, const float* weight, float* out, bool round) {
  const std::int64_t hidden = model_.config().hidden_size;
  const auto eps = static_cast<float>(model_.config().norm_eps);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    if (weight == nullptr) {
      // No norm here: what reads the stream still reads it in the weights' precision.
      for (std::int64_t i = begin * hidden; i < end * hidden; ++i) {
        out[i] = round ? cpu::bf16_to_float(cpu::float_to_bf16(x[i])) : x[i];
      }
      return;
    }
    kernels_->rms_norm(x + begin * hidden, hidden, weight, eps, end - begin, hidden, round,
                       out + begin * hidden, hidden);
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
  args.round_output = model_.dtype() != DType::f32;
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
  if (post_norm == nullptr && scale == 1.0f) {
    gemm(matrix, bias, in, rows_, width, x_, hidden, true);
    return;
  }
  gemm(matrix, bias, in, rows_, width, block_out_, hidden, false);
  if (post_norm != nullptr) norm(block_out_, post_norm, block_out_, false);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    kernels_->add_scaled(x_ + begin * hidden, block_out_ + begin * hidden, (end - begin) * hidden,
                         scale);
  });
}

void Runner::layer(std::int64_t index) {
  const ModelConfig& c = model_.config();
  const LayerWeights& w = model_.data().layers[static_cast<std::size_t>(index)];
  const bool round = model_.dtype() != DType::f32;
  const std::int64_t hidden = c.hidden_size;
  const std::int64_t q_width = c.num_heads * c.head_dim;
  const std::int64_t ffn = c.intermediate_size;

  norm(x_, w.attention_norm, normed_, round);
  gemm(w.qkv, w.qkv_bias, normed_, rows_, hidden, qkv_, q_width + 2 * c.num_kv_heads * c.head_dim,
       false);
  rotate_and_store(index);
  attend(index);
  add_block(w.output, w.output_bias, attended_, q_width, w.attention_post_norm);

  norm(x_, w.mlp_norm, normed_, round);
  gemm(w.gate_up, w.gate_up_bias, normed_, rows_, hidden, gate_up_, 2 * ffn, false);
  const auto activate = c.activation == Activation::silu ? kernels_->silu_mul : kernels_->gelu_mul;
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* gate = gate_up_ + row * 2 * ffn;
      activate(gate, gate + ffn, ffn, round, activated_ + row * ffn);
    }
  });
  add_block(w.down, w.down_bias, activated_, ffn, w.mlp_post_norm);
}

void Runner::forward() {
  if (rows_ == 0) return;
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
  embed();
  for (std::int64_t i = 0; i < c.num_layers; ++i) layer(i);
}

std::span<const float> Runner::logits(std::span<const std::int64_t> rows) {
  const ModelData& data = model_.data();
  const std::int64_t hidden = data.config.hidden_size;
  const auto count = static_cast<std::int64_t>(rows.size());
  if (count > kLogitRows) {
    throw InternalError(expected_got("logits", "at most " + std::to_string(kLogitRows) + " rows",
                                     std::to_string(count)));
  }
  pool_->parallel(count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      kernels_->rms_norm(x_ + rows[static_cast<std::size_t>(i)] * hidden, hidden, data.norm,
                         static_cast<float>(data.config.norm_eps), 1, hidden,
                         data.dtype != DType::f32, head_in_ + i * hidden, hidden);
    }
  });
  const std::int64_t vocab = data.config.vocab_size;
  gemm(data.head, nullptr, head_in_, count, hidden, logits_, vocab, false);
  const auto scale = static_cast<float>(data.config.logits_scale);
  const auto cap = static_cast<float>(data.config.final_softcap);
  if (scale != 1.0f || cap > 0.0f) {
    pool_->parallel(count, [&](std::int64_t begin, std::int64_t end) {
      float* at = logits_ + begin * vocab;
      if (scale != 1.0f) kernels_->scale(at, (end - begin) * vocab, scale);
      if (cap > 0.0f) kernels_->softcap(at, (end - begin) * vocab, cap);
    });
  }
  return {logits_, static_cast<std::size_t>(count * data.config.vocab_size)};
}

}  // namespace specrt
