#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/thread_pool.h"
#include "specrt/error.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using specrt::cpu::ThreadPool;

TEST(thread_pool_covers_every_index_once) {
  for (const int threads : {1, 2, 3, 5, 8}) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.size(), threads);
    for (const std::int64_t count : {0, 1, 2, 3, 7, 8, 9, 1000}) {
      std::vector<int> touched(static_cast<std::size_t>(count));
      pool.parallel(count, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++touched[i];
      });
      for (const int times : touched) CHECK_EQ(times, 1);
    }
  }
}

TEST(thread_pool_balanced_parts_cover_every_index_once) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const std::int64_t count : {0, 1, 2, 5, 64, 1000}) {
      for (const std::int64_t grain : {1, 4, 64}) {
        std::vector<std::atomic<int>> touched(static_cast<std::size_t>(count));
        std::atomic<bool> good = true;
        pool.parallel_balanced(count, grain, [&](int thread, std::int64_t begin, std::int64_t end) {
          const bool long_enough = end - begin >= grain || end == count;
          if (thread < 0 || thread >= threads || !long_enough) good = false;
          for (std::int64_t i = begin; i < end; ++i) ++touched[i];
        });
        CHECK(good);
        for (const auto& times : touched) CHECK_EQ(times.load(), 1);
      }
    }
  }
}

// Whoever is held up gets less: the others go on without it.
TEST(thread_pool_balanced_parts_follow_speed) {
  ThreadPool pool(2);
  std::int64_t done[2] = {0, 0};
  std::atomic<bool> held = true;
  pool.parallel_balanced(1000, 1, [&](int thread, std::int64_t begin, std::int64_t end) {
    done[thread] += end - begin;
    if (end == 1000) held = false;
    // The first part that thread 1 takes lasts until everything else is taken.
    while (thread == 1 && held) std::this_thread::yield();
  });
  CHECK_EQ(done[0] + done[1], 1000);
  CHECK(done[1] <= 500);
}

TEST(thread_pool_pinned_threads_work) {
  ThreadPool pool(3, true);
  std::atomic<int> sum = 0;
  pool.parallel(
      30, [&](std::int64_t begin, std::int64_t end) { sum += static_cast<int>(end - begin); });
  CHECK_EQ(sum.load(), 30);
}

TEST(thread_pool_shares_are_even_and_repeat) {
  ThreadPool pool(3);
  std::vector<std::int64_t> first;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::int64_t> end_of(11);
    pool.parallel(11, [&](std::int64_t begin, std::int64_t end) {
      CHECK(end - begin == 3 || end - begin == 4);
      for (std::int64_t i = begin; i < end; ++i) end_of[i] = end;
    });
    if (round == 0) first = end_of;
    CHECK(first == end_of);
  }
}

TEST(thread_pool_regions_see_each_other) {
  ThreadPool pool(4);
  std::vector<std::int64_t> values(64, 0);
  for (int round = 0; round < 2000; ++round) {
    // Each region reads what another thread wrote in the one before.
    std::vector<std::int64_t> next(values.size());
    pool.parallel(64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) next[i] = values[(i + 17) % 64] + 1;
    });
    values = next;
  }
  for (const std::int64_t value : values) CHECK_EQ(value, 2000);
}

TEST(thread_pool_wakes_after_sleeping) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::atomic<std::int64_t> sum = 0;
    pool.parallel(100, [&](std::int64_t begin, std::int64_t end) {
      if (begin == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      for (std::int64_t i = begin; i < end; ++i) sum += i;
    });
    CHECK_EQ(sum.load(), 4950);
  }
}

TEST(thread_pool_more_threads_than_cores_beside_busy_loops) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    busy.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  {
    ThreadPool pool(static_cast<int>(4 * std::thread::hardware_concurrency()));
    for (int round = 0; round < 50; ++round) {
      std::atomic<std::int64_t> sum = 0;
      pool.parallel(1000, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
      CHECK_EQ(sum.load(), 1000);
    }
  }
  stop = true;
  for (auto& thread : busy) thread.join();
}

TEST(thread_pool_lives_and_dies_quickly) {
  for (int i = 0; i < 100; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 2 == 0) pool.parallel(4, [](std::int64_t, std::int64_t) {});
  }
  CHECK_THROWS(ThreadPool(0), specrt::InvalidArgument, "[threads] expected");
}

#if defined(__x86_64__)
TEST(thread_pool_sets_the_floating_point_mode) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0xFFC0);  // flush to zero, denormals are zero, round toward zero
  std::atomic<int> wrong = 0;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    pool.parallel(6, [&](std::int64_t, std::int64_t) {
      if ((_mm_getcsr() & 0xFFC0u) != 0x1F80u) ++wrong;
    });
  }
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(after & 0xFFC0u, 0xFFC0u);
}
#endif
