#include <cstring>

#include "check.h"

// Runs every case, or those whose name contains the first argument.
int main(int argc, char** argv) {
  int passed = 0;
  int failed = 0;
  for (const auto& test : check::cases()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    try {
      test.body();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", test.name, error.what());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
