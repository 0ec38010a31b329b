// Packed matrices: what they stand for, and how weights are quantised.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/quantise.h"
#include "specrt/error.h"
#include "specrt/model.h"
#include "test_kernels_support.h"
#include "tiny_model.h"

using namespace kernel_test;
using specrt::QuantisedTensor;
using specrt::cpu::kPanel;
using specrt::cpu::PackedRows;

namespace {

struct Shape {
  std::int64_t n, k;
};
const Shape kShapes[] = {{1, 1}, {5, 3}, {32, 64}, {33, 7}, {96, 65}, {70, 129}};

float half(float x) { return specrt::cpu::half_to_float(specrt::cpu::float_to_half(x)); }

Floats unpacked(const std::vector<std::byte>& packed, Precision precision, std::int64_t k,
                std::int64_t row) {
  Floats out(static_cast<std::size_t>(k), -7.0f);
  specrt::cpu::unpack_row(packed.data(), precision, k, row, out.data());
  return out;
}

std::vector<std::byte> room_for(std::int64_t n, std::int64_t k, Precision precision) {
  return std::vector<std::byte>(
      static_cast<std::size_t>(specrt::cpu::packed_bytes(n, k, precision)));
}

}  // namespace

TEST(pack_round_trip) {
  for (const DType from : {DType::f32, DType::bf16}) {
    for (const Precision to : {Precision::f32, Precision::bf16, Precision::f16}) {
      for (const Shape shape : kShapes) {
        Floats weight = random_floats(static_cast<std::size_t>(shape.n * shape.k), 15);
        std::vector<std::uint16_t> halves;
        if (from == DType::bf16) {
          weight = rounded_to_bf16(weight);
          for (const float value : weight) halves.push_back(specrt::cpu::float_to_bf16(value));
        }
        const std::int64_t panels = (shape.n + kPanel - 1) / kPanel;
        std::vector<std::byte> packed = room_for(shape.n, shape.k, to);
        CHECK_EQ(std::ssize(packed), to == Precision::f32
                                         ? panels * shape.k * kPanel * 4
                                         : panels * ((shape.k + 1) / 2) * kPanel * 4);
        // In two calls that meet inside a panel.
        const std::int64_t first = shape.n / 3;
        const auto* source = from == DType::f32 ? reinterpret_cast<const std::byte*>(weight.data())
                                                : reinterpret_cast<const std::byte*>(halves.data());
        specrt::cpu::pack_rows(source, from, first, shape.k, to, {}, packed.data());
        specrt::cpu::pack_rows(
            source + first * shape.k * static_cast<std::int64_t>(specrt::size_of(from)), from,
            shape.n - first, shape.k, to, {first}, packed.data());
        if (to == Precision::bf16) weight = rounded_to_bf16(weight);
        if (to == Precision::f16)
          std::transform(weight.begin(), weight.end(), weight.begin(), half);
        for (std::int64_t row = 0; row < panels * kPanel; ++row) {
          const Floats out = unpacked(packed, to, shape.k, row);
          if (row < shape.n) {
            CHECK(same_bits(out.data(), weight.data() + row * shape.k, out.size()));
          } else {
            for (const float value : out) CHECK_EQ(value, 0.0f);
          }
        }
      }
    }
  }
}

TEST(pack_rows_of_two_matrices_in_turn) {
  const std::int64_t n = 45;
  const std::int64_t k = 9;
  for (const Precision precision : kPrecisions) {
    std::vector<std::byte> packed = room_for(4 * kPanel, k, precision);
    Floats halves[2];
    for (std::int64_t i = 0; i < 2; ++i) {
      halves[i] = random_floats(static_cast<std::size_t>(n * k), 16 + static_cast<unsigned>(i));
      specrt::cpu::pack_rows(halves[i].data(), DType::f32, n, k, precision, {0, 2, i},
                             packed.data());
    }
    for (std::int64_t i = 0; i < 2; ++i) {
      std::vector<std::byte> alone = room_for(n, k, precision);
      specrt::cpu::pack_rows(halves[i].data(), DType::f32, n, k, precision, {}, alone.data());
      for (std::int64_t r = 0; r < n; ++r) {
        const std::int64_t at = (r / kPanel * 2 + i) * kPanel + r % kPanel;
        CHECK((PackedRows{0, 2, i}.row(r)) == at);
        CHECK(unpacked(packed, precision, k, at) == unpacked(alone, precision, k, r));
      }
    }
  }
}

