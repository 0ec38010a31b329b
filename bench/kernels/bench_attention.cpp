// What attention costs over a long context, and what M rows of one sequence cost against one: head
// shapes of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B, a draft chain of M - 1 nodes behind a
// committed token, keys and values of every precision. Each call reads another layer's cache than
// the one before, 256 MiB in turn where the context is smaller.
//
//   bench_attention [isa ...] [context=N] [shape=name] [clock=cpu]   default: every level but
//   scalar, all

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "bench_support.h"
#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"
#include "model/attention_plan.h"

namespace {

using namespace specrt;
using namespace specrt::cpu;

struct Shape {
  const char* name;
  std::int64_t q_heads, kv_heads, dim;
};
const Shape kShapes[] = {{"135M", 9, 3, 64}, {"1B", 32, 8, 64}, {"8B", 32, 8, 128}};
const std::int64_t kContexts[] = {512, 2048, 8192, 32768};
const std::int64_t kRows[] = {1, 4, 16, 64};
constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kMemory = std::int64_t{256} << 20;
constexpr double kSeconds = 0.25;  // for each row count of a line, at least three calls

// clock=cpu: what the process itself took, where others use the machine too.
bool cpu_clock = false;

double now() {
  timespec time = {};
  clock_gettime(cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// One sequence's context in a cache of `copies` layers, and a pass of rows over it.
class Case {
 public:
  Case(const Shape& shape, std::int64_t context, KvDType dtype, std::vector<std::byte>& memory)
      : shape_(shape), context_(context), dtype_(dtype), memory_(memory) {
    slots_ = (context + kBlock - 1) / kBlock * kBlock + kRows[std::size(kRows) - 1];
    const std::int64_t width = shape.kv_heads * shape.dim;
    vectors_ = slots_ * width * static_cast<std::int64_t>(size_of(dtype));
    layer_ = 2 * vectors_ + (dtype == KvDType::i8 ? 2 * slots_ * shape.kv_heads * 4 : 0);
    layer_ = (layer_ + 63) / 64 * 64;
    copies_ = std::max<std::int64_t>(1, kMemory / layer_);
    table_.resize(static_cast<std::size_t>((context + kBlock - 1) / kBlock));
    std::iota(table_.begin(), table_.end(), 0);
    path_.resize(64);
    std::iota(path_.begin(), path_.end(), 0);
    q_.assign(static_cast<std::size_t>(64 * shape.q_heads * shape.dim), 0.25f);
    out_.resize(q_.size());
    partials_.resize(static_cast<std::size_t>(AttentionPlan::most_partials(64, context + 64) *
                                              partial_floats(shape.q_heads, shape.dim)));
    if (static_cast<std::int64_t>(memory_.size()) < std::max(kMemory, layer_)) {
      memory_.resize(static_cast<std::size_t>(std::max(kMemory, layer_)));
    }
    // A value that is harmless as any of the precisions, scales included.
    std::fill(memory_.begin(), memory_.end(), std::byte{0x3C});
  }

  double call(const Kernels& kernels, ThreadPool& pool, std::int64_t rows) {
    std::byte* base = memory_.data() + copy_ * layer_;
    copy_ = (copy_ + 1) % copies_;
    AttentionArgs args;
    args.k = base;
    args.v = base + vectors_;
    if (dtype_ == KvDType::i8) {
      args.k_scales = reinterpret_cast<const float*>(base + 2 * vectors_);
      args.v_scales = args.k_scales + slots_ * shape_.kv_heads;
    }
    args.kv_dtype = dtype_;
    args.block_size = kBlock;
    args.path_base = slots_ - 64;
    args.q_heads = shape_.q_heads;
    args.kv_heads = shape_.kv_heads;
    args.head_dim = shape_.dim;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim));
    args.partials = partials_.data();
    std::vector<AttentionRow> list(static_cast<std::size_t>(rows));
    for (std::size_t r = 0; r < list.size(); ++r) {
      const auto at = static_cast<std::ptrdiff_t>(r) * shape_.q_heads * shape_.dim;
      list[r].q = q_.data() + at;
      list[r].out = out_.data() + at;
      list[r].table = table_.data();
      list[r].table_positions = context_;
      list[r].path = path_.data();
      list[r].path_length = static_cast<std::int64_t>(r);
    }
    AttentionPlan::Shape sizes{shape_.q_heads, shape_.kv_heads, shape_.dim, 0,
                               AttentionPlan::most_partials(64, context_ + 64)};
    AttentionPlan plan(sizes, rows, pool.size());
    const double begin = now();
    plan.make(list);
    plan.run(args, kernels, pool);
    return now() - begin;
  }

  std::int64_t bytes_read() const {
    return 2 * context_ * shape_.kv_heads *
           (shape_.dim * static_cast<std::int64_t>(size_of(dtype_)) +
            (dtype_ == KvDType::i8 ? 4 : 0));
  }

 private:
  Shape shape_;
  std::int64_t context_;
  KvDType dtype_;
  std::vector<std::byte>& memory_;
  std::int64_t slots_ = 0;
  std::int64_t vectors_ = 0;  // bytes of K, and of V
  std::int64_t layer_ = 0;
  std::int64_t copies_ = 1;
  std::int64_t copy_ = 0;
  std::vector<std::int32_t> table_, path_;
  std::vector<float> q_, out_, partials_;
};

void measure(const Kernels& kernels, ThreadPool& pool, const Shape& shape, std::int64_t context,
             KvDType dtype, std::vector<std::byte>& memory) {
  Case test(shape, context, dtype, memory);
  // Row counts alternate, so that all of them meet the same machine.
  std::vector<double> times[std::size(kRows)];
  double spent = 0.0;
  for (int turn = 0; turn < 3 || spent < kSeconds * std::size(kRows); ++turn) {
    for (std::size_t i = 0; i < std::size(kRows); ++i) {
      times[i].push_back(test.call(kernels, pool, kRows[i]));
      spent += times[i].back();
    }
  }
  const double one = bench::quartile(times[0]);
  std::printf("%-7s t%d %-5s ctx %5d %-8s M=1 %9.1f us %5.1f GB/s   t(M)/t(1):", kernels.name,
              pool.size(), shape.name, static_cast<int>(context), name_of(dtype), one * 1e6,
              static_cast<double>(test.bytes_read()) / one * 1e-9);
  for (std::size_t i = 1; i < std::size(kRows); ++i) {
    std::printf("  %d: %.2f", static_cast<int>(kRows[i]), bench::quartile(times[i]) / one);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<CpuIsa> isas;
  std::int64_t only_context = 0;
  std::string only_shape;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "context=", 8) == 0) {
      only_context = std::atoll(argv[i] + 8);
    } else if (std::strncmp(argv[i], "shape=", 6) == 0) {
      only_shape = argv[i] + 6;
    } else if (std::strcmp(argv[i], "clock=cpu") == 0) {
      cpu_clock = true;
    } else {
      isas.push_back(cpu_isa_from_name(argv[i]));
    }
  }
  if (isas.empty()) {
    for (const std::string& name : bench::fast_isas()) isas.push_back(cpu_isa_from_name(name));
  }
  std::vector<std::byte> memory;
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (const CpuIsa isa : isas) {
      for (const Shape& shape : kShapes) {
        if (!only_shape.empty() && only_shape != shape.name) continue;
        for (const std::int64_t context : kContexts) {
          if (only_context != 0 && only_context != context) continue;
          for (const KvDType dtype : {KvDType::bf16, KvDType::f32, KvDType::i8}) {
            measure(kernels_of(isa), pool, shape, context, dtype, memory);
          }
        }
      }
    }
  }
  return 0;
}
