#include "core/kv_pool.h"

#include <string>

#include "specrt/error.h"

namespace specrt {

KvPool::KvPool(std::int64_t blocks) : blocks_(static_cast<std::size_t>(blocks)) {
  free_.reserve(blocks_.size());
  // Popped from the back, so low blocks are used first and the pool's pages stay few.
  for (std::int64_t b = blocks - 1; b >= 0; --b) free_.push_back(static_cast<std::int32_t>(b));
}

std::int32_t KvPool::take(SequenceId id) {
  const std::int32_t block = free_.back();
  free_.pop_back();
  at(block).holders = 1;
  at(block).owner = id;
  return block;
}

bool KvPool::hold(std::int32_t block, SequenceId id) {
  Block& one = at(block);
  if (++one.holders > 1) return false;
  unlink(block);
  one.owner = id;
  return true;
}

void KvPool::release(std::int32_t block) {
  Block& one = at(block);
  if (--one.holders > 0) return;
  if (one.node != kNoNode) {
    link(block);
  } else {
    free_.push_back(block);
  }
}

void KvPool::forget(std::int32_t block) {
  Block& one = at(block);
  one.node = kNoNode;
  if (one.holders > 0) return;
  unlink(block);
  free_.push_back(block);
}

void KvPool::link(std::int32_t block) {
  at(block).before = last_idle_;
  at(block).after = kNone;
  (last_idle_ == kNone ? first_idle_ : at(last_idle_).after) = block;
  last_idle_ = block;
  ++idle_;
}

void KvPool::unlink(std::int32_t block) {
  const Block& one = at(block);
  (one.before == kNone ? first_idle_ : at(one.before).after) = one.after;
  (one.after == kNone ? last_idle_ : at(one.after).before) = one.before;
  --idle_;
}

void KvPool::check_invariants(std::span<const std::int32_t> holders) const {
  const auto fail = [](const std::string& what) {
    throw InternalError("[kv cache] broken invariant: " + what);
  };
  enum class Listed : std::uint8_t { nowhere, free, idle };
  std::vector<Listed> listed(blocks_.size(), Listed::nowhere);
  for (const std::int32_t block : free_) {
    Listed& one = listed[static_cast<std::size_t>(block)];
    if (one != Listed::nowhere) fail("block " + std::to_string(block) + " is free twice");
    one = Listed::free;
  }
  std::int64_t idle = 0;
  std::int32_t before = kNone;
  for (std::int32_t block = first_idle_; block != kNone; block = at(block).after) {
    Listed& one = listed[static_cast<std::size_t>(block)];
    if (one != Listed::nowhere) fail("block " + std::to_string(block) + " is idle and elsewhere");
    one = Listed::idle;
    if (at(block).before != before) fail("the list of idle blocks is torn");
    before = block;
    ++idle;
  }
  if (before != last_idle_ || idle != idle_) fail("the list of idle blocks ends elsewhere");
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    if (block.holders != holders[b]) {
      fail("block " + std::to_string(b) + " is in " + std::to_string(holders[b]) +
           " tables and counts " + std::to_string(block.holders));
    }
    const Listed wanted = block.holders > 0       ? Listed::nowhere
                          : block.node != kNoNode ? Listed::idle
                                                  : Listed::free;
    if (listed[b] != wanted) fail("block " + std::to_string(b) + " is lost");
  }
}

}  // namespace specrt
