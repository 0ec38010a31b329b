#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "check.h"

namespace check {

/// Runs every case, or those whose name contains one of the arguments. Of an argument -x, cases
/// with x in their name are left out. In the end, the slowest. What main() returns.
inline int run_cases(int argc, char** argv) {
  const auto wanted = [&](const char* name) {
    bool any = false;
    bool found = false;
    for (int i = 1; i < argc; ++i) {
      const bool out = argv[i][0] == '-';
      const bool has = std::strstr(name, argv[i] + (out ? 1 : 0)) != nullptr;
      if (out && has) return false;
      any = any || !out;
      found = found || (!out && has);
    }
    return found || !any;
  };
  int passed = 0;
  int failed = 0;
  std::vector<std::pair<double, const char*>> times;
  for (const auto& test : cases()) {
    if (!wanted(test.name)) continue;
    const auto begin = std::chrono::steady_clock::now();
    try {
      test.body();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", test.name, error.what());
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    times.emplace_back(taken.count(), test.name);
  }
  std::sort(times.rbegin(), times.rend());
  for (std::size_t i = 0; i < std::min<std::size_t>(times.size(), 8); ++i) {
    std::printf("%6.1f s  %s\n", times[i].first, times[i].second);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check
