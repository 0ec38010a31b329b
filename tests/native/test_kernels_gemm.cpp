// Products, and the packing they read.

#include <limits>

#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::cpu::Gate;
using specrt::cpu::GemmArgs;
using specrt::cpu::kPanel;

namespace {

struct Shape {
  std::int64_t n, k;
};
const Shape kShapes[] = {{1, 1}, {5, 3}, {32, 64}, {33, 7}, {96, 65}, {70, 129}, {160, 577}};

/// A product in every form that a test needs; x and y have padding that must not be touched. With
/// a gate, panels alternate between the first and the second n rows of the weight.
struct Product {
  Product(Shape shape, std::int64_t max_rows, Precision precision_, Gate gate_ = Gate::none)
      : n(shape.n), k(shape.k), precision(precision_), gate(gate_) {
    const std::int64_t matrices = gate == Gate::none ? 1 : 2;
    x = random_floats(static_cast<std::size_t>(max_rows * stride()), 11);
    weight = random_floats(static_cast<std::size_t>(matrices * n * k), 12, 0.2f);
    bias = random_floats(static_cast<std::size_t>(matrices * panels() * kPanel), 13);
    if (precision != Precision::f32) x = rounded_to_bf16(x);
    for (std::int64_t r = 0; r < max_rows; ++r) {
      for (std::int64_t i = k; i < stride(); ++i) {
        x[r * stride() + i] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    packed.resize(static_cast<std::size_t>(
        specrt::cpu::packed_bytes(matrices * panels() * kPanel, k, precision)));
    for (std::int64_t i = 0; i < matrices; ++i) {
      const specrt::cpu::PackedRows rows{0, matrices, i};
      specrt::cpu::pack_rows(weight.data() + i * n * k, DType::f32, n, k, precision, rows,
                             packed.data());
      // What the packed rows stand for is what the product is to be checked against.
      for (std::int64_t r = 0; r < n; ++r) {
        specrt::cpu::unpack_row(packed.data(), precision, k, rows.row(r),
                                weight.data() + (i * n + r) * k);
      }
    }
  }

  /// Rows of x as the product takes them: quantised weights meet codes.
  specrt::reference::Vector inputs(std::int64_t rows) const {
    specrt::reference::Vector out;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* row = x.data() + r * stride();
      float most = 0.0f;
      for (std::int64_t i = 0; i < k; ++i) most = std::max(most, std::fabs(row[i]));
      const bool codes = precision != Precision::f32 && precision != Precision::bf16;
      const float scale = most / specrt::cpu::PreparedCodes::most(precision);
      const float inverse = 1.0f / scale;
      for (std::int64_t i = 0; i < k; ++i) {
        const double code = std::nearbyint(static_cast<double>(row[i] * inverse));
        out.push_back(codes ? code * scale : row[i]);
      }
    }
    return out;
  }

  std::int64_t stride() const { return k + 3; }
  std::int64_t y_stride() const { return n + 2; }
  std::int64_t panels() const { return (n + kPanel - 1) / kPanel; }

  /// y of rows [row, row + rows), over panels split at `split`.
  Floats run(const Kernels& kernels, std::int64_t row, std::int64_t rows, bool with_bias,
             const Floats* added_to = nullptr, std::int64_t split = 0) const {
    Floats y = added_to != nullptr ? *added_to
                                   : Floats(static_cast<std::size_t>(rows * y_stride()), -7.0f);
    GemmArgs args;
    args.x = x.data() + row * stride();
    args.rows = rows;
    args.x_stride = stride();
    args.weight = packed.data();
    args.n = n;
    args.k = k;
    args.bias = with_bias ? bias.data() : nullptr;
    args.y = y.data();
    args.y_stride = y_stride();
    args.accumulate = added_to != nullptr;
    args.gate = gate;
    const auto gemm = kernels.gemm[static_cast<int>(precision)];
    const auto prepared = kernel_test::prepare(kernels, precision, args);
    args.prepared = prepared.data();
    if (split > 0) gemm(args, 0, split);
    gemm(args, split, panels());
    return y;
  }

  std::int64_t n, k;
  Precision precision;
  Gate gate;
  Floats x, weight, bias;
  std::vector<std::byte> packed;
};

}  // namespace

TEST(kernels_gemm_against_reference) {
  const double tolerance = 2e-6;  // of sum |x||w|, which is about sqrt(k) here
  on_every_isa([&](const Kernels& kernels) {
    for (const Precision dtype : kPrecisions) {
      for (const Shape shape : kShapes) {
        const std::int64_t rows = 5;
        const Product product(shape, rows, dtype);
        const specrt::reference::Vector x = product.inputs(rows);
        for (const bool with_bias : {false, true}) {
          const auto expected = specrt::reference::gemm(
              x, doubles(product.weight),
              with_bias ? doubles(product.bias) : specrt::reference::Vector(), rows, shape.n,
              shape.k);
          const Floats before =
              random_floats(static_cast<std::size_t>(rows * product.y_stride()), 14);
          const Floats set = product.run(kernels, 0, rows, with_bias);
          const Floats added = product.run(kernels, 0, rows, with_bias, &before);
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t i = 0; i < product.y_stride(); ++i) {
              const std::size_t at = static_cast<std::size_t>(r * product.y_stride() + i);
              if (i >= shape.n) {
                CHECK_EQ(set[at], -7.0f);
                CHECK_EQ(added[at], before[at]);
                continue;
              }
              CHECK_NEAR(set[at], expected[r * shape.n + i],
                         tolerance * std::sqrt(static_cast<double>(shape.k)) + 1e-6);
              CHECK_EQ(added[at], before[at] + set[at]);
            }
          }
        }
      }
    }
  });
}

