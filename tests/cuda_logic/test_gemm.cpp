// Products on the matrix unit: against the definition, with the weights that the CPU's packed form
// stands for, and to the last bit the same for any number of rows and however k's splits are taken.

#include <cmath>

#include "cpu/pack.h"
#include "cpu/quantise.h"
#include "kernels/gemm.h"
#include "kernels/pack.h"
#include "specrt/error.h"
#include "specrt/model.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

// A weight in the device's form, and the values that it stands for.
struct Weight {
  std::int64_t n, k;
  std::vector<std::byte> packed;
  Floats scales;
  Vector values;
};

template <typename T>
Weight plain_weight(std::int64_t n, std::int64_t k) {
  const auto values = as<T>(random_floats(n * k, 21));
  Weight w{n, k, {}, {}, doubles(values)};
  w.packed.resize(packed_bytes(n, k, Stored::plain));
  std::vector<std::uint16_t> bits;
  for (const T value : values) bits.push_back(value.bits);
  // In two parts, as tensors that share a matrix come.
  const std::int64_t first = n / 3;
  const std::span<const std::uint16_t> all(bits);
  pack_plain(all.first(first * k), 0, first, k, w.packed);
  pack_plain(all.subspan(first * k), first, n - first, k, w.packed);
  return w;
}

Weight int8_weight(std::int64_t n, std::int64_t k) {
  Weight w{n, k, {}, {}, {}};
  const Floats x = random_floats(n * k, 22);
  std::vector<std::int8_t> codes(n * k);
  w.scales.resize(n);
  for (std::int64_t r = 0; r < n; ++r) {
    CHECK(specrt::cpu::quantise_int8(x.data() + r * k, k, codes.data() + r * k, w.scales[r]));
    for (std::int64_t c = 0; c < k; ++c) {
      const float value = w.scales[r] * static_cast<float>(codes[r * k + c]);
      w.values.push_back(specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value)));
    }
  }
  w.packed.resize(packed_bytes(n, k, Stored::int8));
  pack_int8(codes, 0, n, k, w.packed);
  return w;
}

// Every second output has zero points, as GPTQ's have.
Weight int4_weight(std::int64_t n, std::int64_t k) {
  Weight w{n, k, {}, {}, {}};
  const std::int64_t groups = (k + 31) / 32;
  const Floats x = random_floats(n * k, 23);
  std::vector<std::int8_t> codes(n * k);
  std::vector<std::uint16_t> scales, minima;
  for (std::int64_t r = 0; r < n; ++r) {
    Floats row_scales(groups), row_minima(groups);
    CHECK(specrt::cpu::quantise_int4(x.data() + r * k, k, nullptr, codes.data() + r * k,
                                     row_scales.data(), row_minima.data()));
    const bool zero_points = r % 2 == 1;
    w.scales.push_back(zero_points ? 1.0f : 0.0f);
    for (std::int64_t group = 0; group < groups; ++group) {
      if (zero_points) row_minima[group] = -7.0f - static_cast<float>(group % 3);
      scales.push_back(specrt::cpu::float_to_half(row_scales[group]));
      minima.push_back(specrt::cpu::float_to_half(row_minima[group]));
    }
    for (std::int64_t c = 0; c < k; ++c) {
      const float scale = specrt::cpu::half_to_float(scales[r * groups + c / 32]);
      const float low = specrt::cpu::half_to_float(minima[r * groups + c / 32]);
      const float value =
          static_cast<float>(codes[r * k + c]) * scale + (zero_points ? low * scale : low);
      w.values.push_back(specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value)));
    }
  }
  w.packed.resize(packed_bytes(n, k, Stored::int4));
  pack_int4(codes, scales, minima, 0, n, k, w.packed);
  return w;
}

template <typename T>
std::vector<T> activations(std::int64_t rows, std::int64_t k) {
  const auto x = as<T>(random_floats(rows * k, 31));
  std::vector<T> padded(rows * padded_columns(k), T{0});
  for (std::int64_t i = 0; i < rows * k; ++i) padded[i / k * padded_columns(k) + i % k] = x[i];
  return padded;
}

