#pragma once

#include <cstdint>
#include <memory>

namespace specrt::cpu {

/// A persistent team of threads, the caller being one of them. Waiting threads spin briefly,
/// then sleep. One parallel region at a time.
class ThreadPool {
 public:
  /// `threads` >= 1, the caller included.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// Calls body(begin, end) on every thread with its share of [0, count): contiguous, split
  /// evenly, by (count, size()) only. Returns when all are done. Allocates nothing; the body
  /// must not throw.
  template <typename Body>
  void parallel(std::int64_t count, const Body& body) {
    run(
        count,
        [](const void* context, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Body*>(context))(begin, end);
        },
        &body);
  }

 private:
  using Function = void (*)(const void* context, std::int64_t begin, std::int64_t end);
  void run(std::int64_t count, Function function, const void* context);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specrt::cpu
