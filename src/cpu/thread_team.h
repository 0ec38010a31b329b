#pragma once

#include "cpu/thread_pool.h"
#include "specrt/cpu.h"

namespace specrt {

struct ThreadTeam::Impl {
  explicit Impl(int threads) : pool(threads) {}
  cpu::ThreadPool pool;
};

}  // namespace specrt
