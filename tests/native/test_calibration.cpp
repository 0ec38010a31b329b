// One layer traced by itself, and int4 that makes up for its errors.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "specrt/calibration.h"
#include "specrt/error.h"
#include "tiny_model.h"

using Floats = std::vector<float>;

namespace {

Floats stream_of(std::int64_t rows, std::int64_t hidden) {
  Floats stream(static_cast<std::size_t>(rows * hidden));
  for (std::size_t i = 0; i < stream.size(); ++i) {
    stream[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i * i % 1009)));
  }
  return stream;
}

}  // namespace

TEST(trace_layer_shows_what_matrices_read) {
  tiny::Spec spec = tiny::small_spec();
  spec.layers = 1;
  const specrt::Model model = tiny::random_model(spec);
  const tiny::Tensors tensors = tiny::random_tensors(spec);
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  const auto ffn = static_cast<std::size_t>(spec.ffn);
  const std::size_t rows = 19;
  const Floats stream = stream_of(rows, spec.hidden);
  const specrt::LayerTrace trace = specrt::trace_layer(model, stream);
  CHECK_EQ(trace.attention.size(), rows * hidden);
  CHECK_EQ(trace.output.size(), rows * static_cast<std::size_t>(spec.heads * spec.head_dim));
  CHECK_EQ(trace.mlp.size(), rows * hidden);
  CHECK_EQ(trace.down.size(), rows * ffn);
  CHECK_EQ(trace.stream.size(), rows * hidden);
  const Floats& norm = tensors.at("layers.0.attention_norm");
  const Floats& o = tensors.at("layers.0.attention.o");
  const Floats& down = tensors.at("layers.0.mlp.down");
  const std::size_t attended = trace.output.size() / rows;
  for (std::size_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (std::size_t c = 0; c < hidden; ++c) {
      squares += double{stream[r * hidden + c]} * double{stream[r * hidden + c]};
    }
    const double unit = std::sqrt(squares / static_cast<double>(hidden) + model.config().norm_eps);
    for (std::size_t c = 0; c < hidden; ++c) {
      const double in = stream[r * hidden + c];
      CHECK_NEAR(trace.attention[r * hidden + c], in / unit * norm[c], 1e-4);
      // What the two blocks add to the stream.
      double out = in;
      for (std::size_t i = 0; i < attended; ++i) {
        out += double{o[c * attended + i]} * trace.output[r * attended + i];
      }
      for (std::size_t i = 0; i < ffn; ++i) {
        out += double{down[c * ffn + i]} * trace.down[r * ffn + i];
      }
      CHECK_NEAR(trace.stream[r * hidden + c], out, 1e-3);
    }
  }
  // The first positions do not know of those behind.
  const specrt::LayerTrace first = specrt::trace_layer(model, std::span(stream).first(7 * hidden));
  CHECK(std::equal(first.stream.begin(), first.stream.end(), trace.stream.begin()));
}

TEST(trace_layer_refuses) {
  const specrt::Model two = tiny::random_model(tiny::small_spec());
  CHECK_THROWS(specrt::trace_layer(two, Floats(64)), specrt::InvalidArgument, "one layer");
  tiny::Spec spec = tiny::small_spec();
  spec.layers = 1;
  spec.max_positions = 4;
  const specrt::Model model = tiny::random_model(spec);
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  for (const std::size_t size : {std::size_t{0}, hidden - 1, hidden * 5}) {
    CHECK_THROWS(specrt::trace_layer(model, Floats(size)), specrt::InvalidArgument, "[stream]");
  }
}

TEST(errors_are_made_up_for) {
  // Pairs of inputs that nearly always agree: only the sum of their weights counts, and one of two
  // errors is left.
  constexpr std::size_t kWidth = 32;
  Floats weights(40 * kWidth);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double at = 1.7 * static_cast<double>(i * i % 2003);
    weights[i] = static_cast<float>(std::cos(at) + std::cos(3.3 * at) + std::cos(7.1 * at));
  }
  // Inverse moments of pairs with correlation 0.95, up to a factor.
  Floats factor(kWidth * kWidth), unit(kWidth * kWidth);
  for (std::size_t c = 0; c < kWidth; ++c) unit[c * kWidth + c] = 1.0f;
  for (std::size_t c = 0; c < kWidth; c += 2) {
    factor[c * kWidth + c] = 1.0f;
    factor[c * kWidth + c + 1] = -0.95f;
    factor[(c + 1) * kWidth + c + 1] = std::sqrt(1.0f - 0.95f * 0.95f);
  }
  const auto error_of_sums = [&](const specrt::CompensatedGroup& made) {
    double total = 0.0;
    for (std::size_t i = 0; i < weights.size(); i += 2) {
      const std::size_t row = i / kWidth;
      const auto value = [&](std::size_t at) {
        CHECK(made.codes[at] >= 0 && made.codes[at] <= 15);
        return double{made.scales[row]} * made.codes[at] + made.minima[row] - weights[at];
      };
      const double off = value(i) + value(i + 1);
      total += off * off;
    }
    return total;
  };
  const double plain = error_of_sums(specrt::quantise_compensated(weights, unit));
  const double better = error_of_sums(specrt::quantise_compensated(weights, factor));
  CHECK(better < 0.85 * plain);
}

TEST(quantise_compensated_refuses) {
  const Floats unit{1, 0, 0, 1};
  const auto refused = [](const Floats& weights, const Floats& factor, const char* what) {
    CHECK_THROWS(specrt::quantise_compensated(weights, factor), specrt::InvalidArgument, what);
  };
  refused({1, 2, 3}, unit, "[group]");
  refused({1, 2}, {1, 0, 0}, "[group]");
  refused({1, 2}, {}, "[group]");
  refused({1, 2}, {1, 0, 0, 0}, "[factor]");
  refused({1, 2}, {-1, 0, 0, 1}, "[factor]");
  refused({1, std::numeric_limits<float>::quiet_NaN()}, unit, "[weights]");
  refused({1, 40000}, unit, "[weights]");
}
