#include <algorithm>
#include <string>

#include "core/kv_cache.h"
#include "specrt/error.h"

// What sequences are owed, and whose promise each block is taken from: see KvCache.

namespace specrt {

std::int64_t KvCache::Standing::owed() const {
  const std::int64_t lacking = reserved_entries - entries;
  // What it takes to the end, and of that no more than it ever holds at once. Whether what it
  // holds comes back when let go depends on who else holds it, so only its own counts as taken.
  if (windowed) return std::min(reserved, held + lacking) - owned;
  return lacking + (copies ? 1 : 0);
}

KvCache::Standing KvCache::standing(const Sequence& sequence, std::size_t group) const {
  const Part& part = sequence.parts[group];
  Standing out;
  out.windowed = windowed(group);
  out.entries = static_cast<std::int64_t>(part.table.size());
  out.held = out.entries - part.holes;
  out.owned = part.owned;
  out.reserved = part.reserved;
  out.reserved_entries = sequence.reserved_entries;
  out.copies = writes_shared(sequence, group, sequence.length);
  return out;
}

std::int64_t KvCache::owed(const Sequence& sequence, std::size_t group) const {
  return standing(sequence, group).owed();
}

KvCache::Renewed::Renewed(KvCache& cache, const Sequence& sequence)
    : cache_(cache), sequence_(sequence) {
  for (std::size_t g = 0; g < cache_.pools_.size(); ++g) {
    cache_.set_aside_[g] -= cache_.owed(sequence_, g);
  }
}

KvCache::Renewed::~Renewed() {
  for (std::size_t g = 0; g < cache_.pools_.size(); ++g) {
    cache_.set_aside_[g] += cache_.owed(sequence_, g);
  }
}

// Blocks that may still be promised or taken without a promise.
std::int64_t KvCache::room(std::size_t group) const {
  return pools_[group].within_reach() - set_aside_[group];
}

bool KvCache::reserve(SequenceId id, std::int64_t reserved_length) {
  Sequence& sequence = find(id);
  const std::int64_t entries = blocks_for(reserved_length);
  if (entries <= sequence.reserved_entries) return true;
  const auto held_at_most = [&](std::size_t g) {
    return std::max(sequence.parts[g].reserved, layout_.blocks_of(g, entries * layout_.block_size));
  };
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Standing then = standing(sequence, g);
    const std::int64_t before = then.owed();
    then.reserved_entries = entries;
    then.reserved = held_at_most(g);
    if (then.owed() - before > room(g)) return false;
  }
  const Renewed renewed(*this, sequence);
  sequence.reserved_entries = entries;
  for (std::size_t g = 0; g < pools_.size(); ++g) sequence.parts[g].reserved = held_at_most(g);
  return true;
}

// Whether, at this length, the next position lies in a block that another sequence holds too.
bool KvCache::writes_shared(const Sequence& sequence, std::size_t group,
                            std::int64_t length) const {
  if (length % layout_.block_size == 0) return false;
  const auto& table = sequence.parts[group].table;
  const std::int32_t block = table[static_cast<std::size_t>(length / layout_.block_size)];
  return block >= 0 && pools_[group].holders(block) > 1;
}

// Throws where growing would take what others were promised.
void KvCache::check_prepare(SequenceId id, const Sequence& sequence,
                            std::int64_t new_length) const {
  const std::int64_t want = blocks_for(new_length);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Standing then = standing(sequence, g);
    const std::int64_t before = then.owed();
    const std::int64_t more = std::max<std::int64_t>(0, want - then.entries);
    std::int64_t need = more;
    std::int64_t passed_on = 0;  // to another's promise, with the block that is not written into
    if (then.copies) {
      ++need;
      const auto last = static_cast<std::size_t>(sequence.length / layout_.block_size);
      if (then.windowed && pools_[g].owner(sequence.parts[g].table[last]) == id) passed_on = 1;
      then.copies = false;
    }
    then.entries += more;
    then.held += more;
    then.owned += need - passed_on;
    then.reserved_entries = std::max(then.reserved_entries, then.entries);
    then.reserved =
        std::max({then.reserved, layout_.blocks_of(g, then.reserved_entries * layout_.block_size),
                  then.held});
    const std::int64_t to_be_had =
        pools_[g].within_reach() - (set_aside_[g] - before + then.owed() - passed_on);
    if (need > to_be_had) {
      throw CapacityError(expected_got("kv cache", std::to_string(need) + " free blocks",
                                       std::to_string(to_be_had)));
    }
  }
}

