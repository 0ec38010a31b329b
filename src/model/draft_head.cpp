#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "model/runner.h"
#include "specrt/error.h"

// What a draft head has beside a decoder's layers: the way from hidden states and tokens into them,
// and what it shares with its target.

namespace specrt {

void Runner::find_shared() {
  const ModelConfig& c = model_.config();
  embedding_data_ = &model_.data();
  lm_head_ = &model_.data().head;
  if (c.head.kind == HeadKind::none || (c.head.own_embedding && c.head.own_lm_head)) return;
  if (!target_.valid()) {
    throw InvalidArgument(
        "[head] expected a target whose embedding or output head it shares, got none");
  }
  const ModelConfig& t = target_.config();
  if (t.hidden_size != c.hidden_size) {
    throw InvalidArgument(expected_got("head",
                                       "hidden_size " + std::to_string(t.hidden_size) +
                                           ", to share the target's " +
                                           (c.head.own_embedding ? "output head" : "embedding"),
                                       std::to_string(c.hidden_size)));
  }
  if (!c.head.own_embedding) {
    if (c.head.input_vocab != t.vocab_size) {
      throw InvalidArgument(expected_got("head.input_vocab",
                                         std::to_string(t.vocab_size) + ", the target's",
                                         std::to_string(c.head.input_vocab)));
    }
    embedding_data_ = &target_.data();
  }
  if (!c.head.own_lm_head) {
    if (c.vocab_size != t.vocab_size) {
      throw InvalidArgument(expected_got("head.vocab_size",
                                         std::to_string(t.vocab_size) + ", the target's",
                                         std::to_string(c.vocab_size)));
    }
    lm_head_ = &target_.data().head;
  }
}

void Runner::normalise(const float* x, std::int64_t width, const float* weight, Precision precision,
                       float* out) const {
  const bool round = precision != Precision::f32;
  if (weight != nullptr) {
    kernels_->rms_norm(x, width, weight, static_cast<float>(model_.config().norm_eps), 1, width,
                       round, out, width);
    return;
  }
  for (std::int64_t i = 0; i < width; ++i) {
    out[i] = round ? cpu::bf16_to_float(cpu::float_to_bf16(x[i])) : x[i];
  }
}

// x_ = fc(cat[embedding, hidden]).
void Runner::fuse(std::span<const float* const> hidden) {
  const ModelData& data = model_.data();
  const HeadConfig& head = data.config.head;
  const std::int64_t size = data.config.hidden_size;
  const std::int64_t width = 2 * size;
  const Precision precision = data.fc.precision;
  embed(x_);
  for_rows(cpu::prepared_rows(rows_), width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < std::min(end, rows_); ++row) {
      const auto r = static_cast<std::size_t>(row);
      float* out = normed_ + row * width;
      float* embedding = x_ + row * size;
      if (head.zero_first && positions_[r] == 0) std::fill(embedding, embedding + size, 0.0f);
      normalise(embedding, size, data.embedding_norm, precision,
                head.hidden_first ? out + size : out);
      normalise(hidden[r], size, data.hidden_norm, precision, head.hidden_first ? out : out + size);
    }
    prepare(precision, normed_, rows_, width, begin, end);
  });
  gemm(data.fc, data.fc_bias, normed_, rows_, x_, size, Add::no, cpu::Gate::none);
}