TEST(kernels_gemm_row_is_the_same_bits_for_any_rows) {
  const std::int64_t most = 70;
  on_every_isa([&](const Kernels& kernels) {
    for (const Precision dtype : kPrecisions) {
      for (const Shape shape : kShapes) {
        const Product product(shape, most, dtype);
        std::vector<Floats> alone;
        for (std::int64_t r = 0; r < most; ++r) alone.push_back(product.run(kernels, r, 1, true));
        for (std::int64_t rows = 1; rows <= most; ++rows) {
          const std::int64_t first = (most - rows) / 2;
          const Floats together = product.run(kernels, first, rows, true);
          for (std::int64_t r = 0; r < rows; ++r) {
            CHECK(same_bits(together.data() + r * product.y_stride(), alone[first + r].data(),
                            static_cast<std::size_t>(shape.n)));
          }
        }
      }
      // Beyond what one pass holds.
      const Product product({40, 300}, 230, dtype);
      const Floats together = product.run(kernels, 0, 230, false);
      for (std::int64_t r = 0; r < 230; ++r) {
        const Floats one = product.run(kernels, r, 1, false);
        CHECK(same_bits(together.data() + r * product.y_stride(), one.data(), 40));
      }
    }
  });
}

TEST(kernels_gemm_any_split_of_panels_is_the_same_bits) {
  on_every_isa([](const Kernels& kernels) {
    for (const Precision dtype : kPrecisions) {
      const Product product({7 * kPanel + 5, 301}, 20, dtype);
      for (const std::int64_t rows : {1, 2, 3, 4, 7, 12, 13, 20}) {
        const Floats whole = product.run(kernels, 0, rows, true);
        for (std::int64_t split = 1; split < product.panels(); ++split) {
          CHECK(product.run(kernels, 0, rows, true, nullptr, split) == whole);
        }
      }
    }
  });
}

TEST(kernels_gated_product_against_reference) {
  on_every_isa([&](const Kernels& kernels) {
    for (const Precision precision : kPrecisions) {
      for (const Gate gate : {Gate::silu, Gate::gelu_tanh}) {
        for (const Shape shape : {Shape{1, 3}, Shape{45, 70}, Shape{96, 129}}) {
          for (const std::int64_t rows : {1, 4, 13, 37}) {
            const Product product(shape, rows, precision, gate);
            const specrt::reference::Vector x = product.inputs(rows);
            const auto both = doubles(product.weight);
            const auto half = both.begin() + shape.n * shape.k;
            // Biases lie as the panels do.
            specrt::reference::Vector biases[2];
            for (std::int64_t i = 0; i < 2 * shape.n; ++i) {
              const specrt::cpu::PackedRows place{0, 2, i / shape.n};
              biases[i / shape.n].push_back(product.bias[place.row(i % shape.n)]);
            }
            const auto gates =
                specrt::reference::gemm(x, {both.begin(), half}, biases[0], rows, shape.n, shape.k);
            const auto ups =
                specrt::reference::gemm(x, {half, both.end()}, biases[1], rows, shape.n, shape.k);
            const auto expected = gate == Gate::silu ? specrt::reference::silu_mul(gates, ups)
                                                     : specrt::reference::gelu_mul(gates, ups);
            const Floats got = product.run(kernels, 0, rows, true);
            for (std::int64_t r = 0; r < rows; ++r) {
              for (std::int64_t i = 0; i < product.y_stride(); ++i) {
                const float value = got[r * product.y_stride() + i];
                if (i >= shape.n) {
                  CHECK_EQ(value, -7.0f);
                  continue;
                }
                const std::int64_t at = r * shape.n + i;
                const double slack = 1.0 + std::fabs(gates[at]) + std::fabs(ups[at]);
                CHECK_NEAR(value, expected[at], 4e-5 * slack * slack);
              }
            }
          }
        }
      }
    }
  });
}

TEST(kernels_gated_product_is_the_same_bits_for_any_rows_and_split) {
  on_every_isa([](const Kernels& kernels) {
    for (const Precision precision : kPrecisions) {
      const Product product({4 * kPanel + 7, 100}, 70, precision, Gate::silu);
      for (const std::int64_t rows : {1, 2, 5, 13, 16, 17, 33, 64, 70}) {
        const Floats whole = product.run(kernels, 0, rows, true);
        for (std::int64_t split = 1; split < product.panels(); ++split) {
          CHECK(product.run(kernels, 0, rows, true, nullptr, split) == whole);
        }
        for (std::int64_t r = 0; r < rows; ++r) {
          const Floats alone = product.run(kernels, r, 1, true);
          CHECK(same_bits(alone.data(), whole.data() + r * product.y_stride(),
                          static_cast<std::size_t>(product.n)));
        }
      }
    }
  });
}

// One row that is not finite harms no other, and zeros stay zeros.
TEST(kernels_rows_have_scales_of_their_own) {
  on_every_isa([](const Kernels& kernels) {
    for (const Precision precision : {Precision::int8, Precision::int4, Precision::w8a8}) {
      Product product({40, 70}, 5, precision);
      const Floats before = product.run(kernels, 0, 5, false);
      const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                           std::numeric_limits<float>::infinity()};
      for (const float value : bad) {
        Product other = product;
        other.x[2 * other.stride() + 33] = value;
        std::fill_n(other.x.begin() + 3 * other.stride(), other.k, 0.0f);
        const Floats after = other.run(kernels, 0, 5, false);
        for (std::int64_t r = 0; r < 5; ++r) {
          for (std::int64_t i = 0; i < other.n; ++i) {
            const std::int64_t at = r * other.y_stride() + i;
            if (r == 2) {
              CHECK(std::isnan(after[at]));
            } else {
              CHECK_EQ(after[at], r == 3 ? 0.0f : before[at]);
            }
          }
        }
      }
    }
  });
}
