#include "cpu/thread_team.h"

#include <string>

#include "specrt/error.h"

namespace specrt {

ThreadTeam::ThreadTeam(int threads, bool pin) {
  if (threads < 0 || threads > 1024) {
    throw InvalidArgument(
        expected_got("threads", "a number from 1 to 1024, or 0 for all", std::to_string(threads)));
  }
  impl_ = std::make_unique<Impl>(threads == 0 ? default_thread_count() : threads, pin);
}

ThreadTeam::~ThreadTeam() = default;

int ThreadTeam::size() const { return impl_->pool.size(); }

}  // namespace specrt