// x_ = the hidden state; normed_ = cat[embedding, hidden], both normed, for layer 0's attention.
void Runner::combine(std::span<const float* const> hidden, bool recycled) {
  const ModelData& data = model_.data();
  const HeadConfig& head = data.config.head;
  const std::int64_t size = data.config.hidden_size;
  if (head.fc && !recycled) {
    const std::int64_t width = head.feature_parts * head.feature_size;
    const Precision precision = data.fc.precision;
    for_rows(cpu::prepared_rows(rows_), width, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < std::min(end, rows_); ++row) {
        const float* in = hidden[static_cast<std::size_t>(row)];
        float* out = normed_ + row * width;
        const std::int64_t parts = head.part_norms ? head.feature_parts : 1;
        for (std::int64_t p = 0; p < parts; ++p) {
          const float* weight =
              head.part_norms ? data.part_norms[static_cast<std::size_t>(p)] : data.input_norm;
          const std::int64_t share = width / parts;
          // With both, the parts are normed out of what the norm of all has made.
          if (head.part_norms && data.input_norm != nullptr && p == 0) {
            normalise(in, width, data.input_norm, Precision::f32, out);
            in = out;
          }
          normalise(in + p * share, share, weight, precision, out + p * share);
        }
      }
      prepare(precision, normed_, rows_, width, begin, end);
    });
    gemm(data.fc, data.fc_bias, normed_, rows_, x_, size, Add::no, cpu::Gate::none);
  } else {
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float* in = hidden[static_cast<std::size_t>(row)];
      std::copy(in, in + size, x_ + row * size);
    }
  }
  embed(embedded_);
  const LayerWeights& first = data.layers.front();
  const Precision precision = first.qkv.precision;
  for_rows(cpu::prepared_rows(rows_), 2 * size, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < std::min(end, rows_); ++row) {
      float* out = normed_ + row * 2 * size;
      float* state = x_ + row * size;
      normalise(embedded_ + row * size, size, first.attention_norm, precision, out);
      normalise(state, size, data.hidden_norm, precision, out + size);
      if (head.norm_before_residual) {
        normalise(state, size, data.hidden_norm, Precision::f32, state);
      }
    }
    prepare(precision, normed_, rows_, 2 * size, begin, end);
  });
}

void Runner::forward_head(std::span<const float* const> hidden, std::span<float* const> out,
                          bool recycled) {
  if (rows_ == 0) return;
  const HeadConfig& head = model_.config().head;
  if (head.kind == HeadKind::none || std::ssize(hidden) != rows_ || std::ssize(out) > rows_) {
    throw InternalError(expected_got("head", "a draft head and a hidden state for each row",
                                     std::to_string(hidden.size())));
  }
  if (cuda_ != nullptr) {
    PassRows pass = pass_rows();
    pass.hidden = hidden;
    pass.outputs = out;
    cuda_->forward_head(pass, cache_, recycled);
    return;
  }
  plan_attention();
  if (head.kind == HeadKind::fused) {
    fuse(hidden);
  } else {
    combine(hidden, recycled);
  }
  for (std::int64_t i = 0; i < model_.config().num_layers; ++i) layer(i);
  for (std::size_t row = 0; row < out.size(); ++row) {
    if (out[row] != nullptr) output_hidden(static_cast<std::int64_t>(row), out[row]);
  }
}

void Runner::forward_level(std::span<float* const> out, const LevelGrowth& growth) {
  if (rows_ == 0) return;
  if (cuda_ == nullptr) throw InternalError("[head] a level that grows on a device, without one");
  PassRows pass = pass_rows();
  pass.outputs = out;
  pass.growth = &growth;
  cuda_->forward_head(pass, cache_, true);
}

void Runner::check_features(const FeatureRows& from) const {
  if (cuda_ != nullptr) cuda_->copies().check(from);
}

void Runner::copy_features(const FeatureRows& from, std::int64_t i, float* to) {
  if (cuda_ != nullptr) {
    cuda_->copies().add_features(from, i, to, cuda_->stream());
  } else {
    from.copy(i, to);
  }
}

void Runner::copy_state(const float* from, float* to) {
  const std::int64_t size = model_.config().hidden_size;
  if (cuda_ != nullptr) {
    cuda_->copies().add(from, to, size, cuda_->stream());
  } else {
    std::copy(from, from + size, to);
  }
}

void Runner::settle_states() {
  if (cuda_ != nullptr) cuda_->copies().flush(cuda_->stream());
}

void Runner::output_hidden(std::int64_t row, float* out) const {
  const std::int64_t size = model_.config().hidden_size;
  const float* weight = model_.config().head.norm_output ? model_.data().norm : nullptr;
  normalise(x_ + row * size, size, weight, Precision::f32, out);
}

}  // namespace specrt
