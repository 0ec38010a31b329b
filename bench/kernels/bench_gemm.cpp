// How fast weights stream through the products, and what M rows cost against one, for the matrices
// of known models. Every call reads other weights than the one before.

#include "bench_support.h"
#include "cpu/pack.h"

namespace {

using namespace specrt;
using namespace specrt::cpu;

constexpr char kUsage[] =
    "bench_gemm [--model NAME,...] [--isa NAME,...] [--dtype NAME,...] [--threads N,...]\n"
    "  models smollm2-135m, llama-3.2-1b, llama-3.1-8b; every fast level, every dtype, 1 and 2\n"
    "  threads unless told otherwise\n";

const std::int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64};
// Weight bytes read for each row count of a line.
constexpr std::int64_t kStreamed = std::int64_t{400} << 20;
constexpr std::int64_t kMemory = std::int64_t{768} << 20;

struct Case {
  const char* name;
  std::int64_t n, k;
  Gate gate;
};

void measure(const Kernels& kernels, Precision precision, ThreadPool& pool, const char* model,
             const Case& c, const bench::Memory& weights, double bandwidth) {
  const std::int64_t panels = (c.n + kPanel - 1) / kPanel;
  const std::int64_t unit = c.gate == Gate::none ? 1 : 2;
  const std::int64_t bytes = packed_bytes(panels * kPanel * unit, c.k, precision);
  const std::int64_t copies = weights.size / bytes;
  if (copies == 0) return;
  std::vector<float> x(static_cast<std::size_t>(64 * c.k), 0.5f);
  std::vector<float> y(static_cast<std::size_t>(64 * c.n));
  GemmArgs args;
  args.x = x.data();
  args.x_stride = c.k;
  args.n = c.n;
  args.k = c.k;
  args.y = y.data();
  args.y_stride = c.n;
  args.gate = c.gate;
  const Prepare prepare = kernels.prepare[static_cast<int>(precision)];
  const bench::Memory prepared((prepared_bytes(64, c.k) + 4095) / 4096 * 4096);
  args.prepared = prepared.data.get();
  const Gemm gemm = kernels.gemm[static_cast<int>(precision)];
  // Row counts alternate, so that all of them meet the same machine.
  std::vector<double> times[std::size(kRows)];
  std::int64_t copy = 0;
  for (std::int64_t streamed = 0; streamed < kStreamed; streamed += bytes) {
    for (std::size_t i = 0; i < std::size(kRows); ++i) {
      args.rows = kRows[i];
      args.weight = weights.data.get() + copy * bytes;
      copy = (copy + 1) % copies;
      const double begin = bench::now();
      if (prepare != nullptr) {
        prepare(args.x, args.rows, args.x_stride, args.k, 0, prepared_rows(args.rows),
                prepared.data.get());
      }
      pool.parallel_balanced(
          panels, 4, [&](int, std::int64_t first, std::int64_t last) { gemm(args, first, last); });
      times[i].push_back(bench::now() - begin);
    }
  }
  const double one = bench::quartile(times[0]);
  const double rate = static_cast<double>(bytes) / one * 1e-9;
  std::printf("%-7s %-8s t%d %-13s %-8s %5.1f GB/s %3.0f%%  t(M)/t(1):", kernels.name,
              name_of(precision), pool.size(), model, c.name, rate, 100.0 * rate / bandwidth);
  for (std::size_t i = 1; i < std::size(kRows); ++i) {
    std::printf("  %d: %.2f", static_cast<int>(kRows[i]), bench::quartile(times[i]) / one);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  bench::check_options(argc, argv, kUsage, {"model", "isa", "dtype", "threads"});
  const bench::Memory weights(kMemory);
  std::vector<std::string> models;
  for (const bench::Shape& shape : bench::kShapes) models.emplace_back(shape.name);
  for (const std::string& count : bench::option(argc, argv, "threads", {"1", "2"})) {
    ThreadPool pool(std::atoi(count.c_str()));
    const double bandwidth = bench::read_bandwidth(pool, weights);
    std::printf("memory, %d thread(s): %.1f GB/s; of it, each product's stored bytes at one row\n",
                pool.size(), bandwidth);
    for (const std::string& isa : bench::option(argc, argv, "isa", bench::fast_isas())) {
      for (const std::string& dtype :
           bench::option(argc, argv, "dtype", {"bfloat16", "int8", "int4", "w8a8", "float32"})) {
        for (const std::string& name : bench::option(argc, argv, "model", models)) {
          const bench::Shape& s = bench::shape_named(name);
          const std::int64_t q = s.heads * s.head_dim;
          const std::int64_t kv = s.kv_heads * s.head_dim;
          const Case cases[] = {{"qkv", q + 2 * kv, s.hidden, Gate::none},
                                {"o", s.hidden, q, Gate::none},
                                {"gate_up", s.ffn, s.hidden, Gate::silu},
                                {"down", s.hidden, s.ffn, Gate::none},
                                {"head", s.vocab, s.hidden, Gate::none}};
          for (const Case& c : cases) {
            measure(kernels_of(cpu_isa_from_name(isa)), precision_from_name(dtype), pool, s.name, c,
                    weights, bandwidth);
          }
        }
      }
    }
  }
  return 0;
}
