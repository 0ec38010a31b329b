#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "check.h"

namespace check {
namespace detail {

inline constexpr char kJobs[] = "--jobs=";

enum class State : int { waiting, running, passed, failed };

struct Result {
  State state;
  double seconds;
};

/// What the processes share: whose turn it is, and what became of each case. A result has one
/// writer, and is read when that one has ended.
class Board {
 public:
  explicit Board(std::size_t cases) : cases_(cases) {
    const std::size_t bytes = sizeof(Next) + cases * sizeof(Result);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    next_ = new (memory) Next{};
    results_ = reinterpret_cast<Result*>(static_cast<char*>(memory) + sizeof(Next));
    for (std::size_t i = 0; i < cases; ++i) new (results_ + i) Result{State::waiting, 0.0};
  }

  /// The next case that nobody has taken; `cases` where there is none.
  std::size_t take() { return std::min(next_->fetch_add(1), cases_); }
  Result& operator[](std::size_t i) { return results_[i]; }

 private:
  using Next = std::atomic<std::size_t>;
  static_assert(Next::is_always_lock_free && sizeof(Next) % alignof(Result) == 0);

  std::size_t cases_;
  Next* next_;
  Result* results_;
};

inline bool wanted(const char* name, const std::vector<const char*>& arguments) {
  bool any = false;
  bool found = false;
  for (const char* argument : arguments) {
    const bool out = argument[0] == '-';
    const bool has = std::strstr(name, argument + (out ? 1 : 0)) != nullptr;
    if (out && has) return false;
    any = any || !out;
    found = found || (!out && has);
  }
  return found || !any;
}

inline void work(const std::vector<Case>& cases, Board& board) {
  for (std::size_t i = board.take(); i < cases.size(); i = board.take()) {
    board[i].state = State::running;
    const auto begin = std::chrono::steady_clock::now();
    State state = State::passed;
    try {
      cases[i].body();
    } catch (const std::exception& error) {
      state = State::failed;
      std::printf("FAILED %s\n  %s\n", cases[i].name, error.what());
      std::fflush(stdout);
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    board[i] = {state, taken.count()};
  }
}

/// Whether all of the processes ended well: a sanitizer speaks by how one ends.
inline bool all_ended_well(int processes) {
  bool well = true;
  for (int i = 0; i < processes; ++i) {
    int status = 0;
    if (wait(&status) < 0) return false;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    well = false;
    std::printf("FAILED a process %s %d\n", WIFEXITED(status) ? "exited with" : "ended by signal",
                WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
  return well;
}

}  // namespace detail

/// Runs every case, or those whose name contains one of the arguments. Of an argument -x, cases
/// with x in their name are left out. --jobs=N shares them among N processes. In the end, the
/// slowest. What main() returns.
inline int run_cases(int argc, char** argv) {
  using detail::Board;
  using detail::kJobs;
  using detail::State;
  int jobs = 1;
  std::vector<const char*> names;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], kJobs, sizeof kJobs - 1) != 0) {
      names.push_back(argv[i]);
      continue;
    }
    const char* number = argv[i] + sizeof kJobs - 1;
    const char* end = number + std::strlen(number);
    if (std::from_chars(number, end, jobs).ptr != end || number == end || jobs < 1) {
      std::fprintf(stderr, "expected --jobs=N with N of 1 or more, got %s\n", argv[i]);
      return 2;
    }
  }
  std::vector<Case> chosen;
  for (const auto& test : cases()) {
    if (detail::wanted(test.name, names)) chosen.push_back(test);
  }

  Board board(chosen.size());
  bool well = true;
  if (jobs == 1) {
    detail::work(chosen, board);
  } else {
    int processes = 0;
    for (; processes < jobs; ++processes) {
      const pid_t process = fork();
      if (process < 0) break;
      if (process == 0) {
        detail::work(chosen, board);
        return 0;  // an end like any other, leaks are looked for
      }
    }
    well = detail::all_ended_well(processes) && processes > 0;
  }

  std::vector<std::pair<double, const char*>> times;
  std::size_t passed = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    times.emplace_back(board[i].seconds, chosen[i].name);
    passed += board[i].state == State::passed ? 1 : 0;
    if (board[i].state == State::running) std::printf("FAILED within %s\n", chosen[i].name);
  }
  std::sort(times.rbegin(), times.rend());
  for (std::size_t i = 0; i < std::min<std::size_t>(times.size(), 8); ++i) {
    std::printf("%6.1f s  %s\n", times[i].first, times[i].second);
  }
  std::printf("%zu passed, %zu failed\n", passed, chosen.size() - passed);
  return well && passed == chosen.size() && passed > 0 ? 0 : 1;
}

}  // namespace check