// By how many blocks promises would exceed what is within reach after the cut.
std::int64_t KvCache::short_after_cut(SequenceId id, std::size_t group, std::int64_t new_length) {
  const Sequence& sequence = find(id);
  const KvPool& pool = pools_[group];
  const auto& table = sequence.parts[group].table;
  Standing then = standing(sequence, group);
  std::int64_t promised = set_aside_[group] - then.owed();
  std::int64_t reach = pool.within_reach();
  const auto keep = static_cast<std::size_t>(blocks_for(new_length));
  for (std::size_t i = keep; i < table.size(); ++i) {
    const std::int32_t block = table[i];
    if (block < 0) continue;
    --then.held;
    const bool own = pool.owner(block) == id;
    if (own) --then.owned;
    if (pool.holders(block) == 1) {
      ++reach;
    } else if (then.windowed) {
      if (own) --promised;  // the heir's
    } else if (pool.holders(block) == 2) {
      // Whoever is left alone with its partial block owes itself one less.
      const Sequence& other = *other_holder(id, group, i, block).sequence;
      if (other.length % layout_.block_size != 0 &&
          other.length / layout_.block_size == static_cast<std::int64_t>(i)) {
        --promised;
      }
    }
  }
  then.entries = std::min(then.entries, static_cast<std::int64_t>(keep));
  then.copies = writes_shared(sequence, group, new_length);
  return promised + then.owed() - reach;
}

std::int32_t KvCache::take(SequenceId id, Sequence& sequence, std::size_t group) {
  KvPool& pool = pools_[group];
  if (pool.free_blocks() == 0) forget(group, pool.node(pool.longest_idle()));
  ++sequence.parts[group].owned;
  return pool.take(id);
}

void KvCache::hold(SequenceId id, Sequence& sequence, std::size_t group, std::int32_t block) {
  if (pools_[group].hold(block, id)) ++sequence.parts[group].owned;
}

// Someone beside `id` who holds the block, or nobody. It is entry `index` of every holder's table.
KvCache::Other KvCache::other_holder(SequenceId id, std::size_t group, std::size_t index,
                                     std::int32_t block) {
  for (auto& [other_id, candidate] : sequences_) {
    const auto& table = candidate.parts[group].table;
    if (other_id != id && index < table.size() && table[index] == block) {
      return {other_id, &candidate};
    }
  }
  return {};
}

// Sequence `id` gives up a block that was entry `index` of its table. Where it owned one that
// others hold on to, it is charged to one of them; and whoever is left alone with a partial block
// no longer owes itself a copy.
void KvCache::let_go(SequenceId id, Sequence& sequence, std::size_t group, std::size_t index,
                     std::int32_t block) {
  KvPool& pool = pools_[group];
  const bool own = pool.owner(block) == id;
  if (own) --sequence.parts[group].owned;
  Other other;
  if (pool.holders(block) > 1 && (own || pool.holders(block) == 2)) {
    other = other_holder(id, group, index, block);
  }
  if (other.sequence == nullptr) {
    pool.release(block);
    return;
  }
  const std::int64_t before = owed(*other.sequence, group);
  pool.release(block);
  if (own) {
    pool.hand_over(block, other.id);
    ++other.sequence->parts[group].owned;
  }
  set_aside_[group] += owed(*other.sequence, group) - before;
  forget_partial(*other.sequence, group);
}

}  // namespace specrt
