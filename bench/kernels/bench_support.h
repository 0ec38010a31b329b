#pragma once

// What the native benchmarks share: time, memory that exists, the shapes of known models.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"
#include "specrt/cpu.h"
#include "specrt/types.h"

namespace bench {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Lower quartile: what a call takes when nothing else ran meanwhile.
inline double quartile(std::vector<double> times) {
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4);
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

/// Memory that was written once, so that its pages exist.
struct Memory {
  explicit Memory(std::int64_t bytes)
      : size(bytes), data(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), std::free) {
    std::uint64_t state = 1;
    for (std::int64_t i = 0; i + 8 <= bytes; i += 8) {
      // Small bf16 pairs, whatever they are read as.
      state = state * 6364136223846793005u + 1442695040888963407u;
      const std::uint64_t value = (state & 0x807F807F807F807Fu) | 0x3C003C003C003C00u;
      std::memcpy(data.get() + i, &value, 8);
    }
  }
  std::int64_t size;
  std::unique_ptr<std::byte, void (*)(void*)> data;
};

/// GB/s of reading memory that is in no cache.
inline double read_bandwidth(specrt::cpu::ThreadPool& pool, const Memory& memory) {
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  std::vector<double> times;
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(pool.size()) * 8);
  for (std::int64_t at = 0; at + kBytes <= memory.size; at += kBytes) {
    const std::byte* from = memory.data.get() + at;
    const double start = now();
    pool.parallel_balanced(kBytes / 2048, 256,
                           [&](int thread, std::int64_t begin, std::int64_t end) {
                             std::uint64_t sum = 0;
                             for (std::int64_t line = begin * 2048; line < end * 2048; line += 64) {
                               std::uint64_t word;
                               std::memcpy(&word, from + line, sizeof word);
                               sum += word;
                             }
                             sums[static_cast<std::size_t>(thread) * 8] += sum;
                           });
    times.push_back(now() - start);
  }
  volatile std::uint64_t keep = sums[0];
  (void)keep;
  return static_cast<double>(kBytes) / quartile(times) * 1e-9;
}

struct Shape {
  const char* name;
  std::int64_t hidden, ffn, layers, heads, kv_heads, head_dim, vocab;
  bool tied;
};
inline constexpr Shape kShapes[] = {
    {"smollm2-135m", 576, 1536, 30, 9, 3, 64, 49152, true},
    {"llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, true},
    {"llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, false},
};

/// `--name a,b` among the arguments, or what stands in for it.
inline std::vector<std::string> option(int argc, char** argv, const char* name,
                                       std::vector<std::string> otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) != std::string("--") + name) continue;
    std::vector<std::string> out;
    std::istringstream list(argv[i + 1]);
    for (std::string one; std::getline(list, one, ',');) out.push_back(one);
    return out;
  }
  return otherwise;
}

inline void check_options(int argc, char** argv, const char* usage,
                          const std::vector<std::string>& names) {
  for (int i = 1; i < argc; i += 2) {
    const std::string given = argv[i];
    const bool known =
        i + 1 < argc && std::any_of(names.begin(), names.end(),
                                    [&](const std::string& name) { return given == "--" + name; });
    if (known) continue;
    std::fprintf(stderr, "%s", usage);
    std::exit(2);
  }
}

inline std::vector<std::string> fast_isas() {
  std::vector<std::string> names;
  for (const specrt::CpuIsa isa : specrt::available_cpu_isas()) {
    if (isa != specrt::CpuIsa::scalar) names.emplace_back(specrt::name_of(isa));
  }
  return names;
}

inline const Shape& shape_named(const std::string& name) {
  for (const Shape& shape : kShapes) {
    if (name == shape.name) return shape;
  }
  std::fprintf(stderr, "no model shape is called %s\n", name.c_str());
  std::exit(2);
}

}  // namespace bench
