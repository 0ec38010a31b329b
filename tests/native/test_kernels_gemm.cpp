// Products, and the packing they read.

#include <limits>

#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::cpu::GemmArgs;
using specrt::cpu::kPanel;

namespace {

struct Shape {
  std::int64_t n, k;
};
const Shape kShapes[] = {{1, 1}, {5, 3}, {32, 64}, {33, 7}, {96, 65}, {70, 129}, {160, 577}};

/// A product in every form that a test needs; x and y have padding that must not be touched.
struct Product {
  Product(Shape shape, std::int64_t max_rows, DType dtype_)
      : n(shape.n), k(shape.k), dtype(dtype_) {
    x = random_floats(static_cast<std::size_t>(max_rows * stride()), 11);
    weight = random_floats(static_cast<std::size_t>(n * k), 12, 0.2f);
    bias = random_floats(static_cast<std::size_t>(n), 13);
    if (dtype == DType::bf16) {
      x = rounded_to_bf16(x);
      weight = rounded_to_bf16(weight);
    }
    for (std::int64_t r = 0; r < max_rows; ++r) {
      for (std::int64_t i = k; i < stride(); ++i) {
        x[r * stride() + i] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    packed.resize(static_cast<std::size_t>(specrt::cpu::packed_bytes(n, k, dtype)));
    specrt::cpu::pack_rows(weight.data(), DType::f32, n, k, dtype, 0, packed.data());
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
    const auto gemm = dtype == DType::f32 ? kernels.gemm_f32 : kernels.gemm_bf16;
    const auto prepared = kernel_test::prepare(kernels, dtype, args);
    args.prepared = prepared.data();
    if (split > 0) gemm(args, 0, split);
    gemm(args, split, panels());
    return y;
  }

  std::int64_t n, k;
  DType dtype;
  Floats x, weight, bias;
  std::vector<std::byte> packed;
};

}  // namespace

TEST(kernels_gemm_against_reference) {
  const double tolerance = 2e-6;  // of sum |x||w|, which is about sqrt(k) here
  on_every_isa([&](const Kernels& kernels) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Shape shape : kShapes) {
        const std::int64_t rows = 5;
        const Product product(shape, rows, dtype);
        specrt::reference::Vector x;
        for (std::int64_t r = 0; r < rows; ++r) {
          const float* row = product.x.data() + r * product.stride();
          x.insert(x.end(), row, row + product.k);
        }
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
    for (const DType dtype : {DType::f32, DType::bf16}) {
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
    for (const DType dtype : {DType::f32, DType::bf16}) {
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

TEST(kernels_pack_round_trip) {
  for (const DType from : {DType::f32, DType::bf16}) {
    for (const DType to : {DType::f32, DType::bf16}) {
      for (const Shape shape : kShapes) {
        Floats weight = random_floats(static_cast<std::size_t>(shape.n * shape.k), 15);
        std::vector<std::uint16_t> halves;
        if (from == DType::bf16) {
          weight = rounded_to_bf16(weight);
          for (const float value : weight) halves.push_back(specrt::cpu::float_to_bf16(value));
        }
        const std::int64_t bytes = specrt::cpu::packed_bytes(shape.n, shape.k, to);
        const std::int64_t panels = (shape.n + kPanel - 1) / kPanel;
        CHECK_EQ(bytes, to == DType::f32 ? panels * shape.k * kPanel * 4
                                         : panels * ((shape.k + 1) / 2) * kPanel * 4);
        // In two calls that meet inside a panel.
        std::vector<std::byte> packed(static_cast<std::size_t>(bytes));
        const std::int64_t first = shape.n / 3;
        const auto* source = from == DType::f32 ? reinterpret_cast<const std::byte*>(weight.data())
                                                : reinterpret_cast<const std::byte*>(halves.data());
        specrt::cpu::pack_rows(source, from, first, shape.k, to, 0, packed.data());
        specrt::cpu::pack_rows(
            source + first * shape.k * static_cast<std::int64_t>(specrt::size_of(from)), from,
            shape.n - first, shape.k, to, first, packed.data());
        if (to == DType::bf16) weight = rounded_to_bf16(weight);
        for (std::int64_t row = 0; row < panels * kPanel; ++row) {
          Floats out(static_cast<std::size_t>(shape.k), -7.0f);
          specrt::cpu::unpack_row(packed.data(), to, shape.k, row, out.data());
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
