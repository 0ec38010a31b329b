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
        [](const void* context, int, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Body*>(context))(begin, end);
        },
        &body);
  }

  /// The same with body(thread, begin, end), thread in [0, size()): for buffers of one's own.
  template <typename Body>
  void parallel_by_thread(std::int64_t count, const Body& body) {
    run(
        count,
        [](const void* context, int thread, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Body*>(context))(thread, begin, end);
        },
        &body);
  }

 private:
  using Function = void (*)(const void* context, int thread, std::int64_t begin, std::int64_t end);
  void run(std::int64_t count, Function function, const void* context);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specrt::cpu
