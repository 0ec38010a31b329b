// How fast weights stream through the products on a GPU, as a share of what copying memory reaches,
// and what M rows cost against one, for the matrices of known models. Every call of a graph reads
// other weights than the one before. Prints JSON, for scripts/gpu.

#include <cuda_runtime_api.h>

#include <cmath>
#include <random>
#include <stdexcept>

#include "../kernels/bench_support.h"
#include "kernels/pack.h"
#include "ops.h"
#include "specrt/cuda.h"

namespace {

using namespace specrt;
using namespace specrt::cuda;

constexpr char kUsage[] =
    "bench_cuda [--model NAME,...] [--dtype NAME,...] [--rows N,...] [--seconds S]\n"
    "  models llama-3.1-8b, llama-3.1-70b/8 (a shard of eight); bf16, int8, int4, fp16;\n"
    "  1 to 256 rows; at most so many seconds, 60 unless told otherwise\n";

constexpr std::int64_t kStreamed = std::int64_t{1} << 30;  // weights that take turns, in bytes
constexpr std::int64_t kMostRows = 256;
constexpr int kRepeats = 9;
constexpr int kNoGpu = 4;

struct Case {
  const char* model;
  const char* name;
  std::int64_t n, k;
  After after;
};
// q, k and v; attention's output; gate and up; down; the head (one shard's where there are eight).
constexpr Case kCases[] = {
    {"llama-3.1-8b", "qkv", 6144, 4096, After::store},
    {"llama-3.1-8b", "o", 4096, 4096, After::add},
    {"llama-3.1-8b", "gate_up", 28672, 4096, After::gate_silu},
    {"llama-3.1-8b", "down", 4096, 14336, After::add},
    {"llama-3.1-8b", "head", 128256, 4096, After::store},
    {"llama-3.1-70b/8", "qkv", 1280, 8192, After::store},
    {"llama-3.1-70b/8", "o", 8192, 1024, After::add},
    {"llama-3.1-70b/8", "gate_up", 7168, 8192, After::gate_silu},
    {"llama-3.1-70b/8", "down", 8192, 3584, After::add},
    {"llama-3.1-70b/8", "head", 16032, 8192, After::store},
};

void good(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct Timer {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  Timer() {
    good(cudaStreamCreate(&stream), "stream");
    good(cudaEventCreate(&begin), "event");
    good(cudaEventCreate(&end), "event");
  }
  ~Timer() {
    (void)cudaEventDestroy(begin);
    (void)cudaEventDestroy(end);
    (void)cudaStreamDestroy(stream);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Seconds of what `launch` puts on the stream: the median of some runs, after one for warmth.
  template <class Launch>
  double median(const Launch& launch) const {
    std::vector<double> times;
    for (int i = 0; i < kRepeats + 1; ++i) {
      good(cudaEventRecord(begin, stream), "event");
      launch();
      good(cudaEventRecord(end, stream), "event");
      good(cudaEventSynchronize(end), "a kernel");
      float milliseconds = 0.0f;
      good(cudaEventElapsedTime(&milliseconds, begin, end), "event");
      if (i > 0) times.push_back(milliseconds * 1e-3);
    }
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }
  /// The same of `calls` calls that a graph holds.
  template <class Launch>
  double median_of_graph(const Launch& launch) const {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    good(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    launch();
    good(cudaStreamEndCapture(stream, &graph), "capture");
    good(cudaGraphInstantiate(&exec, graph, 0), "graph");
    const double seconds = median([&] { good(cudaGraphLaunch(exec, stream), "graph"); });
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return seconds;
  }
};

/// Fills device memory with `pattern` over and over.
void tile(DeviceBuffer& to, const std::vector<std::byte>& pattern) {
  std::size_t done = std::min(pattern.size(), to.size());
  copy_to_device(to.data(), pattern.data(), done, nullptr);
  while (done < to.size()) {
    const std::size_t more = std::min(done, to.size() - done);
    good(cudaMemcpyAsync(to.data() + done, to.data(), more, cudaMemcpyDeviceToDevice, nullptr),
         "copy");
    done += more;
  }
  synchronize(nullptr);
}

/// Random weights: zeros would run faster than what models have.
std::vector<std::byte> random_16_bit(Type type, std::size_t count) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<std::byte> out(count * 2);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = normal(engine);
    const std::uint16_t bits = type == Type::bf16 ? simt::from_float<simt::Bf16>(x).bits
                                                  : simt::from_float<simt::Half>(x).bits;
    std::memcpy(out.data() + 2 * i, &bits, 2);
  }
  return out;
}

std::vector<std::byte> random_blocks(Stored stored) {
  constexpr std::int64_t kPanels = 13, kBlocks = 7;  // a pattern that rows of a matrix do not share
  constexpr std::int64_t n = kPanels * kPanelRows, k = kBlocks * kBlockColumns;
  std::mt19937 engine(1);
  std::vector<std::int8_t> codes(n * k);
  std::vector<std::byte> packed(packed_bytes(n, k, stored));
  if (stored == Stored::int8) {
    for (auto& code : codes)
      code = static_cast<std::int8_t>(static_cast<int>(engine() % 255) - 127);
    pack_int8(codes, 0, n, k, packed);
    return packed;
  }
  for (auto& code : codes) code = static_cast<std::int8_t>(engine() % 16);
  const std::uint16_t scale = simt::from_float<simt::Half>(0.003f).bits;
  const std::uint16_t minimum = simt::from_float<simt::Half>(-0.024f).bits;
  pack_int4(codes, std::vector<std::uint16_t>(n * k / 32, scale),
            std::vector<std::uint16_t>(n * k / 32, minimum), 0, n, k, packed);
  return packed;
}

struct Dtype {
  const char* name;
  Type type;
  Stored stored;
};
constexpr Dtype kDtypes[] = {{"bf16", Type::bf16, Stored::plain},
                             {"int8", Type::bf16, Stored::int8},
                             {"int4", Type::bf16, Stored::int4},
                             {"fp16", Type::fp16, Stored::plain}};

class Bench {
 public:
  Bench(std::vector<std::int64_t> rows, double seconds)
      : rows_(std::move(rows)), ends_(bench::now() + seconds), architecture_(architecture_of(0)) {
    measure_copy();
  }

  double copy_bandwidth() const { return copy_; }

  /// One line of JSON for each number of rows. False where the time is up.
  bool measure(const Case& c, const Dtype& dtype) {
    DeviceMatrix matrix;
    matrix.n = c.n;
    matrix.k = c.k;
    matrix.stored = dtype.stored;
    matrix.row_major = dtype.stored == Stored::plain && wants_row_major(architecture_, c.n, c.k);
    const std::int64_t bytes =
        matrix.row_major ? 2 * c.n * padded_columns(c.k) : packed_bytes(c.n, c.k, dtype.stored);
    const std::int64_t copies = std::max<std::int64_t>(2, kStreamed / bytes);
    DeviceBuffer weights(static_cast<std::size_t>(copies * bytes));
    tile(weights, dtype.stored == Stored::plain ? random_16_bit(dtype.type, 1048583)
                                                : random_blocks(dtype.stored));
    std::vector<float> scale(static_cast<std::size_t>(c.n),
                             dtype.stored == Stored::int8 ? 0.0003f : 0.0f);
    DeviceBuffer scales(scale.size() * sizeof(float));
    copy_to_device(scales.data(), scale.data(), scales.size(), nullptr);
    synchronize(nullptr);
    matrix.scales = reinterpret_cast<const float*>(scales.data());
    DeviceBuffer x(static_cast<std::size_t>(2 * kMostRows * padded_columns(c.k)));
    tile(x, random_16_bit(dtype.type, 65537));
    DeviceBuffer y(static_cast<std::size_t>(4 * kMostRows * c.n));
    DeviceBuffer workspace(static_cast<std::size_t>(workspace_bytes(matrix, kMostRows)));
    const bool gated = c.after == After::gate_silu;
    Product args;
    args.x = x.data();
    args.y = y.data();
    args.y_stride = gated ? padded_columns(c.n / 2) : c.n;
    args.after = c.after;
    args.workspace = reinterpret_cast<float*>(workspace.data());
    for (const std::int64_t rows : rows_) {
      if (bench::now() > ends_) return false;
      args.rows = rows;
      const double seconds = timer_.median_of_graph([&] {
        for (std::int64_t copy = 0; copy < copies; ++copy) {
          matrix.data = weights.data() + copy * bytes;
          product(dtype.type, matrix, args, timer_.stream);
        }
      }) / static_cast<double>(copies);
      const std::int64_t moved = bytes + rows * c.k * 2 +
                                 rows * (gated                   ? c.n
                                         : c.after == After::add ? 8 * c.n
                                                                 : 4 * c.n);
      const double rate = static_cast<double>(moved) / seconds * 1e-9;
      std::printf(
          "%s\n  {\"model\": \"%s\", \"matrix\": \"%s\", \"n\": %lld, \"k\": %lld, "
          "\"dtype\": \"%s\", \"rows\": %lld, \"microseconds\": %.3f, "
          "\"gb_per_s\": %.1f, \"of_copy\": %.4f}",
          first_ ? "" : ",", c.model, c.name, static_cast<long long>(c.n),
          static_cast<long long>(c.k), dtype.name, static_cast<long long>(rows), seconds * 1e6,
          rate, rate / copy_);
      first_ = false;
    }
    return true;
  }

 private:
  // Bytes read and bytes written, as the products' are counted.
  void measure_copy() {
    DeviceBuffer from(std::size_t{1} << 30), to(std::size_t{1} << 30);
    tile(from, random_16_bit(Type::bf16, 1048583));
    const double seconds = timer_.median([&] {
      good(cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyDeviceToDevice,
                           timer_.stream),
           "copy");
    });
    copy_ = 2.0 * static_cast<double>(from.size()) / seconds * 1e-9;
  }

  std::vector<std::int64_t> rows_;
  double ends_;
  int architecture_;
  double copy_ = 0.0;
  bool first_ = true;
  Timer timer_;
};

int run(int argc, char** argv) {
  bench::check_options(argc, argv, kUsage, {"model", "dtype", "rows", "seconds"});
  const auto models = bench::option(argc, argv, "model", {"llama-3.1-8b", "llama-3.1-70b/8"});
  const auto dtypes = bench::option(argc, argv, "dtype", {"bf16", "int8", "int4"});
  std::vector<std::int64_t> rows;
  for (const std::string& text :
       bench::option(argc, argv, "rows", {"1", "2", "4", "8", "16", "32", "64", "128", "256"})) {
    rows.push_back(std::stoll(text));
    if (rows.back() < 1 || rows.back() > kMostRows) {
      std::fprintf(stderr, "%s", kUsage);
      return 2;
    }
  }
  const double seconds = std::stod(bench::option(argc, argv, "seconds", {"60"})[0]);
  const auto devices = cuda_devices();
  if (devices.empty()) {
    std::fprintf(stderr, "no GPU: nothing was measured\n");
    return kNoGpu;
  }
  Bench bench(rows, seconds);
  std::printf("{\"gpu\": \"%s\", \"architecture\": %d, \"copy_gb_per_s\": %.1f, \"products\": [",
              devices[0].name.c_str(), devices[0].architecture, bench.copy_bandwidth());
  bool whole = true;
  bool any = false;
  for (const std::string& name : dtypes) {
    for (const Dtype& dtype : kDtypes) {
      if (name != dtype.name) continue;
      for (const Case& c : kCases) {
        if (std::find(models.begin(), models.end(), c.model) == models.end()) continue;
        any = true;
        whole = whole && bench.measure(c, dtype);
      }
    }
  }
  std::printf("\n], \"whole\": %s}\n", whole ? "true" : "false");
  return any ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
