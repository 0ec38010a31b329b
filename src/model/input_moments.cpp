#include "model/input_moments.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "model/parallel_rows.h"

namespace specrt {
namespace {

// Attention averages values, so that what they do not share shrinks. How far matters little.
constexpr double kAveraging = 0.3;
// Rows of the embedding that are read.
constexpr std::int64_t kSample = 8192;

double mean(const std::vector<double>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return sum / static_cast<double>(values.size());
}

/// E[f(x)^2] of a normal x with mean square s. silu and gelu(tanh) run from x / 2 to max(0, x):
/// from s / 4 to s / 2; the constants make s = 1 right.
double activated(Activation activation, double s) {
  const double knee = activation == Activation::silu ? 1.3635 : 0.427;
  return s * (0.25 + 0.25 * s / (s + knee));
}

}  // namespace

InputMoments::Values InputMoments::outputs(std::int64_t n, std::int64_t k, const ReadRow& read,
                                           const Values& inputs) const {
  if (std::ssize(inputs) != k) return {};
  Values sums(static_cast<std::size_t>(n));
  parallel_rows(n, n * k, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> row(static_cast<std::size_t>(k));
    for (std::int64_t r = begin; r < end; ++r) {
      read(r, row.data());
      // Four sums, so that additions need not wait for one another.
      double parts[4] = {};
      for (std::size_t c = 0; c < row.size(); ++c) {
        const double weight = row[c];
        parts[c % 4] += weight * weight * inputs[c];
      }
      sums[static_cast<std::size_t>(r)] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
  });
  return sums;
}

/// What a block's matrices read: the residual stream, normed where there is a norm in front.
InputMoments::Values InputMoments::block_input(const Values& norm) const {
  if (config_.norm_placement == NormPlacement::post || residual_.empty()) return residual_;
  const double unit = mean(residual_);
  if (norm.size() != residual_.size() || !(unit > 0.0)) return {};
  Values result(residual_.size());
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = norm[i] * residual_[i] / unit;
  return result;
}

InputMoments::Values InputMoments::attention_output() const {
  const auto dim = static_cast<std::size_t>(config_.head_dim);
  const auto group = static_cast<std::size_t>(config_.num_heads / config_.num_kv_heads);
  if (value_.size() != static_cast<std::size_t>(config_.num_kv_heads) * dim) return {};
  Values result;
  result.reserve(value_.size() * group);
  for (std::size_t head = 0; head < static_cast<std::size_t>(config_.num_heads); ++head) {
    for (std::size_t i = 0; i < dim; ++i) {
      result.push_back(kAveraging * value_[head / group * dim + i]);
    }
  }
  return result;
}

InputMoments::Values InputMoments::mlp_inner() const {
  if (gate_.size() != up_.size()) return {};
  Values result(gate_.size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = activated(config_.activation, gate_[i]) * up_[i];
  }
  return result;
}

void InputMoments::add_to_residual(Values output, const Values& post_norm) {
  if (output.size() != residual_.size()) {
    residual_.clear();
    return;
  }
  double unit = 1.0;
  const bool normed = config_.norm_placement != NormPlacement::pre;
  if (normed) {
    unit = mean(output);
    if (post_norm.size() != output.size() || !(unit > 0.0)) return;
  }
  const double scale = config_.residual_scale * config_.residual_scale / unit;
  for (std::size_t i = 0; i < output.size(); ++i) {
    residual_[i] += scale * output[i] * (normed ? post_norm[i] : 1.0);
  }
}

std::vector<float> InputMoments::inputs_of(const std::string& name) const {
  const std::string part = name.substr(name.rfind('.') + 1);
  const bool attention = name.find(".attention.") != std::string::npos;
  Values found;
  if (attention && (part == "q" || part == "k" || part == "v")) {
    found = block_input(attention_norm_);
  } else if (attention && part == "o") {
    found = attention_output();
  } else if (part == "gate" || part == "up") {
    found = block_input(mlp_norm_);
  } else if (part == "down") {
    found = mlp_inner();
  }
  const double most = found.empty() ? 0.0 : *std::max_element(found.begin(), found.end());
  if (!(most > 0.0) || !std::isfinite(most)) return {};
  std::vector<float> result(found.size());
  for (std::size_t i = 0; i < found.size(); ++i) result[i] = static_cast<float>(found[i] / most);
  return result;
}

void InputMoments::observe(const std::string& name, std::int64_t n, std::int64_t k,
                           const ReadRow& read) {
  const std::string part = name.substr(name.rfind('.') + 1);
  const bool attention = name.find(".attention.") != std::string::npos;
  const std::pair<const char*, Values*> norms[] = {{"attention_norm", &attention_norm_},
                                                   {"attention_post_norm", &attention_post_norm_},
                                                   {"mlp_norm", &mlp_norm_},
                                                   {"mlp_post_norm", &mlp_post_norm_}};
  for (const auto& [norm, values] : norms) {
    if (part == norm) *values = outputs(n, k, read, {1.0});
  }
  if (part == "embedding") {
    residual_.assign(static_cast<std::size_t>(k), 0.0);
    std::vector<float> row(static_cast<std::size_t>(k));
    const std::int64_t step = (n + kSample - 1) / kSample;
    for (std::int64_t r = 0; r < n; r += step) {
      read(r, row.data());
      for (std::size_t c = 0; c < row.size(); ++c) residual_[c] += double{row[c]} * double{row[c]};
    }
    const double rows = static_cast<double>((n + step - 1) / step);
    const double scale = config_.embedding_scale * config_.embedding_scale / rows;
    for (double& value : residual_) value *= scale;
  } else if (attention && part == "v") {
    value_ = outputs(n, k, read, block_input(attention_norm_));
  } else if (attention && part == "o") {
    add_to_residual(outputs(n, k, read, attention_output()), attention_post_norm_);
  } else if (part == "gate") {
    gate_ = outputs(n, k, read, block_input(mlp_norm_));
  } else if (part == "up") {
    up_ = outputs(n, k, read, block_input(mlp_norm_));
  } else if (part == "down") {
    add_to_residual(outputs(n, k, read, mlp_inner()), mlp_post_norm_);
  }
}

}  // namespace specrt
