#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "model/runner.h"
#include "specrt/error.h"

// The forward pass: pre-norm decoder layers over the rows of a pass, every op one parallel region
// over outputs, rows or (row, kv head) tasks. Nothing here depends on how rows came together.

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
  const auto body = model_.dtype() == DType::f32 ? kernels_->gemm_f32 : kernels_->gemm_bf16;
  pool_->parallel((matrix.n + cpu::kPanel - 1) / cpu::kPanel,
                  [&](std::int64_t begin, std::int64_t end) { body(args, begin, end); });
}

void Runner::embed() {
  const ModelData& data = model_.data();
  const std::int64_t hidden = data.config.hidden_size;
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
    }
  });
}

void Runner::layer(std::int64_t index) {
  const ModelConfig& c = model_.config();
  const LayerWeights& w = model_.data().layers[static_cast<std::size_t>(index)];
  const bool round = model_.dtype() != DType::f32;
  const std::int64_t hidden = c.hidden_size;
  const std::int64_t q_width = c.num_heads * c.head_dim;
  const std::int64_t kv_width = c.num_kv_heads * c.head_dim;
  const std::int64_t qkv_width = q_width + 2 * kv_width;
  const std::int64_t half = c.head_dim / 2;
  const auto eps = static_cast<float>(c.norm_eps);
  const DType kv_dtype = model_.dtype();
  std::byte* k_plane = storage_.plane(index, 0);
  std::byte* v_plane = storage_.plane(index, 1);

  const auto norm = [&](const float* weight) {
    pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
      kernels_->rms_norm(x_ + begin * hidden, hidden, weight, eps, end - begin, hidden, round,
                         normed_ + begin * hidden, hidden);
    });
  };

  norm(w.attention_norm);
  gemm(w.qkv, w.qkv_bias, normed_, rows_, hidden, qkv_, qkv_width, false);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    const auto slot_bytes = kv_width * static_cast<std::int64_t>(size_of(kv_dtype));
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t position = positions_[static_cast<std::size_t>(row)];
      float* q = qkv_ + row * qkv_width;
      // Keys lie right behind the queries and turn with them.
      kernels_->rope(q, c.num_heads + c.num_kv_heads, c.head_dim, cos_ + position * half,
                     sin_ + position * half);
      const std::int64_t slot = slots_[static_cast<std::size_t>(row)];
      kernels_->store(q + q_width, kv_width, kv_dtype, k_plane + slot * slot_bytes);
      kernels_->store(q + q_width + kv_width, kv_width, kv_dtype, v_plane + slot * slot_bytes);
    }
  });

  cpu::AttentionArgs attention;
  attention.k = k_plane;
  attention.v = v_plane;
  attention.kv_dtype = kv_dtype;
  attention.block_size = cache_.layout().block_size;
  attention.q_heads = c.num_heads;
  attention.kv_heads = c.num_kv_heads;
  attention.head_dim = c.head_dim;
  attention.scale = c.attention_scale > 0 ? static_cast<float>(c.attention_scale)
                                          : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  attention.round_output = round;
  attention.rows = attention_rows_.data();
  pool_->parallel(rows_ * c.num_kv_heads, [&](std::int64_t begin, std::int64_t end) {
    kernels_->attention(attention, begin, end);
  });

  gemm(w.output, w.output_bias, attended_, rows_, q_width, x_, hidden, true);
  norm(w.mlp_norm);
  const std::int64_t ffn = c.intermediate_size;
  gemm(w.gate_up, w.gate_up_bias, normed_, rows_, hidden, gate_up_, 2 * ffn, false);
  pool_->parallel(rows_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* gate = gate_up_ + row * 2 * ffn;
      kernels_->silu_mul(gate, gate + ffn, ffn, round, activated_ + row * ffn);
    }
  });
  gemm(w.down, w.down_bias, activated_, rows_, ffn, x_, hidden, true);
}

void Runner::forward() {
  if (rows_ == 0) return;
  const ModelConfig& c = model_.config();
  const std::int64_t q_width = c.num_heads * c.head_dim;
  const std::int64_t qkv_width = q_width + 2 * c.num_kv_heads * c.head_dim;
  for (std::int64_t row = 0; row < rows_; ++row) {
    const auto r = static_cast<std::size_t>(row);
    cpu::AttentionRow& out = attention_rows_[r];
    out.q = qkv_ + row * qkv_width;
    out.out = attended_ + row * q_width;
    out.table = cache_.table(owners_[r], 0).data();
    out.table_positions = positions_[r] + 1 - path_length_[r];
    out.path = paths_.data() + path_begin_[r];
    out.path_length = path_length_[r];
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
  gemm(data.head, nullptr, head_in_, count, hidden, logits_, data.config.vocab_size, false);
  return {logits_, static_cast<std::size_t>(count * data.config.vocab_size)};
}

}  // namespace specrt
