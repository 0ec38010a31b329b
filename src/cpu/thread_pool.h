#pragma once

#include <cstdint>
#include <memory>

namespace specrt::cpu {

/// A persistent team of threads, the caller being one of them. Waiting threads spin briefly,
/// then sleep. One parallel region at a time.
class ThreadPool {
 public:
  /// `threads` >= 1, the caller included. `pin` ties each thread but the caller's to a processor of
  /// those that the process may use; throws UnsupportedError where the system cannot.
  explicit ThreadPool(int threads, bool pin = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// Calls body(begin, end) with shares of [0, count), on as many threads as are there in time:
  /// contiguous, split evenly, by (count, size()) only. Returns when all are done. Allocates
  /// nothing; the body must not throw.
  template <typename Body>
  void parallel(std::int64_t count, const Body& body) {
    run(
        count, 0,
        [](const void* context, int, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Body*>(context))(begin, end);
        },
        &body);
  }

  /// Calls body(thread, begin, end) with parts of [0, count), each at least `grain` long but the
  /// last: threads take another part when they are done with one, so that a slower core or one
  /// that others use as well gets less. `thread` in [0, size()) is for buffers of one's own.
  template <typename Body>
  void parallel_balanced(std::int64_t count, std::int64_t grain, const Body& body) {
    run(
        count, grain,
        [](const void* context, int thread, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Body*>(context))(thread, begin, end);
        },
        &body);
  }

 private:
  using Function = void (*)(const void* context, int thread, std::int64_t begin, std::int64_t end);
  /// `grain` 0: even shares.
  void run(std::int64_t count, std::int64_t grain, Function function, const void* context);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specrt::cpu
