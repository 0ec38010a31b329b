#pragma once

#include "cpu/thread_pool.h"
#include "specrt/cpu.h"

namespace specrt {

struct ThreadTeam::Impl {
  Impl(int threads, bool pin) : pool(threads, pin) {}
  cpu::ThreadPool pool;
};

}  // namespace specrt
