// Products as the engine calls them, CUTLASS's on sm_90 among them: against the definition, and to
// the last bit the same for every number of rows.

#include <cmath>

#include "../cuda_logic/weights.h"
#include "on_device.h"
#include "ops.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

constexpr std::int64_t kMostRows = 256;

struct Loaded {
  Weight weight;
  DeviceBuffer data, scales;
  DeviceMatrix matrix;
};

template <typename T>
constexpr Type type_of() {
  return std::is_same_v<T, Bf16> ? Type::bf16 : Type::fp16;
}

template <typename T>
Loaded load(Stored stored, std::int64_t n, std::int64_t k) {
  Loaded out;
  if (stored == Stored::int8) {
    out.weight = int8_weight(n, k);
  } else if (stored == Stored::int4) {
    out.weight = int4_weight(n, k);
  } else {
    out.weight = plain_weight<T>(n, k);
  }
  out.matrix.row_major = stored == Stored::plain && wants_row_major(architecture_of(0), n, k);
  if (out.matrix.row_major) {
    std::vector<T> rows(n * padded_columns(k), T{0});
    for (std::int64_t i = 0; i < n * k; ++i) {
      rows[i / k * padded_columns(k) + i % k] =
          from_float<T>(static_cast<float>(out.weight.values[i]));
    }
    out.data = on_device(rows);
  } else {
    out.data = on_device(out.weight.packed);
  }
  out.scales = on_device(out.weight.scales);
  out.matrix.data = out.data.data();
  out.matrix.scales = reinterpret_cast<const float*>(out.scales.data());
  out.matrix.n = n;
  out.matrix.k = k;
  out.matrix.stored = stored;
  return out;
}

/// What product() makes of rows [first, first + rows) of x; `before` is what y begins with.
template <typename T>
Floats product_of(const Loaded& w, const DeviceBuffer& x, std::int64_t first, std::int64_t rows,
                  After after, const Floats& before, const DeviceBuffer& bias) {
  const bool gated = after == After::gate_silu || after == After::gate_gelu;
  const std::int64_t stride = gated ? padded_columns(w.weight.n / 2) : w.weight.n;
  Product args;
  args.x = x.data() + first * padded_columns(w.weight.k) * sizeof(T);
  args.rows = rows;
  args.bias = reinterpret_cast<const float*>(bias.data());
  args.y_stride = stride;
  args.after = after;
  DeviceBuffer workspace(workspace_bytes(w.matrix, rows));
  args.workspace = reinterpret_cast<float*>(workspace.data());
  if (gated) {
    const DeviceBuffer y = on_device(std::vector<T>(rows * stride, T{0x7FFF}));
    args.y = y.data();
    product(type_of<T>(), w.matrix, args, nullptr);
    Floats values;
    for (const T value : from_device<T>(y)) values.push_back(to_float(value));
    return values;
  }
  const DeviceBuffer y =
      on_device(Floats(before.begin() + first * stride, before.begin() + (first + rows) * stride));
  args.y = y.data();
  product(type_of<T>(), w.matrix, args, nullptr);
  return from_device<float>(y);
}

template <typename T>
void check_products(Stored stored, std::int64_t n, std::int64_t k) {
  const Loaded w = load<T>(stored, n, k);
  const auto rows_of_x = activations<T>(kMostRows, k);
  const DeviceBuffer x = on_device(rows_of_x);
  const Floats bias_values = random_floats(n, 41), stream = random_floats(kMostRows * n, 42);
  const DeviceBuffer bias = on_device(bias_values);
  for (const After after : {After::store, After::add, After::gate_silu}) {
    const bool gated = after == After::gate_silu;
    if (gated && n % 16 != 0) continue;
    const Floats before = after == After::add ? stream : Floats(kMostRows * n, NAN);
    const Floats all = product_of<T>(w, x, 0, kMostRows, after, before, bias);
    const std::int64_t stride = std::ssize(all) / kMostRows;
    for (const std::int64_t rows : {1, 2, 7, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129}) {
      for (const std::int64_t first : {std::int64_t{0}, kMostRows - rows}) {
        const Floats some = product_of<T>(w, x, first, rows, after, before, bias);
        CHECK(same_bits(
            some, Floats(all.begin() + first * stride, all.begin() + (first + rows) * stride)));
      }
    }
    for (const std::int64_t r : {std::int64_t{0}, std::int64_t{100}, kMostRows - 1}) {
      Vector row;
      for (std::int64_t c = 0; c < k; ++c) {
        row.push_back(to_float(rows_of_x[r * padded_columns(k) + c]));
      }
      const Vector sums =
          specrt::reference::gemm(row, w.weight.values, doubles(bias_values), 1, n, k);
      const double near = 1e-5 * std::sqrt(static_cast<double>(k));
      for (std::int64_t i = 0; i < (gated ? n / 2 : n); ++i) {
        double want = sums[i];
        if (after == After::add) want += stream[r * n + i];
        if (gated) {
          want =
              specrt::reference::silu_mul({sums[gate_row(i)]}, {sums[gate_row(i) + kGateRows]})[0];
        }
        CHECK_NEAR(all[r * stride + i], want, gated ? tolerance<T>(want, 1) + near : near);
      }
      for (std::int64_t i = n / 2; gated && i < stride; ++i) CHECK_EQ(all[r * stride + i], 0.0f);
    }
  }
}

TEST(device_products_of_bf16_weights) {
  check_products<Bf16>(Stored::plain, 256, 2048);  // in four splits
  check_products<Bf16>(Stored::plain, 132, 1000);  // an odd end of k, a narrow last tile
  check_products<Bf16>(Stored::plain, 70, 320);    // not row-major anywhere
}

TEST(device_products_of_fp16_weights) {
  check_products<Half>(Stored::plain, 512, 1536);
  check_products<Half>(Stored::plain, 66, 200);
}

TEST(device_products_of_int8_weights) { check_products<Bf16>(Stored::int8, 272, 1000); }

TEST(device_products_of_int4_weights) { check_products<Bf16>(Stored::int4, 272, 1024); }

}  // namespace
