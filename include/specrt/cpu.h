#pragma once

#include <memory>
#include <string>
#include <vector>

#include "specrt/export.h"

namespace specrt {

/// Instruction-set levels of the CPU kernels, ascending.
enum class CpuIsa { scalar = 0, avx2 = 1, avx512 = 2, amx = 3 };

SPECRT_API const char* name_of(CpuIsa isa);

/// The levels that this build has and this machine, operating system included, can run.
SPECRT_API std::vector<CpuIsa> available_cpu_isas();

/// The best available level.
SPECRT_API CpuIsa best_cpu_isa();

/// "auto" gives the best; a name gives that level or throws UnsupportedError (known but not
/// available here) or InvalidArgument (unknown).
SPECRT_API CpuIsa cpu_isa_from_name(const std::string& name);

/// Cores that this process may use (affinity mask, then the cgroup quota).
SPECRT_API int default_thread_count();

/// Threads that compute; may be shared by decoders and drafters that never run at the same time,
/// such as a decoder and its own draft model.
class SPECRT_API ThreadTeam {
 public:
  /// `threads` counts the caller; 0: default_thread_count(). `pin` ties each thread but the
  /// caller's to a processor of those that the process may use.
  explicit ThreadTeam(int threads = 0, bool pin = false);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  int size() const;

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace specrt
