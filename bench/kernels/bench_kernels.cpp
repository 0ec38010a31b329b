// How fast weights stream through the products, and what M rows cost against one, for the shapes
// of SmolLM2-135M. Every call reads other weights than the one before, 256 MiB in turn.
//
//   bench_kernels [isa ...]      default: every available level but scalar

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "cpu/thread_pool.h"

namespace {

using namespace specrt;
using namespace specrt::cpu;

struct Shape {
  const char* name;
  std::int64_t n, k;
};
const Shape kShapes[] = {{"qkv", 960, 576},
                         {"o", 576, 576},
                         {"gate_up", 3072, 576},
                         {"down", 576, 1536},
                         {"head", 49152, 576}};
const std::int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64};
// Weight bytes read for each row count of a line.
constexpr std::int64_t kStreamed = std::int64_t{192} << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Memory that was written once, so that its pages exist.
struct Memory {
  explicit Memory(std::int64_t bytes) : size(bytes), data(new float[bytes / 4]) {
    for (std::int64_t i = 0; i < bytes / 4; ++i) data[i] = 0.01f;
  }
  std::int64_t size;
  std::unique_ptr<float[]> data;
};

/// Lower quartile: what a call takes when nothing else ran meanwhile.
double quartile(std::vector<double>& times) {
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4);
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

double read_bandwidth(ThreadPool& pool, const Memory& memory) {
  constexpr std::int64_t kBytes = std::int64_t{2} << 20;
  std::vector<double> times;
  std::uint64_t sums[1024] = {};
  for (std::int64_t at = 0; at + kBytes <= memory.size; at += kBytes) {
    const char* from = reinterpret_cast<const char*>(memory.data.get()) + at;
    const double start = now();
    pool.parallel(kBytes / 2048, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        for (std::int64_t line = 0; line < 2048; line += 64) {
          std::uint64_t word;
          std::memcpy(&word, from + i * 2048 + line, sizeof word);
          sums[i] += word;
        }
      }
    });
    times.push_back(now() - start);
  }
  volatile std::uint64_t keep = sums[0];
  (void)keep;
  return static_cast<double>(kBytes) / quartile(times) * 1e-9;
}

void measure(const Kernels& kernels, Precision dtype, ThreadPool& pool, const Shape& shape,
             const Memory& weights) {
  const std::int64_t bytes = packed_bytes(shape.n, shape.k, dtype);
  const std::int64_t panels = (shape.n + kPanel - 1) / kPanel;
  const std::int64_t copies = weights.size / bytes;
  std::vector<float> x(static_cast<std::size_t>(64 * shape.k), 0.5f);
  std::vector<float> y(static_cast<std::size_t>(64 * shape.n));
  const auto gemm = kernels.gemm[static_cast<int>(dtype)];
  GemmArgs args;
  args.x = x.data();
  args.x_stride = shape.k;
  args.n = shape.n;
  args.k = shape.k;
  args.y = y.data();
  args.y_stride = shape.n;
  const bool prepares = dtype != Precision::f32 && kernels.prepare_bf16 != nullptr;
  std::vector<std::byte> prepared(prepares ? static_cast<std::size_t>(prepared_bytes(64, shape.k))
                                           : 0);
  args.prepared = prepared.data();
  // Each call takes other weights than the one before, and row counts alternate, so that all of
  // them meet the same machine.
  std::vector<double> times[std::size(kRows)];
  std::int64_t copy = 0;
  for (std::int64_t streamed = 0; streamed < kStreamed; streamed += bytes) {
    for (std::size_t i = 0; i < std::size(kRows); ++i) {
      args.rows = kRows[i];
      args.weight = reinterpret_cast<const char*>(weights.data.get()) + copy * bytes;
      copy = (copy + 1) % copies;
      const double begin = now();
      if (prepares) {
        kernels.prepare_bf16(args.x, args.rows, args.x_stride, args.k, 0,
                             (args.rows + 15) / 16 * 16, prepared.data());
      }
      pool.parallel(panels,
                    [&](std::int64_t first, std::int64_t last) { gemm(args, first, last); });
      times[i].push_back(now() - begin);
    }
  }
  const double one = quartile(times[0]);
  std::printf("%-7s %-4s t%d %-8s %5.1f GB/s   t(M)/t(1):", kernels.name,
              dtype == Precision::f32 ? "f32" : "bf16", pool.size(), shape.name,
              static_cast<double>(bytes) / one * 1e-9);
  for (std::size_t i = 1; i < std::size(kRows); ++i) {
    std::printf("  %d: %.2f", static_cast<int>(kRows[i]), quartile(times[i]) / one);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<CpuIsa> isas;
  for (int i = 1; i < argc; ++i) isas.push_back(cpu_isa_from_name(argv[i]));
  if (isas.empty()) {
    for (const CpuIsa isa : available_cpu_isas()) {
      if (isa != CpuIsa::scalar) isas.push_back(isa);
    }
  }
  const Memory weights(std::int64_t{256} << 20);
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    std::printf("read bandwidth, %d thread(s): %.1f GB/s\n", threads,
                read_bandwidth(pool, weights));
    for (const CpuIsa isa : isas) {
      for (const Precision dtype : {Precision::bf16, Precision::f32}) {
        for (const Shape& shape : kShapes) measure(kernels_of(isa), dtype, pool, shape, weights);
      }
    }
  }
  return 0;
}
