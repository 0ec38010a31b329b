#pragma once

// What the tests of CUDA kernels share, on the host and on a GPU: repeatable inputs, and runs in
// several orders of threads, whose results have to be the same to the last bit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../native/check.h"
#include "kernels/arithmetic.h"
#include "reference/kernels.h"
#include "run_grid.h"

namespace cuda_test {

using specrt::reference::Vector;
using specrt::simt::Bf16;
using specrt::simt::from_float;
using specrt::simt::Grid;
using specrt::simt::Half;
using specrt::simt::Order;
using specrt::simt::to_float;
using Floats = std::vector<float>;

inline Floats random_floats(std::size_t n, std::uint32_t seed, float scale = 1.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  Floats out(n);
  for (float& value : out) value = scale * normal(engine);
  return out;
}

template <typename T>
std::vector<T> as(const Floats& x) {
  std::vector<T> out;
  for (const float value : x) out.push_back(from_float<T>(value));
  return out;
}

template <typename T>
Vector doubles(const std::vector<T>& x) {
  Vector out;
  for (const T value : x) out.push_back(to_float(value));
  return out;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// What a kernel leaves in `out`, which begins as bytes 0xFF; the same in every order of threads.
/// `args` points at `out`.
template <class Kernel, typename T>
void run_in_all_orders(Grid grid, const typename Kernel::Args& args, std::vector<T>& out) {
  std::vector<T> first;
  for (const Order order : {Order::forward, Order::backward, Order::shuffled}) {
    std::memset(static_cast<void*>(out.data()), 0xFF, out.size() * sizeof(T));
    run_grid<Kernel>(grid, args, order);
    if (first.empty()) first = out;
    if (!same_bits(first, out)) {
      check::fail(__FILE__, __LINE__, "the result depends on the order of threads");
    }
  }
}

/// The units of T near x.
template <typename T>
double tolerance(double x, double parts) {
  const double epsilon = sizeof(T) == 4 ? 0x1p-23 : std::is_same_v<T, Bf16> ? 0x1p-8 : 0x1p-11;
  return parts * epsilon * std::max(std::fabs(x), 1.0);
}

}  // namespace cuda_test
