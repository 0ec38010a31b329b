#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "specrt/types.h"

namespace specrt {

/// The blocks of one group of layers. A block is held by sequences, or idle (only the prefix index
/// knows it, and it gives way when room is short), or free.
///
/// Of the sequences that hold a block one owns it: it is the one whose promise the block is taken
/// from. Nothing here allocates after construction.
class KvPool {
 public:
  static constexpr std::int64_t kNoNode = -1;
  static constexpr std::int32_t kNone = -1;

  explicit KvPool(std::int64_t blocks);

  std::int64_t size() const { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t free_blocks() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t idle_blocks() const { return idle_; }
  std::int64_t held_blocks() const { return size() - within_reach(); }
  /// Free blocks, and idle ones, which give way.
  std::int64_t within_reach() const { return free_blocks() + idle_; }

  std::int32_t holders(std::int32_t block) const { return at(block).holders; }
  /// Of a block that is held.
  SequenceId owner(std::int32_t block) const { return at(block).owner; }
  /// The node of the prefix index that knows the block, or kNoNode.
  std::int64_t node(std::int32_t block) const { return at(block).node; }
  /// The block that has been idle for longest, or kNone.
  std::int32_t longest_idle() const { return first_idle_; }

  /// A free block, of which there must be one, held and owned by `id`.
  std::int32_t take(SequenceId id);
  /// One more holder of a block that is held or idle. True where `id` owns it now, being alone.
  bool hold(std::int32_t block, SequenceId id);
  /// One holder fewer. A block that is left without any becomes idle, or free.
  void release(std::int32_t block);
  void hand_over(std::int32_t block, SequenceId id) { at(block).owner = id; }

  void remember(std::int32_t block, std::int64_t node) { at(block).node = node; }
  /// The prefix index lets go of the block.
  void forget(std::int32_t block);

  /// Throws InternalError where lists and counts disagree with each other, or with `holders`: how
  /// many tables name each block.
  void check_invariants(std::span<const std::int32_t> holders) const;

 private:
  struct Block {
    std::int32_t holders = 0;
    std::int32_t before = kNone;  // in the list of idle blocks
    std::int32_t after = kNone;
    SequenceId owner = 0;
    std::int64_t node = kNoNode;
  };

  const Block& at(std::int32_t block) const { return blocks_[static_cast<std::size_t>(block)]; }
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  void link(std::int32_t block);
  void unlink(std::int32_t block);

  std::vector<Block> blocks_;
  std::vector<std::int32_t> free_;
  std::int32_t first_idle_ = kNone;
  std::int32_t last_idle_ = kNone;
  std::int64_t idle_ = 0;
};

}  // namespace specrt
