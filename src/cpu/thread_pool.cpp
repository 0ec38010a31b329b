#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/dispatch.h"
#include "specrt/cpu.h"
#include "specrt/error.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace specrt::cpu {
namespace {

// Regions of a forward pass follow each other within this time; sleeping costs as much.
constexpr std::chrono::microseconds kSpin{30};
// Where spinning never helps, because the awaited thread shares this core or the cores are busy:
constexpr std::chrono::microseconds kShortSpin{1};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// How one thread waits: spinning for a bounded time, then asleep.
class Waiter {
 public:
  explicit Waiter(bool spin) : spin_(spin) {}

  /// Returns when `value` is no longer `old`.
  void wait_while(const std::atomic<int>& value, int old) {
    if (spin_) {
      // After a few vain attempts only every 16th is a full one, to see whether times changed.
      const bool full = vain_ < 4 || vain_ % 16 == 0;
      if (spin_while(value, old, full ? kSpin : kShortSpin)) {
        vain_ = 0;
        return;
      }
      ++vain_;
    }
    while (value.load(std::memory_order_acquire) == old) {
      value.wait(old, std::memory_order_acquire);
    }
  }

 private:
  static bool spin_while(const std::atomic<int>& value, int old, std::chrono::microseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    do {
      for (int i = 0; i < 8; ++i) {
        if (value.load(std::memory_order_acquire) != old) return true;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  bool spin_;
  unsigned vain_ = 0;
};

}  // namespace

struct ThreadPool::State {
  explicit State(int team) : size(team), spin(team <= default_thread_count()), caller(spin) {}

  /// Thread `index` does parts of the current region while there are any.
  void take_parts(int index) {
    if (grain == 0) {
      take_shares(index);
      return;
    }
    // Of what is left, half an even share, so that many are not needed and the last ones are short.
    std::int64_t begin = taken.load(std::memory_order_relaxed);
    while (begin < count) {
      const std::int64_t part = std::max(grain, (count - begin) / (2 * size));
      const std::int64_t end = std::min(count, begin + part);
      if (!taken.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      function(context, index, begin, end);
      begin = taken.load(std::memory_order_relaxed);
    }
  }

  /// Even shares, as many as threads: who takes which does not matter.
  void take_shares(int index) {
    const std::int64_t even = count / size;
    const std::int64_t more = count % size;
    for (;;) {
      const std::int64_t i = taken.fetch_add(1, std::memory_order_relaxed);
      if (i >= size) return;
      const std::int64_t begin = i * even + std::min(i, more);
      const std::int64_t end = begin + even + (i < more ? 1 : 0);
      if (begin < end) function(context, index, begin, end);
    }
  }

  void work(int index) {
    const FpMode mode;
    Waiter waiter(spin);
    for (int seen = 0;;) {
      waiter.wait_while(region, seen);
      seen = region.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      // Too late where the caller has done it all, perhaps because this core was another's.
      const int before = gate.fetch_add(1, std::memory_order_acq_rel);
      if ((before & kOpen) != 0) take_parts(index);
      // Sequentially consistent, as below: the notice may not look for sleepers before the count.
      if (gate.fetch_sub(1, std::memory_order_seq_cst) == 1) gate.notify_one();
    }
  }

  /// Runs what is set; the caller is thread 0. Threads that are not awake in time are not waited
  /// for: where others keep the cores busy, that may take as long as the system lets these run.
  void run_region() {
    taken.store(0, std::memory_order_relaxed);
    gate.fetch_or(kOpen, std::memory_order_acq_rel);
    next_region();
    take_parts(0);
    gate.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int inside; (inside = gate.load(std::memory_order_acquire)) != 0;) {
      caller.wait_while(gate, inside);
    }
  }

  void next_region() {
    // Unsigned arithmetic, so that wrapping round is defined.
    const unsigned next = static_cast<unsigned>(region.load(std::memory_order_relaxed)) + 1u;
    // notify_all looks at a count of sleepers. A plain store may still wait in this core's buffer
    // while that count is read: a thread that then goes to sleep, having seen the old number, would
    // sleep for good. An exchange is a full barrier.
    region.exchange(static_cast<int>(next), std::memory_order_seq_cst);
    region.notify_all();
  }

  void join() {
    stop = true;
    next_region();
    for (auto& thread : threads) thread.join();
  }

  const int size;
  const bool spin;  // not where threads outnumber the cores: it would keep the others from running
  Waiter caller;
  std::vector<std::thread> threads;

  // Written between regions by the caller, published by `gate`.
  Function function = nullptr;
  const void* context = nullptr;
  std::int64_t count = 0;
  std::int64_t grain = 0;
  std::atomic<bool> stop = false;
  std::atomic<int> pinned = 0;    ///< threads that have tried
  std::atomic<int> unpinned = 0;  ///< of those, the ones that could not

  static constexpr int kOpen = 1 << 30;

  alignas(64) std::atomic<int> region = 0;
  /// Threads inside the current region, and kOpen while others may enter. What the caller wrote
  /// stands still until none is inside and none may enter.
  alignas(64) std::atomic<int> gate = 0;
  alignas(64) std::atomic<std::int64_t> taken = 0;
};

namespace {

/// Ties the calling thread to the index-th processor that it may use, round and round.
bool pin_to(int index) {
#if defined(__linux__)
  // As many as sched_setaffinity takes; beyond them nothing is pinned.
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  int left = index % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || left-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
  }
#else
  (void)index;
#endif
  return false;
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin) {
  if (threads < 1) {
    throw InvalidArgument(expected_got("threads", "at least one thread", std::to_string(threads)));
  }
  state_ = std::make_unique<State>(threads);
  State* state = state_.get();
  try {
    state->threads.reserve(static_cast<std::size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) {
      state->threads.emplace_back([state, i, pin] {
        if (pin) {
          if (!pin_to(i)) ++state->unpinned;
          ++state->pinned;
          state->pinned.notify_one();
        }
        state->work(i);
      });
    }
  } catch (const std::system_error&) {
    const auto started = std::to_string(state->threads.size() + 1);
    state->join();
    throw CapacityError(expected_got("threads", std::to_string(threads) + " threads",
                                     started + " that the system would start"));
  }
  if (pin) {
    for (int tried; (tried = state->pinned.load()) != threads - 1;) state->pinned.wait(tried);
    if (state->unpinned != 0) {
      state->join();
      throw UnsupportedError(
          expected_got("pin_threads", "a system that ties threads to processors", "another"));
    }
  }
}

ThreadPool::~ThreadPool() { state_->join(); }

int ThreadPool::size() const { return state_->size; }

void ThreadPool::run(std::int64_t count, std::int64_t grain, Function function,
                     const void* context) {
  if (count <= 0) return;
  const FpMode mode;
  State& state = *state_;
  if (state.size == 1 || count <= std::max<std::int64_t>(grain, 1)) {
    function(context, 0, 0, count);
    return;
  }
  state.function = function;
  state.context = context;
  state.count = count;
  state.grain = grain;
  state.run_region();
}

}  // namespace specrt::cpu