TEST(pack_codes_stand_for_their_definition) {
  const std::int64_t n = 37;
  const std::int64_t k = 75;
  const std::int64_t groups = 3;
  for (const Precision precision : {Precision::int8, Precision::int4, Precision::w8a8}) {
    for (const bool zero_points : {false, true}) {
      const bool int4 = precision == Precision::int4;
      if (zero_points && !int4) continue;
      std::mt19937 engine(5);
      std::vector<std::int8_t> codes(static_cast<std::size_t>(n * k));
      for (auto& code : codes) {
        const int value =
            int4 ? static_cast<int>(engine() % 16) : static_cast<int>(engine() % 256) - 128;
        code = static_cast<std::int8_t>(value);
      }
      Floats scales = random_floats(static_cast<std::size_t>(n * groups), 6, 0.01f);
      Floats minima = random_floats(static_cast<std::size_t>(n * groups), 7, 0.1f);
      for (std::size_t i = 0; i < scales.size(); ++i) {
        scales[i] = half(std::fabs(scales[i]));
        minima[i] = zero_points ? -static_cast<float>(i % 16) : half(minima[i]);
      }
      QuantisedTensor tensor;
      tensor.precision = precision;
      tensor.codes = codes.data();
      tensor.scales = scales.data();
      tensor.minima = int4 ? minima.data() : nullptr;
      tensor.zero_points = zero_points;
      std::vector<std::byte> packed = room_for(n, k, precision);
      specrt::cpu::pack_codes(tensor, n, k, {}, packed.data());
      for (std::int64_t r = 0; r < n; ++r) {
        const Floats row = unpacked(packed, precision, k, r);
        for (std::int64_t c = 0; c < k; ++c) {
          const auto code = static_cast<float>(codes[r * k + c]);
          const std::int64_t g = r * groups + c / 32;
          const float expected = !int4         ? scales[r] * code
                                 : zero_points ? scales[g] * (code + minima[g])
                                               : scales[g] * code + minima[g];
          CHECK_EQ(row[c], expected);
        }
      }
    }
  }
}

TEST(quantise_int8_is_to_the_nearest) {
  Floats weights = random_floats(300, 8, 0.03f);
  weights[17] = -0.5f;
  std::vector<std::int8_t> codes(weights.size());
  float scale = 0.0f;
  CHECK(specrt::cpu::quantise_int8(weights.data(), std::ssize(weights), codes.data(), scale));
  CHECK_EQ(scale, 0.5f / 127.0f);
  CHECK_EQ(static_cast<int>(codes[17]), -127);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    CHECK(std::fabs(weights[i] - scale * codes[i]) <= 0.5001f * scale);
  }
  std::fill(weights.begin(), weights.end(), 0.0f);
  CHECK(specrt::cpu::quantise_int8(weights.data(), 40, codes.data(), scale));
  CHECK_EQ(scale, 0.0f);
  for (int i = 0; i < 40; ++i) CHECK_EQ(static_cast<int>(codes[i]), 0);
  weights[3] = std::numeric_limits<float>::quiet_NaN();
  CHECK(!specrt::cpu::quantise_int8(weights.data(), 40, codes.data(), scale));
}

