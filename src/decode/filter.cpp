#include "decode/filter.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace specrt {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Floors below the highest logit, in units of the temperature, until one has enough above it. No
// weight is left below the last: exp(-87.4) is no normal float any more.
constexpr float kFloors[] = {2.0f, 6.0f, 20.0f, 88.0f};
// Halvings by value before those by representation, of which 32 always come to an end.
constexpr int kByValue = 12;
// What is left between two floors is looked at by itself once it is this small a part.
constexpr std::int64_t kNear = 16;

// Floats in order, as integers.
std::int64_t place(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  return bits >= 0 ? bits : -std::int64_t{bits & 0x7FFFFFFF};
}
float at_place(std::int64_t place) {
  const auto bits = static_cast<std::uint32_t>(place >= 0 ? place : -place);
  return std::bit_cast<float>(place >= 0 ? bits : bits | 0x80000000u);
}

float between(float low, float high, int step) {
  const float middle = low / 2.0f + high / 2.0f;
  if (step < kByValue && low < middle && middle < high) return middle;
  return at_place(place(low) + (place(high) - place(low)) / 2);
}

// The least float that is not below x.
float not_below(double x) {
  const auto near = static_cast<float>(x);
  return double{near} < x ? std::nextafter(near, kInfinity) : near;
}

}  // namespace

Filter::Filter(const cpu::Kernels& kernels, std::int64_t vocab_size)
    : kernels_(&kernels),
      ids_(static_cast<std::size_t>(vocab_size)),
      logits_(ids_.size()),
      weights_(ids_.size()),
      picked_(ids_.size()),
      near_logits_(ids_.size() / kNear),
      near_weights_(near_logits_.size()) {}

std::int64_t Filter::bytes_for(std::int64_t vocab_size) {
  return vocab_size * 16 + vocab_size / kNear * 8;
}

bool Filter::wanted(const SamplingParams& params, std::int64_t vocab_size) {
  return (params.top_k > 0 && params.top_k < vocab_size) || params.top_p < 1.0 ||
         params.min_p > 0.0;
}

std::span<const std::int32_t> Filter::pick(const float* values, std::int64_t size, float low,
                                           float high) {
  const std::int64_t count = kernels_->ids_between(values, size, low, high, picked_.data());
  return {picked_.data(), static_cast<std::size_t>(count)};
}

// The highest floor with at least `wanted` above it: of weight, or of entries where there are no
// weights.
Filter::Cut Filter::find(const float* logits, const float* weights, std::int64_t size, float max,
                         float scale, double wanted) {
  const auto worth = [&](const cpu::Share& share) {
    return weights != nullptr ? share.sum : static_cast<double>(share.count);
  };
  const float* const all = logits;
  float low = max;
  float high = std::nextafter(max, kInfinity);
  cpu::Share above;  // of everything from `high` up: less than wanted
  cpu::Share below;  // from `low` up: enough
  bool found = false;
  for (const float floor : kFloors) {
    low = std::max(max - floor * scale, std::numeric_limits<float>::lowest());
    below = kernels_->share_from(logits, weights, size, low);
    found = worth(below) >= wanted;
    if (found) break;
    high = low;
    above = below;
  }
  if (!found) return {nullptr, 0.0f};
  cpu::Share before;  // what lies above all that is still looked at
  for (int step = 0; below.count - above.count > 1; ++step) {
    const float middle = between(low, high, step);
    if (!(low < middle && middle < high)) {
      // All that is left between the floors is equal.
      const std::int64_t ties = below.count - above.count;
      const double each = (worth(below) - worth(above)) / static_cast<double>(ties);
      const double most = std::ceil((wanted - worth(above)) / each);
      if (!(most < static_cast<double>(ties))) break;
      return {all, low, std::max<std::int64_t>(1, static_cast<std::int64_t>(most))};
    }
    if ((below.count - above.count) * kNear <= size) {
      const std::span<const std::int32_t> places = pick(logits, size, low, high);
      for (std::size_t i = 0; i < places.size(); ++i) {
        near_logits_[i] = logits[places[i]];
        if (weights != nullptr) near_weights_[i] = weights[places[i]];
      }
      logits = near_logits_.data();
      if (weights != nullptr) weights = near_weights_.data();
      size = static_cast<std::int64_t>(places.size());
      before = above;
    }
    cpu::Share share = kernels_->share_from(logits, weights, size, middle);
    share.sum += before.sum;
    share.count += before.count;
    if (worth(share) >= wanted) {
      low = middle;
      below = share;
    } else {
      high = middle;
      above = share;
    }
  }
  return {all, low};
}

// What of `row`, which may be what was left before, the cut leaves.
void Filter::take(const Row& row, const Cut& cut) {
  const auto places = pick(cut.values, row.size, cut.floor, kInfinity);
  std::int64_t ties = 0;
  std::size_t count = 0;
  for (const std::int32_t at : places) {
    if (cut.ties >= 0 && cut.values[at] == cut.floor && ++ties > cut.ties) continue;
    ids_[count] = row.ids != nullptr ? row.ids[at] : at;
    logits_[count] = row.logits[at];
    weights_[count] = row.weights[at];
    ++count;
  }
  count_ = count;
}

void Filter::apply(std::span<const float> logits, std::span<const float> weights, float max,
                   double sum, const SamplingParams& params) {
  Row row{logits.data(), weights.data(), nullptr, static_cast<std::int64_t>(logits.size())};
  const auto scale = static_cast<float>(params.temperature);
  const auto keep = [&](Cut cut) {
    if (cut.values == nullptr) cut = {row.weights, std::numeric_limits<float>::denorm_min()};
    take(row, cut);
    row = {logits_.data(), weights_.data(), ids_.data(), static_cast<std::int64_t>(count_)};
  };
  if (params.top_k > 0 && params.top_k < row.size) {
    keep(find(row.logits, nullptr, row.size, max, scale, static_cast<double>(params.top_k)));
    sum = kernels_->share_from(row.weights, row.weights, row.size, 0.0f).sum;
  }
  if (params.top_p < 1.0) {
    // A token stays while those before it weigh less than top_p.
    keep(find(row.logits, row.weights, row.size, max, scale, params.top_p * sum));
  }
  // Relative to the most likely token, whose weight is exactly 1.
  if (params.min_p > 0.0) keep({row.weights, not_below(params.min_p)});
}

std::span<const std::int32_t> Filter::most_likely(std::span<const float> logits, float max,
                                                  std::int64_t count) {
  const auto size = static_cast<std::int64_t>(logits.size());
  count = std::min(count, size);
  Cut cut = find(logits.data(), nullptr, size, max, 1.0f, static_cast<double>(count));
  // Also those that are next to impossible, where they are asked for.
  if (cut.values == nullptr) cut = {logits.data(), -kInfinity};
  take({logits.data(), logits.data(), nullptr, size}, cut);
  const std::span<std::int32_t> found(ids_.data(), count_);
  std::sort(found.begin(), found.end(), [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  });
  return found.first(static_cast<std::size_t>(std::min<std::int64_t>(count, std::ssize(found))));
}

}  // namespace specrt
