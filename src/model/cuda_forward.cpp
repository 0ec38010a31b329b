#include <algorithm>
#include <cmath>

#include "model/cuda_runner.h"

// The forward pass on a GPU: the same layers as forward.cpp, over the ops of ops.h. Rows are those
// of the pass's shape; what stands beyond the real ones is padding that nobody reads.

namespace specrt {
namespace {

cuda::HeadNorm head_norm_of(QkNorm norm) {
  switch (norm) {
    case QkNorm::none:
      return cuda::HeadNorm::none;
    case QkNorm::head:
      return cuda::HeadNorm::head;
    case QkNorm::whole:
      return cuda::HeadNorm::whole;
  }
  return cuda::HeadNorm::none;
}

}  // namespace

void CudaRunner::forward(const PassRows& pass, const KvCache& cache, std::int64_t layers) {
  if (pass.rows > 0) run(pass, cache, layers, Entry::tokens);
}

void CudaRunner::run(const PassRows& pass, const KvCache& cache, std::int64_t layers, Entry entry) {
  enter();
  flush_moves();
  copies_.flush(stream());
  inputs_.send(pass, cache, stream());
  if (pass.growth != nullptr) inputs_.grow(*pass.growth, stream());
  fetched_ = false;
  const PassShape& shape = inputs_.shape();
  if (shape.rows > CudaInputs::kMostCaptured || shape.rows * shape.segments > most_partials_) {
    run_layers(layers, pass.captures, entry);
    return;
  }
  graphs_.run(Key{shape, layers, pass.captures, entry}, stream(),
              [&](cuda::Stream) { run_layers(layers, pass.captures, entry); });
}

void CudaRunner::run_layers(std::int64_t layers, bool captures, Entry entry) {
  if (entry == Entry::tokens) {
    embed(x_);
  } else if (config_.head.kind == HeadKind::fused) {
    fuse();
  } else {
    combine(entry == Entry::recycled);
  }
  for (std::int64_t i = 0; i < layers; ++i) {
    if (captures) keep_features(i);
    layer(i);
  }
  if (captures) keep_features(layers);
  if (entry != Entry::tokens) keep_outputs();
}

void CudaRunner::embed(float* out) {
  const ModelConfig& c = config_;
  const std::int64_t rows = inputs_.shape().rows;
  const auto scale = static_cast<float>(c.embedding_scale);
  // Padding ids of the target, for a head with its own table, are zeros.
  const std::int64_t vocab = c.head.kind == HeadKind::none ? c.vocab_size : c.head.input_vocab;
  const cuda::DeviceMatrix& head = embedding_of_->head();
  const void* table = embedding_of_->embedding();
  if (table == nullptr && !head.row_major) {
    cuda::embed_packed(type_, head.stored,
                       {head.data, head.scales, inputs_.tokens(), out, vocab, c.hidden_size, scale},
                       rows, stream());
  } else {
    const bool own = table != nullptr;
    cuda::embed(type_,
                {own ? table : head.data, inputs_.tokens(), out, vocab,
                 own ? c.hidden_size : cuda::padded_columns(c.hidden_size), c.hidden_size, scale},
                rows, stream());
  }
}

void CudaRunner::norm(const float* weight) {
  const ModelConfig& c = config_;
  cuda::RmsNormArgs args;
  args.x = x_;
  args.weight = weight;
  args.out = normed_;
  args.x_stride = c.hidden_size;
  args.out_stride = cuda::padded_columns(c.hidden_size);
  args.width = c.hidden_size;
  args.eps = static_cast<float>(c.norm_eps);
  cuda::rms_norm(type_, args, inputs_.shape().rows, stream());
}

void CudaRunner::product(const cuda::DeviceMatrix& matrix, const float* bias, const void* x,
                         std::int64_t rows, void* y, std::int64_t y_stride, cuda::After after) {
  cuda::Product args;
  args.x = x;
  args.rows = rows;
  args.bias = bias;
  args.y = y;
  args.y_stride = y_stride;
  args.after = after;
  args.workspace = workspace_;
  cuda::product(type_, matrix, args, stream());
}

void CudaRunner::add_block(const cuda::DeviceMatrix& matrix, const float* bias, const void* x,
                           const float* post_norm) {
  const ModelConfig& c = config_;
  const std::int64_t rows = inputs_.shape().rows;
  if (post_norm == nullptr && c.residual_scale == 1.0) {
    product(matrix, bias, x, rows, x_, c.hidden_size, cuda::After::add);
    return;
  }
  product(matrix, bias, x, rows, block_, c.hidden_size, cuda::After::store);
  cuda::add_block({x_, block_, post_norm, c.hidden_size, static_cast<float>(c.residual_scale),
                   static_cast<float>(c.norm_eps)},
                  rows, stream());
}

void CudaRunner::layer(std::int64_t index) {
  const ModelConfig& c = config_;
  const CudaWeights::Layer& w = weights_->layer(index);
  const std::int64_t rows = inputs_.shape().rows;
  const std::int64_t group = group_of_[static_cast<std::size_t>(index)];
  // A head's first layer may read two states, which combine() has left there.
  const bool joined = w.qkv.k != c.hidden_size;
  if (!joined) norm(w.attention_norm);
  product(w.qkv, w.qkv_bias, joined ? joined_ : normed_, rows, qkv_, w.qkv.n, cuda::After::store);

  const bool local = c.window_of(index) > 0;
  cuda::RopeKvArgs rope;
  rope.qkv = qkv_;
  rope.qkv_stride = w.qkv.n;
  rope.positions = inputs_.positions();
  rope.slots = inputs_.slots(group);
  rope.cos = local ? local_cos_ : cos_;
  rope.sin = local ? local_sin_ : sin_;
  rope.pairs = static_cast<std::int64_t>(c.rope_inv_freq.size());
  rope.k = plane(index, 0);
  rope.v = plane(index, 1);
  rope.q_norm = w.q_norm;
  rope.k_norm = w.k_norm;
  rope.norm = head_norm_of(c.qk_norm);
  rope.eps = static_cast<float>(c.norm_eps);
  rope.q_heads = static_cast<std::int32_t>(c.num_heads);
  rope.kv_heads = static_cast<std::int32_t>(c.num_kv_heads);
  rope.head_dim = static_cast<std::int32_t>(c.head_dim);
  cuda::rope_kv(type_, rope, rows, stream());
  attend(index);
  add_block(w.output, w.output_bias, attended_, w.attention_post_norm);

  norm(w.mlp_norm);
  const auto gate =
      c.activation == Activation::silu ? cuda::After::gate_silu : cuda::After::gate_gelu;
  product(w.gate_up, w.gate_up_bias, normed_, rows, activated_,
          cuda::padded_columns(c.intermediate_size), gate);
  add_block(w.down, w.down_bias, activated_, w.mlp_post_norm);
}

void CudaRunner::attend(std::int64_t index) {
  const ModelConfig& c = config_;
  const PassShape& shape = inputs_.shape();
  const std::int64_t group = group_of_[static_cast<std::size_t>(index)];
  const KvGroup& kv = layout_.groups[static_cast<std::size_t>(group)];
  cuda::AttentionArgs args;
  args.q = qkv_;
  args.q_stride = weights_->layer(index).qkv.n;
  args.out = attended_;
  args.out_stride = cuda::padded_columns(c.num_heads * c.head_dim);
  args.k = plane(index, 0);
  args.v = plane(index, 1);
  args.rows = inputs_.rows(group);
  args.units = inputs_.units();
  args.tables = inputs_.pool();
  args.paths = inputs_.pool();
  args.path_base = kv.num_blocks * layout_.block_size;
  while (std::int64_t{1} << args.block_shift < layout_.block_size) ++args.block_shift;
  args.q_heads = static_cast<std::int32_t>(c.num_heads);
  args.kv_heads = static_cast<std::int32_t>(c.num_kv_heads);
  args.head_dim = static_cast<std::int32_t>(c.head_dim);
  args.scale = c.attention_scale > 0 ? static_cast<float>(c.attention_scale)
                                     : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  args.softcap = static_cast<float>(c.attention_softcap);
  args.window = static_cast<std::int32_t>(c.window_of(index));
  args.segments = static_cast<std::int32_t>(shape.segments);
  args.partials = partials_;
  if (shape.rows * shape.segments <= most_partials_) {
    cuda::attention(type_, args, shape.rows, shape.units, stream());
    return;
  }
  // Units whose partial results have room beside each other; their rows count from the first.
  const std::span<const cuda::AttentionUnit> units = inputs_.host_units();
  for (std::size_t first = 0; first < units.size();) {
    std::size_t last = first;
    std::int64_t rows = 0;
    while (last < units.size() && (rows + units[last].rows) * shape.segments <= most_partials_) {
      rows += units[last++].rows;
    }
    args.units = inputs_.units() + first;
    args.first_row = units[first].first_row;
    cuda::attention(type_, args, rows, static_cast<std::int64_t>(last - first), stream());
    first = last;
  }
}

}  // namespace specrt