TEST(quantise_int4_is_no_worse_than_plain_rounding) {
  for (const std::int64_t k : {1, 31, 32, 50, 320}) {
    const Floats weights = random_floats(static_cast<std::size_t>(k), 9, 0.05f);
    std::vector<std::int8_t> codes(static_cast<std::size_t>(k));
    const auto groups = static_cast<std::size_t>((k + 31) / 32);
    Floats scales(groups), minima(groups);
    CHECK(specrt::cpu::quantise_int4(weights.data(), k, nullptr, codes.data(), scales.data(),
                                     minima.data()));
    double error = 0.0;
    double plain = 0.0;
    for (std::size_t g = 0; g < groups; ++g) {
      const auto first = weights.begin() + static_cast<std::ptrdiff_t>(32 * g);
      const auto last = weights.begin() + std::min<std::ptrdiff_t>(k, 32 * (g + 1));
      const auto [low, high] = std::minmax_element(first, last);
      const float step = half((*high - *low) / 15.0f);
      CHECK_EQ(half(scales[g]), scales[g]);
      CHECK_EQ(half(minima[g]), minima[g]);
      for (auto w = first; w != last; ++w) {
        const auto code = static_cast<float>(codes[static_cast<std::size_t>(w - weights.begin())]);
        CHECK(code >= 0.0f && code <= 15.0f);
        error += std::pow(scales[g] * code + minima[g] - *w, 2.0);
        const float rounded =
            step > 0 ? std::clamp(std::nearbyint((*w - half(*low)) / step), 0.0f, 15.0f) : 0.0f;
        plain += std::pow(rounded * step + half(*low) - *w, 2.0);
      }
    }
    CHECK(error <= plain * 1.0001 + 1e-12);
    if (k >= 320) CHECK(error < 0.9 * plain);
  }
  // Weights that lie on a grid come back as they were.
  Floats grid(64);
  for (std::size_t i = 0; i < grid.size(); ++i) {
    grid[i] = 0.125f * static_cast<float>(i * 7 % 16) - 0.5f;
  }
  std::vector<std::int8_t> codes(64);
  Floats scales(2), minima(2);
  CHECK(specrt::cpu::quantise_int4(grid.data(), 64, nullptr, codes.data(), scales.data(),
                                   minima.data()));
  for (std::size_t i = 0; i < grid.size(); ++i) {
    CHECK_EQ(scales[i / 32] * codes[i] + minima[i / 32], grid[i]);
  }
}

TEST(half_precision_conversions) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const float value = specrt::cpu::half_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      CHECK(std::isnan(specrt::cpu::half_to_float(specrt::cpu::float_to_half(value))));
      continue;
    }
    CHECK_EQ(static_cast<unsigned>(specrt::cpu::float_to_half(value)), bits);
    if ((bits & 0x7C00u) != 0x7C00u) {
      const int exponent = static_cast<int>(bits >> 10 & 31u);
      const double fraction = (bits & 0x3FFu) / 1024.0;
      const double magnitude =
          exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0 + fraction, exponent - 15);
      CHECK_EQ(static_cast<double>(value), (bits & 0x8000u) != 0 ? -magnitude : magnitude);
    }
  }
  // Between two neighbours the nearer one, in the middle the even one.
  CHECK_EQ(half(1.0f + 0x1p-11f), 1.0f);
  CHECK_EQ(half(1.0f + 0x1.8p-10f), 1.0f + 0x1p-9f);
  CHECK_EQ(half(1.0f + 0x1.004p-11f), 1.0f + 0x1p-10f);
  CHECK_EQ(half(65519.0f), 65504.0f);
  CHECK(std::isinf(half(65520.0f)));
  CHECK_EQ(half(0x1p-25f), 0.0f);
  CHECK_EQ(half(0x1.8p-25f), 0x1p-24f);
}

TEST(weights_that_float16_cannot_hold_are_refused) {
  const tiny::Spec spec = tiny::small_spec(Precision::f16);
  for (const char* const name : {"embedding", "layers.0.mlp.down", "lm_head"}) {
    tiny::Tensors tensors = tiny::random_tensors(spec);
    CHECK(tiny::build(tiny::config_of(spec), Precision::f16, tensors).precision() ==
          Precision::f16);
    tensors.at(name)[3] = -70000.0f;
    CHECK_THROWS(tiny::build(tiny::config_of(spec), Precision::f16, tensors),
                 specrt::InvalidArgument, "65504");
  }
}