template <typename T, Stored kStored, int kTokens>
Floats product(const Weight& w, const std::vector<T>& x, std::int64_t rows, std::int64_t splits,
               bool parallel, After after, Floats y, const Floats& bias,
               Order order = Order::forward) {
  GemmArgs args;
  args.x = x.data();
  args.x_stride = padded_columns(w.k);
  args.weight = w.packed.data();
  args.scales = w.scales.data();
  args.bias = bias.empty() ? nullptr : bias.data();
  args.rows = rows;
  args.n = w.n;
  args.k = w.k;
  args.splits = static_cast<std::int32_t>(splits);
  args.parallel = parallel;
  args.after = after;
  const bool gated = after == After::gate_silu || after == After::gate_gelu;
  std::vector<T> out(gated ? rows * w.n / 2 : 0);
  args.y = gated ? static_cast<void*>(out.data()) : y.data();
  args.y_stride = gated ? w.n / 2 : w.n;
  Floats partials(parallel ? splits * rows * w.n : 0, NAN);
  args.partials = partials.data();
  const Grid grid{(w.n + 63) / 64, (rows + kTokens - 1) / kTokens, parallel ? splits : 1};
  run_grid<Gemm<T, kStored, kTokens>>(grid, args, order);
  if (parallel) {
    FinishArgs finish{partials.data(), args.bias,   args.y, rows, w.n,
                      args.y_stride,   args.splits, after};
    run_grid<FinishProduct<T>>({(args.y_stride + 255) / 256, rows}, finish, order);
  }
  if (!gated) return y;
  Floats values;
  for (const T value : out) values.push_back(to_float(value));
  return values;
}

template <typename T, Stored kStored>
void check_product(const Weight& w, std::int64_t rows) {
  const auto x = activations<T>(rows, w.k);
  Vector unpadded;
  for (std::int64_t i = 0; i < rows * w.k; ++i) {
    unpadded.push_back(to_float(x[i / w.k * padded_columns(w.k) + i % w.k]));
  }
  const Floats bias = random_floats(w.n, 41);
  const Floats stream = random_floats(rows * w.n, 42);
  const double near = 1e-6 * std::sqrt(static_cast<double>(w.k)) * 8;
  const std::int64_t blocks = k_blocks(w.k);
  for (const std::int64_t splits : {std::int64_t{1}, std::min<std::int64_t>(3, blocks)}) {
    for (const After after : {After::store, After::add, After::gate_silu}) {
      const bool gated = after == After::gate_silu;
      if (gated && w.n % 16 != 0) continue;
      const Floats start = after == After::add ? stream : Floats(rows * w.n, NAN);
      const Floats y = product<T, kStored, 16>(w, x, rows, splits, false, after, start, bias);
      const Vector sums =
          specrt::reference::gemm(unpadded, w.values, doubles(bias), rows, w.n, w.k);
      for (std::size_t i = 0; i < y.size(); ++i) {
        double want = sums[i < sums.size() ? i : 0];
        if (after == After::add) want += stream[i];
        if (gated) {
          const std::int64_t outputs = w.n / 2, r = i / outputs, o = i % outputs;
          want = specrt::reference::silu_mul({sums[r * w.n + gate_row(o)]},
                                             {sums[r * w.n + gate_row(o) + kGateRows]})[0];
        }
        CHECK_NEAR(y[i], want, gated ? tolerance<T>(want, 1) + near : near);
      }
      // The same by splits in parallel, by a wider tile, and by other orders of threads.
      CHECK(same_bits(y, product<T, kStored, 16>(w, x, rows, splits, true, after, start, bias)));
      CHECK(same_bits(y, product<T, kStored, 64>(w, x, rows, splits, false, after, start, bias,
                                                 Order::shuffled)));
      CHECK(same_bits(y, product<T, kStored, 32>(w, x, rows, splits, true, after, start, bias,
                                                 Order::backward)));
      // A row by itself.
      const std::int64_t row = rows - 1, width = std::ssize(y) / rows;
      const std::vector<T> alone(x.begin() + row * padded_columns(w.k), x.end());
      const Floats own_start(start.begin() + row * w.n, start.end());
      CHECK(same_bits(product<T, kStored, 16>(w, alone, 1, splits, true, after, own_start, bias),
                      Floats(y.begin() + row * width, y.end())));
    }
  }
}

TEST(cuda_products_of_16_bit_weights) {
  check_product<Bf16, Stored::plain>(plain_weight<Bf16>(48, 200), 5);
  check_product<Half, Stored::plain>(plain_weight<Half>(70, 64), 17);
  check_product<Bf16, Stored::plain>(plain_weight<Bf16>(3, 40), 1);
}

TEST(cuda_products_of_int8_weights) {
  check_product<Bf16, Stored::int8>(int8_weight(48, 200), 5);
  check_product<Bf16, Stored::int8>(int8_weight(21, 96), 2);
}

TEST(cuda_products_of_int4_weights) {
  check_product<Bf16, Stored::int4>(int4_weight(48, 200), 5);
  check_product<Bf16, Stored::int4>(int4_weight(21, 96), 2);
}

TEST(cuda_splits_follow_from_the_matrix_alone) {
  static_assert(splits_of(4096, 4096) == 5);
  static_assert(splits_of(28672, 4096) == 1);
  static_assert(splits_of(128256, 4096) == 1);
  static_assert(splits_of(1024, 8192) == 16);
  static_assert(splits_of(64, 64) == 1);
  CHECK_THROWS(pack_int8({}, 0, 1, 64, {}), specrt::InternalError, "expected 64 values");
}

}  // namespace
