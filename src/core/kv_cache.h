#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/kv_dtype.h"
#include "core/prefix_index.h"
#include "specrt/types.h"

namespace specrt {

/// One array of a layer's cache: [slots, heads, dim].
struct KvPlane {
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  KvDType dtype = KvDType::f32;
  std::int64_t bytes_per_slot() const {
    return heads * dim * static_cast<std::int64_t>(size_of(dtype));
  }
};

/// Layers that share block tables: the same positions are kept for all of them.
struct KvGroup {
  std::vector<std::int64_t> layers;
  std::vector<KvPlane> planes;  ///< of each layer
  std::int64_t num_blocks = 0;
  std::int64_t window = 0;  ///< 0: everything; else only the last `window` positions are seen
  std::int64_t bytes_per_slot() const;
};

struct KvLayout {
  std::int64_t block_size = 16;
  std::int64_t scratch_slots = 0;  ///< for draft nodes, after the blocks' slots, in every group;
                                   ///< no pass writes more positions of a sequence than this
  bool prefix_reuse = false;       ///< keep full blocks of ended sequences for later prompts; never
                                   ///< where a group has a window
  std::vector<KvGroup> groups;
  std::int64_t bytes_per_block() const;  ///< one block in every group
  std::int64_t scratch_bytes() const;
  std::int64_t bytes() const;
  bool has_window() const;
  /// Blocks of a group that a sequence of so many positions holds at most.
  std::int64_t blocks_of(std::size_t group, std::int64_t positions) const;
  /// Sizes every group so that `blocks` blocks of positions fit, in `sequences` sequences at most.
  void set_blocks(std::int64_t blocks, std::int64_t sequences);
  void check() const;
};

/// Bookkeeping of a paged cache (Kwon et al. 2309.06180). It knows which slot holds which
/// position and no memory; what has to be moved is handed back to whoever holds the memory.
///
/// A slot is block * block_size + offset; scratch slot i is num_blocks * block_size + i.
/// The length of a sequence counts its committed positions, all of which are in blocks. Draft
/// nodes use scratch slots, so rolling back is doing nothing.
class KvCache {
 public:
  struct Move {
    std::int64_t group = 0;
    std::int32_t from = 0;   ///< slot
    std::int32_t to = 0;     ///< slot
    std::int32_t count = 1;  ///< consecutive slots
  };

  explicit KvCache(const KvLayout& layout);

  const KvLayout& layout() const { return layout_; }

  /// Enters an empty sequence and sets aside the blocks for `reserved_length` positions, so that
  /// it can grow so far whatever others do. Throws CapacityError, changing nothing, where they
  /// are not there.
  void add(SequenceId id, std::int64_t reserved_length);
  bool can_add(std::int64_t reserved_length) const;
  /// Whether an empty cache could take it.
  bool fits(std::int64_t reserved_length) const;

  /// As add(), sharing the blocks of the longest known prefix of `prompt`, which leaves at least
  /// its last token to be computed. Returns how many positions are committed already.
  std::int64_t add(SequenceId id, std::int64_t reserved_length, std::span<const TokenId> prompt);
  /// `tokens` are the sequence's: its full committed blocks become known to later prompts.
  void remember(SequenceId id, std::span<const TokenId> tokens);
  /// Blocks that only the prefix index holds, the fewest of all groups.
  std::int64_t remembered_blocks() const;

  /// `child` starts with all of the parent's positions, sharing its blocks. Not with windows.
  void fork(SequenceId parent, SequenceId child, std::int64_t reserved_length);

  void remove(SequenceId id);
  bool contains(SequenceId id) const { return sequences_.count(id) != 0; }

  std::int64_t length(SequenceId id) const;
  std::span<const std::int32_t> table(SequenceId id, std::int64_t group) const;
  std::int32_t slot(SequenceId id, std::int64_t group, std::int64_t position) const;
  std::int32_t scratch_slot(std::int64_t group, std::int64_t index) const;

  /// Makes positions [length, new_length) writable: allocates blocks and unshares a partial one.
  /// Appends the block copies to make first. Throws CapacityError, changing nothing, where there
  /// is no block left.
  void prepare(SequenceId id, std::int64_t new_length, std::vector<Move>& moves);

  /// Positions up to `new_length` have been written; they are committed now. Blocks that have
  /// left every later query's window are freed; those of length `held` are kept where that is
  /// less, so that truncate() can go back to it.
  void advance(SequenceId id, std::int64_t new_length, std::int64_t held);
  void advance(SequenceId id, std::int64_t new_length) { advance(id, new_length, new_length); }

  /// Commits an accepted path: scratch index path[i] becomes position length + i. Appends the
  /// moves to make.
  void commit(SequenceId id, std::span<const std::int32_t> path, std::vector<Move>& moves);

  /// Forgets positions from `new_length` on and frees blocks that hold none any more. Throws
  /// CapacityError, changing nothing, where the cut falls into a shared block (or starts over
  /// behind a window) and the blocks to write again are promised to others.
  void truncate(SequenceId id, std::int64_t new_length);

  /// Blocks neither used nor set aside, the fewest of all groups.
  std::int64_t available_blocks() const;
  std::int64_t used_blocks(std::int64_t group) const;
  std::size_t size() const { return sequences_.size(); }

  /// Throws InternalError where reference counts, free lists, tables and reservations disagree.
  void check_invariants() const;

 private:
  struct Sequence {
    std::int64_t length = 0;
    std::int64_t reserved_entries = 0;              // of a table, to the length set aside
    std::vector<std::int64_t> reserved;             // blocks held at once, a group each
    std::vector<std::vector<std::int32_t>> tables;  // a group each; -1: left the window
    std::vector<std::int64_t> holes;                // leading -1s, a group each
    std::int64_t prefix_node = PrefixIndex::kRoot;  // of the last remembered block
    std::int64_t remembered = 0;                    // blocks
  };
  struct Pool {
    std::vector<std::int32_t> free;
    std::vector<std::int32_t> references;
    std::vector<bool> remembered;  // by block: the prefix index holds one of its references
    std::int64_t idle = 0;         // remembered blocks that nobody else holds
    std::int64_t set_aside = 0;    // promised to sequences and not yet taken by them
  };

  const Sequence& find(SequenceId id) const;
  Sequence& find(SequenceId id);
  std::int64_t blocks_for(std::int64_t positions) const;
  std::int64_t owed(const Sequence& sequence, std::int64_t group) const;
  std::int64_t owed_with(const Sequence& sequence, std::int64_t group, std::size_t blocks,
                         std::int64_t length) const;
  void refresh_set_aside(Sequence& sequence, std::int64_t group, std::int64_t owed_before);
  std::int64_t room(std::size_t group) const;
  Sequence& enter(SequenceId id, std::int64_t reserved_length);
  std::int32_t take(std::int64_t group);
  void hold(std::size_t group, std::int32_t block);
  void forget(std::int64_t node);
  Sequence* sole_other(SequenceId id, std::int64_t group, std::size_t index, std::int32_t block);
  std::int64_t short_after_cut(SequenceId id, std::int64_t group, std::int64_t new_length);
  void cut(SequenceId id, std::int64_t new_length);
  void drop(SequenceId id, std::int64_t group, std::size_t index, std::int32_t block);

  KvLayout layout_;
  std::vector<Pool> pools_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  PrefixIndex prefixes_;
};

}  // namespace specrt
