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

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace specrt::cpu {
namespace {

// Regions of a forward pass follow each other within this time; sleeping costs as much.
constexpr std::chrono::microseconds kSpin{30};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// Waits until `value` is not `old`: spinning, if at all, for a bounded time, then asleep.
void wait_while(const std::atomic<int>& value, int old, bool spin) {
  if (spin) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 16; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
  }
  while (value.load(std::memory_order_acquire) == old) {
    value.wait(old, std::memory_order_acquire);
  }
}

}  // namespace

struct ThreadPool::State {
  explicit State(int team) : size(team), spin(team <= default_thread_count()) {}

  /// Runs thread `index`'s share of the current region.
  void share(int index) const {
    const std::int64_t even = count / size;
    const std::int64_t more = count % size;
    const std::int64_t begin = index * even + std::min<std::int64_t>(index, more);
    const std::int64_t end = begin + even + (index < more ? 1 : 0);
    if (begin < end) function(context, begin, end);
  }

  void work(int index) {
    const FpMode mode;
    for (int seen = 0;;) {
      wait_while(region, seen, spin);
      seen = region.load(std::memory_order_acquire);
      if (stop) return;
      share(index);
      if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) working.notify_one();
    }
  }

  void next_region() {
    // Unsigned arithmetic, so that wrapping round is defined.
    const unsigned next = static_cast<unsigned>(region.load(std::memory_order_relaxed)) + 1u;
    region.store(static_cast<int>(next), std::memory_order_release);
    region.notify_all();
  }

  void join() {
    stop = true;
    next_region();
    for (auto& thread : threads) thread.join();
  }

  const int size;
  const bool spin;  // not where threads outnumber the cores: it would keep the others from running
  std::vector<std::thread> threads;

  // Written between regions by the caller, published by `region`.
  Function function = nullptr;
  const void* context = nullptr;
  std::int64_t count = 0;
  bool stop = false;

  alignas(64) std::atomic<int> region = 0;
  alignas(64) std::atomic<int> working = 0;
};

ThreadPool::ThreadPool(int threads) {
  if (threads < 1) {
    throw InvalidArgument(
        expected_got("threads", "at least one thread", std::to_string(threads)));
  }
  state_ = std::make_unique<State>(threads);
  State* state = state_.get();
  try {
    state->threads.reserve(static_cast<std::size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) {
      state->threads.emplace_back([state, i] { state->work(i); });
    }
  } catch (const std::system_error&) {
    const auto started = std::to_string(state->threads.size() + 1);
    state->join();
    throw CapacityError(expected_got("threads", std::to_string(threads) + " threads",
                                     started + " that the system would start"));
  }
}

ThreadPool::~ThreadPool() { state_->join(); }

int ThreadPool::size() const { return state_->size; }

void ThreadPool::run(std::int64_t count, Function function, const void* context) {
  if (count <= 0) return;
  const FpMode mode;
  State& state = *state_;
  if (state.size == 1 || count == 1) {
    function(context, 0, count);
    return;
  }
  state.function = function;
  state.context = context;
  state.count = count;
  state.working.store(state.size - 1, std::memory_order_relaxed);
  state.next_region();
  state.share(0);
  for (int left; (left = state.working.load(std::memory_order_acquire)) != 0;) {
    wait_while(state.working, left, state.spin);
  }
}

}  // namespace specrt::cpu
