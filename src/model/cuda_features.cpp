#include <algorithm>

#include "model/cuda_runner.h"
#include "model/runner.h"
#include "specrt/error.h"

// Hidden states on a GPU: what a pass keeps of them, the way into a draft head's layers and out of
// them (as draft_head.cpp has it), and copies between places where they are kept.

namespace specrt {
namespace {

static_assert(CudaRunner::kMostLikely == Runner::kMaxCandidates);

}  // namespace

void CudaRunner::keep_features(std::int64_t layer) {
  const ModelConfig& c = config_;
  cuda::StatesArgs args;
  args.x = x_;
  args.x_stride = args.kept_stride = args.width = c.hidden_size;
  args.eps = static_cast<float>(c.norm_eps);
  const auto keep = [&](std::int64_t which) {
    args.kept = features_ + which * max_rows_ * c.hidden_size;
    cuda::states(type_, args, inputs_.shape().rows, stream());
  };
  const std::int64_t layers = std::ssize(wanted_.layers);
  for (std::int64_t i = 0; i < layers; ++i) {
    if (wanted_.layers[static_cast<std::size_t>(i)] == layer) keep(i);
  }
  if (!wanted_.normed || layer != c.num_layers) return;
  args.weight = weights_->norm();
  keep(layers);
}

const float* CudaRunner::on_host(const float* device) {
  if (!fetched_) {
    enter();
    const auto part = static_cast<std::size_t>(max_rows_ * config_.hidden_size * 4);
    const auto rows = static_cast<std::size_t>(inputs_.shape().rows * config_.hidden_size * 4);
    const auto count = static_cast<std::size_t>(wanted_.count());
    if (host_features_.size() == 0) host_features_ = cuda::HostBuffer(count * part);
    for (std::size_t i = 0; i < count; ++i) {
      cuda::copy_to_host(host_features_.data() + i * part, features(static_cast<std::int64_t>(i)),
                         rows, stream());
    }
    wait();
    fetched_ = true;
  }
  return reinterpret_cast<const float*>(host_features_.data()) + (device - features_);
}

void CudaRunner::forward_head(const PassRows& pass, const KvCache& cache, bool recycled) {
  run(pass, cache, config_.num_layers, recycled ? Entry::recycled : Entry::features);
}

// x_ = fc(cat[embedding, hidden]).
void CudaRunner::fuse() {
  const ModelConfig& c = config_;
  const HeadConfig& head = c.head;
  const CudaWeights::Entrance& w = weights_->entrance();
  const std::int64_t rows = inputs_.shape().rows;
  const std::int64_t size = c.hidden_size;
  const std::int64_t stride = cuda::padded_columns(2 * size);
  embed(x_);
  // The piece that stands behind fills the row up.
  const auto join = [&](cuda::StatesArgs args, const float* weight, bool first) {
    args.weight = weight;
    args.width = size;
    args.eps = static_cast<float>(c.norm_eps);
    args.rounded = static_cast<simt::Bf16*>(joined_) + (first ? 0 : size);
    args.rounded_stride = stride;
    args.rounded_width = first ? size : stride - size;
    cuda::states(type_, args, rows, stream());
  };
  cuda::StatesArgs embedding;
  embedding.x = x_;
  embedding.x_stride = size;
  if (head.zero_first) embedding.positions = inputs_.positions();
  cuda::StatesArgs hidden;
  hidden.from = inputs_.hidden();
  join(embedding, w.embedding_norm, !head.hidden_first);
  join(hidden, w.hidden_norm, head.hidden_first);
  product(w.fc, w.fc_bias, joined_, rows, x_, size, cuda::After::store);
}

// x_ = the hidden state; joined_ = cat[embedding, hidden], both normed, for layer 0's attention.
void CudaRunner::combine(bool recycled) {
  const ModelConfig& c = config_;
  const HeadConfig& head = c.head;
  const CudaWeights::Entrance& w = weights_->entrance();
  const std::int64_t rows = inputs_.shape().rows;
  const std::int64_t size = c.hidden_size;
  cuda::StatesArgs hidden;
  hidden.from = inputs_.hidden();
  hidden.eps = static_cast<float>(c.norm_eps);
  if (head.fc && !recycled) {
    const std::int64_t width = head.feature_parts * head.feature_size;
    const std::int64_t stride = cuda::padded_columns(width);
    const std::int64_t parts = head.part_norms ? head.feature_parts : 1;
    cuda::StatesArgs in = hidden;
    if (head.part_norms && w.input_norm != nullptr) {
      // The parts are normed out of what the norm of all has made.
      cuda::StatesArgs all = hidden;
      all.weight = w.input_norm;
      all.width = width;
      all.kept = parts_;
      all.kept_stride = width;
      cuda::states(type_, all, rows, stream());
      in.from = nullptr;
      in.x = parts_;
      in.x_stride = width;
    }
    in.width = width / parts;
    in.rounded_stride = stride;
    for (std::int64_t p = 0; p < parts; ++p) {
      in.offset = p * in.width;
      in.weight = head.part_norms ? w.part_norms[static_cast<std::size_t>(p)] : w.input_norm;
      in.rounded = static_cast<simt::Bf16*>(joined_) + in.offset;
      in.rounded_width = p + 1 < parts ? in.width : stride - in.offset;
      cuda::states(type_, in, rows, stream());
    }
    product(w.fc, w.fc_bias, joined_, rows, x_, size, cuda::After::store);
  } else {
    hidden.width = size;
    hidden.kept = x_;
    hidden.kept_stride = size;
    cuda::states(type_, hidden, rows, stream());
  }
  embed(embedded_);
  const std::int64_t stride = cuda::padded_columns(2 * size);
  cuda::StatesArgs args;
  args.x_stride = args.width = args.rounded_width = size;
  args.eps = static_cast<float>(c.norm_eps);
  args.rounded_stride = stride;
  args.x = embedded_;
  args.weight = weights_->layer(0).attention_norm;
  args.rounded = joined_;
  cuda::states(type_, args, rows, stream());
  args.x = x_;
  args.weight = w.hidden_norm;
  args.rounded = static_cast<simt::Bf16*>(joined_) + size;
  args.rounded_width = stride - size;
  if (head.norm_before_residual) {
    args.kept = x_;
    args.kept_stride = size;
  }
  cuda::states(type_, args, rows, stream());
}

// The states that stand for the target's behind these rows.
void CudaRunner::keep_outputs() {
  cuda::StatesArgs args;
  args.x = x_;
  args.x_stride = args.width = config_.hidden_size;
  args.weight = config_.head.norm_output ? weights_->norm() : nullptr;
  args.eps = static_cast<float>(config_.norm_eps);
  args.to = inputs_.outputs();
  cuda::states(type_, args, inputs_.shape().rows, stream());
}

void CudaRunner::likely(std::span<const std::int64_t> rows, std::int64_t count,
                        std::span<cuda::LikelyToken> out) {
  enter();
  likely_rows_ = std::ssize(rows);
  make_logits(send_rows(rows), likely_rows_);
  find_likely(likely_rows_, vocab(), count, likeliest_);
  cuda::copy_to_host(host_logits_.data(), likeliest_, out.size_bytes(), stream());
  wait();
  std::copy_n(reinterpret_cast<const cuda::LikelyToken*>(host_logits_.data()), out.size(),
              out.begin());
}

void CudaRunner::find_likely(std::int64_t rows, std::int64_t vocab, std::int64_t count,
                             cuda::LikelyToken* out) {
  cuda::LikelyArgs args;
  args.logits = logits_;
  args.stride = logits_stride_;
  args.vocab = vocab;
  args.chunks = cuda::chunks_of(vocab);
  args.count = static_cast<std::int32_t>(count);
  args.shares = shares_;
  args.found = found_;
  args.out = out;
  cuda::likely(args, rows, stream());
}

std::span<const float> CudaRunner::likely_logits() {
  enter();
  return bring_logits(likely_rows_);
}

}  // namespace specrt