// A quantised tensor enters a model as it is, or not at all.
TEST(model_builder_takes_codes_and_refuses_others) {
  const tiny::Spec spec = tiny::small_spec(Precision::int4, 3);
  const specrt::ModelConfig config = tiny::config_of(spec);
  const std::string name = "layers.0.attention.q";
  std::vector<std::int64_t> shape;
  for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
    if (tensor.name == name) shape = tensor.shape;
  }
  const auto size = static_cast<std::size_t>(shape[0] * shape[1]);
  const auto groups = static_cast<std::size_t>(shape[0] * ((shape[1] + 31) / 32));
  std::vector<std::int8_t> codes(size, 3);
  Floats scales(groups, 0.5f), minima(groups, -1.0f);
  QuantisedTensor tensor{Precision::int4, codes.data(), scales.data(), minima.data(), false};

  specrt::ModelBuilder builder(config, Precision::int4);
  CHECK(builder.precision_of(name) == Precision::int4);
  CHECK(builder.precision_of("norm") == Precision::f32);
  CHECK_THROWS(builder.precision_of("nothing"), specrt::InvalidArgument, "nothing");
  QuantisedTensor wrong = tensor;
  wrong.precision = Precision::int8;
  CHECK_THROWS(builder.set_quantised(name, shape, wrong), specrt::InvalidArgument, "int4");
  codes[1] = 16;
  CHECK_THROWS(builder.set_quantised(name, shape, tensor), specrt::InvalidArgument, "codes");
  codes[1] = 3;
  scales[0] = 0.1f;
  CHECK_THROWS(builder.set_quantised(name, shape, tensor), specrt::InvalidArgument, "fp16");
  scales[0] = std::numeric_limits<float>::infinity();
  CHECK_THROWS(builder.set_quantised(name, shape, tensor), specrt::InvalidArgument, "finite");
  scales[0] = 0.5f;
  builder.set_quantised(name, shape, tensor);
  CHECK_THROWS(builder.set_quantised(name, shape, tensor), specrt::InvalidArgument, "second");

  Floats weights(size, 1.0f);
  weights[5] = std::numeric_limits<float>::quiet_NaN();
  const std::string other = "layers.0.attention.o";
  for (const specrt::TensorSpec& one : specrt::tensors_of(config)) {
    if (one.name == other) shape = one.shape;
  }
  weights.resize(static_cast<std::size_t>(shape[0] * shape[1]), 1.0f);
  CHECK_THROWS(builder.set(other, shape, DType::f32, weights.data()), specrt::InvalidArgument,
               other);
  weights[5] = 1.0f;
  builder.set(other, shape, DType::f32, weights.data());
}

TEST(quantise_int4_spares_what_counts) {
  const std::int64_t k = 320;
  const Floats weights = random_floats(static_cast<std::size_t>(k), 10, 0.05f);
  Floats importance(weights.size(), 0.001f);
  for (std::size_t i = 5; i < importance.size(); i += 40) importance[i] = 1.0f;
  std::vector<std::int8_t> codes(weights.size());
  Floats scales(10), minima(10);
  const auto error = [&](const float* given) {
    CHECK(specrt::cpu::quantise_int4(weights.data(), k, given, codes.data(), scales.data(),
                                     minima.data()));
    double sum = 0.0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const float off = scales[i / 32] * codes[i] + minima[i / 32] - weights[i];
      sum += importance[i] * off * off;
    }
    return sum;
  };
  CHECK(error(importance.data()) < 0.5 * error(nullptr));
  // Where nothing counts, everything does.
  const double plain = error(nullptr);
  const Floats nothing(weights.size(), 0.0f);
  CHECK_EQ(error(nothing.data()), plain);
}
