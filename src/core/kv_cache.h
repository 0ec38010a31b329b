#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/kv_dtype.h"
#include "core/kv_pool.h"
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
  bool prefix_reuse = false;       ///< keep full blocks of ended sequences for later prompts
  std::vector<KvGroup> groups;
  std::int64_t bytes_per_block() const;  ///< one block in every group
  std::int64_t scratch_bytes() const;
  std::int64_t bytes() const;
  /// Blocks of a group that a sequence of so many positions holds at most.
  std::int64_t blocks_of(std::size_t group, std::int64_t positions) const;
  /// Sizes every group so that `blocks` blocks of positions fit, in `sequences` sequences of at
  /// most `longest` blocks. What goes beyond all of them serves prefix reuse, a block in each
  /// group.
  void set_blocks(std::int64_t blocks, std::int64_t sequences, std::int64_t longest);
  void check() const;
};

/// Bookkeeping of a paged cache (Kwon et al. 2309.06180). It knows which slot holds which
/// position and no memory; what has to be moved is handed back to whoever holds the memory.
///
/// A slot is block * block_size + offset; scratch slot i is num_blocks * block_size + i.
/// The length of a sequence counts its committed positions, all of which are in blocks. Draft
/// nodes use scratch slots, so rolling back is doing nothing.
///
/// Promises. What a sequence may still take is set aside before it does, all of it at admission or
/// a part now and then by reserve(); within that it never lacks a block.
/// In a group without a window blocks stay until the sequence goes, so it is owed what its table
/// still lacks, and a copy of a shared block that it is about to write into. In a group with a
/// window it lets blocks go and takes others, and one that it shared is not free then. So it is
/// charged for the most blocks that it can hold at once, shared ones included, whoever filled
/// them; a shared block itself is taken from the promise of one holder, its owner, and from
/// another's once the owner lets it go.
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
  /// Sets aside more for a sequence, so that it can grow to `reserved_length` positions whatever
  /// others do. False, changing nothing, where the blocks are not there.
  bool reserve(SequenceId id, std::int64_t reserved_length);
  /// Whether an empty cache could take it.
  bool fits(std::int64_t reserved_length) const;

  /// As add(), sharing the blocks of the longest known prefix of `prompt` that has in every group
  /// what a query behind it sees, and leaves at least the last token to be computed. Returns how
  /// many positions are committed already.
  std::int64_t add(SequenceId id, std::int64_t reserved_length, std::span<const TokenId> prompt);
  /// `tokens` are the sequence's: its full committed blocks become known to later prompts. A block
  /// of which there is a known one already is given back for that one.
  void remember(SequenceId id, std::span<const TokenId> tokens);
  /// Blocks that only the prefix index holds, the fewest of all groups.
  std::int64_t remembered_blocks() const;

  /// `child` starts with all of the parent's positions, sharing its blocks. Throws CapacityError,
  /// changing nothing, where there is no room for its promise.
  void fork(SequenceId parent, SequenceId child, std::int64_t reserved_length);

  void remove(SequenceId id);
  bool contains(SequenceId id) const { return sequences_.count(id) != 0; }

  std::int64_t length(SequenceId id) const;
  std::span<const std::int32_t> table(SequenceId id, std::int64_t group) const;
  std::int32_t slot(SequenceId id, std::int64_t group, std::int64_t position) const;
  std::int32_t scratch_slot(std::int64_t group, std::int64_t index) const;

  /// Makes positions [length, new_length) writable: allocates blocks and unshares a partial one.
  /// Appends the block copies to make first. A sequence that grows beyond what was set aside for
  /// it has that much set aside from then on. Throws CapacityError, changing nothing, where there
  /// is no block left.
  void prepare(SequenceId id, std::int64_t new_length, std::vector<Move>& moves);

  /// Positions up to `new_length` have been written; they are committed now. Where `tokens` are
  /// given, full blocks are remembered as by remember(), those too that leave the window now.
  /// Blocks that have left every later query's window are let go; those of length `held` are kept
  /// where that is less, so that truncate() can go back to it.
  void advance(SequenceId id, std::int64_t new_length, std::int64_t held,
               std::span<const TokenId> tokens = {});
  void advance(SequenceId id, std::int64_t new_length) { advance(id, new_length, new_length); }

  /// Commits an accepted path: scratch index path[i] becomes position length + i. Appends the
  /// moves to make. `tokens` as in advance().
  void commit(SequenceId id, std::span<const std::int32_t> path, std::vector<Move>& moves,
              std::span<const TokenId> tokens = {});

  /// Forgets positions from `new_length` on and frees blocks that hold none any more, or that no
  /// query from there on sees. Throws
  /// CapacityError, changing nothing, where the cut falls into a shared block (or starts over
  /// behind a window) and the blocks to write again are promised to others.
  void truncate(SequenceId id, std::int64_t new_length);

  /// Blocks neither used nor set aside, the fewest of all groups.
  std::int64_t available_blocks() const;
  std::int64_t used_blocks(std::int64_t group) const;
  std::size_t size() const { return sequences_.size(); }

  /// Throws InternalError where holders, lists, tables, charges and reservations disagree.
  void check_invariants() const;
  /// By slot of a group, scratch included: whether it holds a committed or remembered position.
  std::vector<bool> filled_slots(std::int64_t group) const;

 private:
  /// A sequence's part in one group.
  struct Part {
    std::vector<std::int32_t> table;  // -1: left the window
    std::int64_t holes = 0;           // leading -1s
    std::int64_t reserved = 0;        // blocks held at once, at most
    std::int64_t owned = 0;           // blocks of the table that it owns
  };
  struct Sequence {
    std::int64_t length = 0;
    std::int64_t reserved_entries = 0;  // of a table, to the length set aside
    std::vector<Part> parts;
    std::int64_t prefix_node = PrefixIndex::kRoot;  // of the last remembered block
    std::int64_t remembered = 0;                    // blocks
  };
  /// What a promise depends on, so that one can be reckoned before anything is changed.
  struct Standing {
    bool windowed = false;
    std::int64_t entries = 0;
    std::int64_t held = 0;
    std::int64_t owned = 0;
    std::int64_t reserved = 0;
    std::int64_t reserved_entries = 0;
    bool copies = false;  // the next write goes into a shared block
    std::int64_t owed() const;
  };
  /// Takes a sequence's promises back and makes them anew at the end, as it is then.
  class Renewed {
   public:
    Renewed(KvCache& cache, const Sequence& sequence);
    ~Renewed();
    Renewed(const Renewed&) = delete;
    Renewed& operator=(const Renewed&) = delete;

   private:
    KvCache& cache_;
    const Sequence& sequence_;
  };
  struct Other {
    SequenceId id = 0;
    Sequence* sequence = nullptr;
  };

  // kv_cache.cpp
  const Sequence& find(SequenceId id) const;
  Sequence& find(SequenceId id);
  bool windowed(std::size_t group) const { return layout_.groups[group].window > 0; }
  std::int64_t blocks_for(std::int64_t positions) const;
  std::int64_t first_seen(std::size_t group, std::int64_t position) const;
  Sequence& enter(SequenceId id, std::int64_t reserved_length);
  void slide(SequenceId id, Sequence& sequence, std::int64_t next);
  void cut(SequenceId id, std::int64_t new_length);

  // kv_promises.cpp
  Standing standing(const Sequence& sequence, std::size_t group) const;
  std::int64_t owed(const Sequence& sequence, std::size_t group) const;
  std::int64_t room(std::size_t group) const;
  bool writes_shared(const Sequence& sequence, std::size_t group, std::int64_t length) const;
  void check_prepare(SequenceId id, const Sequence& sequence, std::int64_t new_length) const;
  std::int64_t short_after_cut(SequenceId id, std::size_t group, std::int64_t new_length);
  std::int32_t take(SequenceId id, Sequence& sequence, std::size_t group);
  void hold(SequenceId id, Sequence& sequence, std::size_t group, std::int32_t block);
  void let_go(SequenceId id, Sequence& sequence, std::size_t group, std::size_t index,
              std::int32_t block);
  Other other_holder(SequenceId id, std::size_t group, std::size_t index, std::int32_t block);

  // kv_prefix.cpp
  void remember_blocks(SequenceId id, Sequence& sequence, std::span<const TokenId> tokens);
  bool would_cost(const Sequence& sequence, std::size_t b, std::int64_t node) const;
  void stand(Sequence& sequence, std::int64_t node);
  void step_back(Sequence& sequence, std::int64_t blocks);
  void forget_partial(const Sequence& sequence, std::size_t group);
  void forget(std::size_t group, std::int64_t node);
  void prune(std::int64_t node);
  void check_prefixes() const;

  KvLayout layout_;
  std::vector<KvPool> pools_;
  std::vector<std::int64_t> set_aside_;  // by group: promised to sequences, not yet taken
  std::unordered_map<SequenceId, Sequence> sequences_;
  PrefixIndex prefixes_;
};

}  // namespace specrt
