#include "cpu/quantise.h"

#include <algorithm>
#include <cmath>

#include "cpu/pack.h"

namespace specrt::cpu {
namespace {

/// To the nearest whole number, ties to even; |x| < 2^22. Compilers vectorise it everywhere.
inline float whole(float x) {
  constexpr float kMagic = 0x1.8p23f;
  return (x + kMagic) - kMagic;
}

inline float as_half(float x) { return half_to_float(float_to_half(x)); }

// A group is eight of these: sums run in four lanes, in one order on every machine.
typedef float Lanes __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kParts = static_cast<int>(kGroup) / kLanes;

inline float sum_of(const Lanes& x) { return (x[0] + x[2]) + (x[1] + x[3]); }

/// The weights of a group, and what each counts: nothing beyond the group's end.
struct Weights {
  Lanes w[kParts] = {};
  Lanes importance[kParts] = {};
};

struct Group {
  float scale = 0.0f;
  float minimum = 0.0f;
  float error = 0.0f;
  Lanes codes[kParts] = {};
};

/// Codes for a scale and minimum that fp16 can hold, and the squared error that they leave.
void encode(const Weights& group, float scale, float minimum, Group& out) {
  out.scale = as_half(scale);
  out.minimum = as_half(minimum);
  const float inverse = out.scale > 0.0f ? 1.0f / out.scale : 0.0f;
  constexpr float kMagic = 0x1.8p23f;
  Lanes error = {};
  for (int i = 0; i < kParts; ++i) {
    Lanes code = (((group.w[i] - out.minimum) * inverse) + kMagic) - kMagic;
    code = code > 0.0f ? code : Lanes{};
    code = code < 15.0f ? code : Lanes{} + 15.0f;
    const Lanes off = code * out.scale + out.minimum - group.w[i];
    out.codes[i] = code;
    error += group.importance[i] * off * off;
  }
  out.error = sum_of(error);
}

/// The scale and minimum that fit given codes best (least squares).
bool fit(const Weights& group, const Group& from, float& scale, float& minimum) {
  Lanes count = {}, q = {}, qq = {}, w = {}, qw = {};
  for (int i = 0; i < kParts; ++i) {
    const Lanes weighted = group.importance[i] * from.codes[i];
    count += group.importance[i];
    q += weighted;
    qq += weighted * from.codes[i];
    w += group.importance[i] * group.w[i];
    qw += weighted * group.w[i];
  }
  const float sum = sum_of(count), sum_q = sum_of(q), sum_qq = sum_of(qq);
  const float sum_w = sum_of(w), sum_qw = sum_of(qw);
  const float determinant = sum * sum_qq - sum_q * sum_q;
  // Where one weight counts for nearly all, what is left of the difference is rounding.
  if (!(determinant > 1e-5f * sum * sum_qq)) return false;
  scale = (sum * sum_qw - sum_q * sum_w) / determinant;
  minimum = (sum_w - scale * sum_q) / sum;
  return scale > 0.0f;
}

Group quantise_group(const float* w, const float* importance, std::int64_t count) {
  const auto [low, high] = std::minmax_element(w, w + count);
  Weights group;
  for (std::int64_t i = 0; i < kGroup; ++i) {
    group.w[i / kLanes][i % kLanes] = i < count ? w[i] : *low;
    group.importance[i / kLanes][i % kLanes] = i < count ? importance[i] : 0.0f;
  }
  Group best;
  encode(group, (*high - *low) / 15.0f, *low, best);
  // Clipping the ends a little, or leaving room, often costs them less than it gives the rest.
  constexpr float kRanges[] = {13.5f, 14.0f, 14.5f, 15.0f, 15.5f};
  for (const float range : kRanges) {
    Group tried;
    const float middle = 0.5f * (*high + *low);
    const float scale = (*high - *low) / range;
    encode(group, scale, middle - 7.5f * scale, tried);
    for (int again = 0; again < 2; ++again) {
      float better_scale = 0.0f, better_minimum = 0.0f;
      if (!fit(group, tried, better_scale, better_minimum)) break;
      encode(group, better_scale, better_minimum, tried);
      if (tried.error < best.error) best = tried;
    }
  }
  return best;
}

}  // namespace

bool quantise_int8(const float* weights, std::int64_t k, std::int8_t* codes, float& scale) {
  float most = 0.0f;
  bool finite = true;
  for (std::int64_t i = 0; i < k; ++i) {
    most = std::max(most, std::fabs(weights[i]));
    finite = finite && std::isfinite(weights[i]);
  }
  if (!finite) return false;
  scale = most / 127.0f;
  // A scale that underflows would make infinite codes.
  const float inverse = scale > 1e-36f ? 1.0f / scale : 0.0f;
  for (std::int64_t i = 0; i < k; ++i) {
    const float code = std::clamp(whole(weights[i] * inverse), -127.0f, 127.0f);
    codes[i] = static_cast<std::int8_t>(code);
  }
  return true;
}

bool quantise_int4(const float* weights, std::int64_t k, const float* importance,
                   std::int8_t* codes, float* scales, float* minima) {
  float counts[kGroup];
  std::fill(counts, counts + kGroup, 1.0f);
  for (std::int64_t i = 0; i < k; ++i) {
    // What rounds to a finite fp16, twice over: scales come from differences.
    if (!(std::fabs(weights[i]) < 30000.0f)) return false;
  }
  for (std::int64_t first = 0, group = 0; first < k; first += kGroup, ++group) {
    const std::int64_t count = std::min(kGroup, k - first);
    if (importance != nullptr) {
      // A little for every input: an estimate of nothing need not be right.
      const float most = *std::max_element(importance + first, importance + first + count);
      for (std::int64_t i = 0; i < count; ++i) {
        counts[i] = most > 0.0f ? importance[first + i] / most + 1e-4f : 1.0f;
      }
    }
    const Group made = quantise_group(weights + first, counts, count);
    scales[group] = made.scale;
    minima[group] = made.minimum;
    for (std::int64_t i = 0; i < count; ++i) {
      codes[first + i] = static_cast<std::int8_t>(made.codes[i / kLanes][i % kLanes]);
    }
  }
  return true;
}

bool quantise_compensated(const float* weights, std::int64_t width, const float* factor,
                          std::int8_t* codes, float& scale, float& minimum, float* errors) {
  float importance[kGroup];
  float current[kGroup];
  for (std::int64_t c = 0; c < width; ++c) {
    // What is left of an error in c once the inputs behind it have done their best.
    const float diagonal = factor[c * width + c];
    importance[c] = 1.0f / (diagonal * diagonal);
    current[c] = weights[c];
  }
  if (!quantise_int4(weights, width, importance, codes, &scale, &minimum)) return false;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (std::int64_t c = 0; c < width; ++c) {
    if (!(std::fabs(current[c]) < 30000.0f)) return false;
    const float code = std::clamp(whole((current[c] - minimum) * inverse), 0.0f, 15.0f);
    const float meant = code * scale + minimum;
    codes[c] = static_cast<std::int8_t>(code);
    errors[c] = (current[c] - meant) / factor[c * width + c];
    for (std::int64_t later = c + 1; later < width; ++later) {
      current[later] -= errors[c] * factor[c * width + later];
    }
  }
  return true;
}

}  // namespace specrt::cpu
