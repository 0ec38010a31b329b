// Products on the matrix unit: against the definition, with the weights that the CPU's packed form
// stands for, and to the last bit the same for any number of rows and however k's splits are taken.

#include <cmath>

#include "kernels/gemm.h"
#include "kernels/pack.h"
#include "specrt/error.h"
#include "support.h"
#include "weights.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

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
