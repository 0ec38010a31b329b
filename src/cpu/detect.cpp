// What the machine can run. Compiled without instruction-set flags, so that asking is safe on
// every machine.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "cpu/dispatch.h"
#include "cpu/kernels.h"
#include "specrt/cpu.h"
#include "specrt/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specrt {
namespace {

struct Features {
  bool avx2 = false;
  bool avx512 = false;
  bool vnni = false;
  bool amx = false;
};

#if defined(__x86_64__)

bool bit(unsigned value, int index) { return (value >> index & 1u) != 0; }

/// The register state that the operating system saves.
unsigned saved_state() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

#if defined(__linux__)
// Linux hands out the large tile state only on request, once for the whole process.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool may_use_tiles() { return false; }
#endif

Features detect() {
  Features features;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return features;
  const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
  if (!(fma && osxsave && avx && f16c)) return features;
  const unsigned state = saved_state();
  if ((state & 0x06u) != 0x06u) return features;  // xmm and ymm
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return features;
  features.avx2 = bit(b, 5);
  const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31);
  // Mask registers and both parts of zmm, beside the above.
  features.avx512 = features.avx2 && f && dq && bw && vl && (state & 0xE6u) == 0xE6u;
  features.vnni = features.avx512 && bit(c, 11);
  const bool amx_bf16 = bit(d, 22), amx_tile = bit(d, 24), amx_int8 = bit(d, 25);
  bool avx512_bf16 = false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) avx512_bf16 = bit(a, 5);
  // Tile configuration and data, and the kernel's leave to use them.
  features.amx = features.vnni && amx_bf16 && amx_tile && amx_int8 && avx512_bf16 &&
                 (state & 0x60000u) == 0x60000u && may_use_tiles();
  return features;
}

#else

Features detect() { return {}; }

#endif

#if defined(__linux__)

/// CPUs that the quota in these files allows; 0 where there is none.
double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  std::istringstream text(quota);
  double value = 0;
  return text >> value ? value / period : 0;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

/// The smallest quota on the way from a group's folder up to the root; 0 where there is none.
template <typename Read>
double smallest_quota(const std::string& root, std::string group, Read read) {
  double smallest = 0;
  for (;;) {
    const double quota = read(root + group);
    if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
    const auto slash = group.rfind('/');
    if (slash == std::string::npos) return smallest;
    group.resize(slash);
  }
}

/// CPUs that the cgroups of this process allow; 0 where they do not limit it.
double cgroup_cpus() {
  std::ifstream file("/proc/self/cgroup");
  double smallest = 0;
  for (std::string line; std::getline(file, line);) {
    // "0::/group" in v2, "4:cpu,cpuacct:/group" in v1.
    const auto first = line.find(':');
    const auto second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first - 1).push_back(',');
    const std::string group = line.substr(second + 1);
    double quota = 0;
    if (controllers == ",,") {
      quota = smallest_quota("/sys/fs/cgroup", group, quota_v2);
    } else if (controllers.find(",cpu,") != std::string::npos) {
      quota = smallest_quota("/sys/fs/cgroup/cpu", group, quota_v1);
    }
    if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
  }
  return smallest;
}

int affinity_cpus() {
  // Machines beyond the fixed set's size need a larger one.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 18); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

#else

double cgroup_cpus() { return 0; }
int affinity_cpus() { return static_cast<int>(std::thread::hardware_concurrency()); }

#endif

}  // namespace

const char* name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::scalar:
      return "scalar";
    case CpuIsa::avx2:
      return "avx2";
    case CpuIsa::avx512:
      return "avx512";
    case CpuIsa::amx:
      return "amx";
  }
  return "unknown";
}

namespace {
const Features& features_here() {
  static const Features features = detect();
  return features;
}
}  // namespace

bool cpu::has_vnni() { return features_here().vnni; }

std::vector<CpuIsa> available_cpu_isas() {
  const Features& features = features_here();
  std::vector<CpuIsa> isas = {CpuIsa::scalar};
  if (features.avx2 && cpu::avx2_kernels() != nullptr) isas.push_back(CpuIsa::avx2);
  if (features.avx512 && cpu::avx512_kernels() != nullptr) isas.push_back(CpuIsa::avx512);
  if (features.amx && cpu::amx_kernels() != nullptr) isas.push_back(CpuIsa::amx);
  return isas;
}

CpuIsa best_cpu_isa() { return available_cpu_isas().back(); }

CpuIsa cpu_isa_from_name(const std::string& name) {
  const auto available = available_cpu_isas();
  if (name == "auto") return available.back();
  for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::amx}) {
    if (name != name_of(isa)) continue;
    if (std::find(available.begin(), available.end(), isa) != available.end()) return isa;
    std::string levels;
    for (const CpuIsa level : available) levels += std::string(" ") + name_of(level);
    throw UnsupportedError(
        expected_got("cpu_isa", "a level that this build and machine have, of" + levels, name));
  }
  throw InvalidArgument(
      expected_got("cpu_isa", "auto, scalar, avx2, avx512 or amx", "\"" + name + "\""));
}

int default_thread_count() {
  const int cpus = std::max(affinity_cpus(), 1);
  const double quota = cgroup_cpus();
  // Whole cores only: a team that outruns its quota is stopped in the middle of a region.
  return quota > 0 ? std::clamp(static_cast<int>(std::min(quota, 1e6)), 1, cpus) : cpus;
}

}  // namespace specrt
