#include <cstdint>
#include <vector>

#include "check.h"
#include "core/kv_cache.h"
#include "specrt/error.h"

namespace {

using specrt::CapacityError;
using specrt::InternalError;
using specrt::InvalidArgument;
using specrt::KvCache;
using specrt::KvGroup;
using specrt::KvLayout;
using specrt::KvPlane;
using Moves = std::vector<KvCache::Move>;
using Path = std::vector<std::int32_t>;

KvLayout layout(std::int64_t block_size, std::int64_t blocks, std::int64_t window = 0,
                std::int64_t scratch = 8) {
  KvLayout out;
  out.block_size = block_size;
  out.scratch_slots = scratch;
  KvGroup group;
  group.layers = {0};
  group.planes = {KvPlane{1, 2, specrt::KvDType::f32}};
  group.num_blocks = blocks;
  group.window = window;
  out.groups = {group};
  return out;
}

void grow(KvCache& cache, specrt::SequenceId id, std::int64_t length) {
  Moves moves;
  cache.prepare(id, length, moves);
  cache.advance(id, length);
  cache.check_invariants();
}

std::vector<std::int32_t> table(const KvCache& cache, specrt::SequenceId id) {
  return {cache.table(id, 0).begin(), cache.table(id, 0).end()};
}

}  // namespace

TEST(kv_layout_bytes) {
  KvLayout two;
  two.block_size = 4;
  two.scratch_slots = 10;
  KvGroup full;
  full.layers = {0, 2};
  full.planes = {KvPlane{2, 8, specrt::KvDType::f32}, KvPlane{1, 8, specrt::KvDType::bf16}};
  full.num_blocks = 3;
  KvGroup windowed;
  windowed.layers = {1};
  windowed.planes = {KvPlane{1, 4, specrt::KvDType::bf16}};
  windowed.num_blocks = 5;
  windowed.window = 6;
  two.groups = {full, windowed};
  CHECK_EQ(full.bytes_per_slot(), 2 * (2 * 8 * 4 + 8 * 2));
  CHECK_EQ(windowed.bytes_per_slot(), 8);
  CHECK_EQ(two.bytes_per_block(), 4 * (160 + 8));
  CHECK_EQ(two.scratch_bytes(), 10 * (160 + 8));
  CHECK_EQ(two.bytes(), 3 * 4 * 160 + 5 * 4 * 8 + 10 * 168);
  two.check();
}

TEST(kv_layout_refuses) {
  CHECK_THROWS(KvCache(layout(0, 4)), InvalidArgument, "[block_size] expected at least 1, got 0");
  CHECK_THROWS(KvCache(layout(4, 0)), CapacityError, "[kv_cache_bytes]");
  KvLayout none = layout(4, 4);
  none.groups.clear();
  CHECK_THROWS(KvCache{none}, InvalidArgument, "[kv groups]");
  CHECK_THROWS(layout(1 << 16, 1 << 15).check(), InvalidArgument, "2^31 - 1");
}

TEST(kv_cache_slots) {
  KvCache cache(layout(4, 6));
  CHECK_EQ(cache.available_blocks(), 6);
  cache.add(7, 9);
  CHECK_EQ(cache.available_blocks(), 3);
  CHECK_EQ(cache.used_blocks(0), 0);
  CHECK(cache.contains(7) && !cache.contains(8));
  CHECK_EQ(cache.size(), 1u);
  grow(cache, 7, 6);
  CHECK_EQ(cache.length(7), 6);
  CHECK_EQ(cache.used_blocks(0), 2);
  CHECK_EQ(cache.available_blocks(), 3);
  const auto blocks = table(cache, 7);
  CHECK_EQ(blocks.size(), 2u);
  for (std::int64_t p = 0; p < 6; ++p) {
    CHECK_EQ(cache.slot(7, 0, p), blocks[static_cast<std::size_t>(p / 4)] * 4 + p % 4);
  }
  CHECK_EQ(cache.scratch_slot(0, 0), 24);
  CHECK_EQ(cache.scratch_slot(0, 5), 29);
  cache.remove(7);
  CHECK_EQ(cache.available_blocks(), 6);
  CHECK_EQ(cache.size(), 0u);
  cache.check_invariants();
}

TEST(kv_cache_refuses) {
  KvCache cache(layout(2, 4));
  Moves moves;
  cache.add(1, 4);
  CHECK_THROWS(cache.add(1, 1), InvalidArgument, "[sequence] expected a new id, got 1");
  CHECK_THROWS(cache.add(2, 5), CapacityError, "expected 3 blocks available, got 2");
  CHECK(!cache.can_add(5) && cache.can_add(4));
  CHECK_THROWS(cache.remove(2), InvalidArgument, "an id in the cache, got 2");
  CHECK_THROWS(cache.length(2), InvalidArgument, "got 2");
  CHECK_THROWS(cache.slot(2, 0, 0), InvalidArgument, "got 2");
  CHECK_THROWS(cache.table(2, 0), InvalidArgument, "got 2");
  CHECK_THROWS(cache.fork(2, 3, 1), InvalidArgument, "got 2");
  CHECK_THROWS(cache.fork(1, 1, 1), InvalidArgument, "a new id");
  CHECK_THROWS(cache.prepare(2, 1, moves), InvalidArgument, "got 2");
  CHECK_THROWS(cache.truncate(1, 1), InvalidArgument, "[truncate] expected a length in [0, 0]");
  CHECK_THROWS(cache.advance(1, 1), InternalError, "[advance]");
  grow(cache, 1, 3);
  CHECK_THROWS(cache.truncate(1, -1), InvalidArgument, "got -1");
  CHECK_THROWS(cache.advance(1, 2), InternalError, "from 3 on, got 2");
  CHECK_THROWS(cache.advance(1, 5), InternalError, "got 5");
  CHECK_EQ(cache.length(1), 3);
  cache.check_invariants();
}

// A sequence may grow past its promise only into blocks that nobody was promised.
TEST(kv_cache_prepare_leaves_everything_where_there_is_no_room) {
  KvCache cache(layout(2, 4));
  cache.add(1, 2);
  cache.add(2, 4);
  grow(cache, 1, 2);
  grow(cache, 1, 4);  // the one block that is free for all
  Moves moves;
  const auto before = table(cache, 1);
  CHECK_THROWS(cache.prepare(1, 5, moves), CapacityError, "expected 1 free blocks, got 0");
  CHECK_THROWS(cache.commit(1, Path{0}, moves), CapacityError, "[kv cache]");
  CHECK(moves.empty());
  CHECK(table(cache, 1) == before);
  CHECK_EQ(cache.length(1), 4);
  cache.check_invariants();
  grow(cache, 2, 4);  // the promise held
  CHECK_THROWS(cache.prepare(2, 5, moves), CapacityError, "[kv cache]");
  cache.remove(1);
  grow(cache, 2, 8);
}

// The accepted path crosses the edge of a pool that is exactly full.
TEST(kv_cache_commit_crosses_a_block_edge_of_a_full_pool) {
  for (const std::int64_t block_size : {1, 3, 4, 16}) {
    KvCache cache(layout(block_size, 3));
    cache.add(1, block_size * 3);
    grow(cache, 1, block_size * 3 - 4 > 0 ? block_size * 3 - 4 : 1);
    const std::int64_t start = cache.length(1);
    const Path path{1, 3, 4, 6};
    const auto left = static_cast<std::size_t>(block_size * 3 - start);
    const std::span<const std::int32_t> fits(path.data(), std::min<std::size_t>(4, left));
    Moves moves;
    cache.commit(1, fits, moves);
    cache.check_invariants();
    CHECK_EQ(cache.length(1), block_size * 3);
    CHECK_EQ(cache.available_blocks(), 0);
    CHECK_EQ(moves.size(), fits.size());
    for (std::size_t i = 0; i < fits.size(); ++i) {
      CHECK_EQ(moves[i].from, cache.scratch_slot(0, path[i]));
      CHECK_EQ(moves[i].to, cache.slot(1, 0, start + static_cast<std::int64_t>(i)));
      CHECK_EQ(moves[i].count, 1);
    }
    moves.clear();
    CHECK_THROWS(cache.commit(1, Path{0}, moves), CapacityError, "[kv cache]");
    CHECK(moves.empty());
    CHECK_EQ(cache.length(1), block_size * 3);
    cache.check_invariants();
  }
}

TEST(kv_cache_empty_commit_does_nothing) {
  KvCache cache(layout(4, 2));
  cache.add(1, 4);
  Moves moves;
  cache.commit(1, {}, moves);
  CHECK(moves.empty());
  CHECK_EQ(cache.length(1), 0);
  CHECK_EQ(cache.used_blocks(0), 0);
}

TEST(kv_cache_fork_shares_and_copies_on_write) {
  KvCache cache(layout(4, 8));
  cache.add(1, 12);
  grow(cache, 1, 6);
  cache.fork(1, 2, 10);
  cache.check_invariants();
  CHECK_EQ(cache.length(2), 6);
  CHECK(table(cache, 1) == table(cache, 2));
  CHECK_EQ(cache.used_blocks(0), 2);

  Moves moves;
  cache.prepare(2, 7, moves);
  CHECK_EQ(moves.size(), 1u);
  CHECK_EQ(moves[0].from, cache.slot(1, 0, 4));
  CHECK_EQ(moves[0].to, cache.slot(2, 0, 4));
  CHECK_EQ(moves[0].count, 2);
  cache.advance(2, 7);
  cache.check_invariants();
  CHECK_EQ(table(cache, 1)[0], table(cache, 2)[0]);
  CHECK(table(cache, 1)[1] != table(cache, 2)[1]);

  moves.clear();
  cache.prepare(1, 7, moves);  // alone with its block again
  CHECK(moves.empty());
  cache.advance(1, 7);
  cache.remove(1);
  cache.check_invariants();
  CHECK_EQ(cache.used_blocks(0), 2);
  cache.remove(2);
  CHECK_EQ(cache.available_blocks(), 8);
  cache.check_invariants();
}

TEST(kv_cache_fork_without_room_changes_nothing) {
  KvCache cache(layout(4, 3));
  cache.add(1, 8);
  grow(cache, 1, 6);
  // Each of the two may have to copy the block that they share.
  CHECK_THROWS(cache.fork(1, 2, 8), CapacityError, "[kv cache]");
  CHECK(!cache.contains(2));
  cache.check_invariants();
  grow(cache, 1, 8);
  cache.fork(1, 2, 12);  // whole blocks are never copied
  cache.check_invariants();
  grow(cache, 2, 12);
  CHECK_EQ(cache.available_blocks(), 0);
}

TEST(kv_cache_truncate) {
  KvCache cache(layout(4, 4));
  cache.add(1, 16);
  grow(cache, 1, 11);
  const auto before = table(cache, 1);
  cache.truncate(1, 11);
  cache.truncate(1, 9);
  CHECK(table(cache, 1) == before);
  cache.truncate(1, 8);
  CHECK_EQ(cache.used_blocks(0), 2);
  CHECK_EQ(cache.available_blocks(), 0);  // still promised
  cache.check_invariants();
  cache.truncate(1, 0);
  CHECK_EQ(cache.used_blocks(0), 0);
  grow(cache, 1, 16);
}

TEST(kv_cache_truncate_frees_what_was_only_prepared) {
  KvCache cache(layout(2, 4));
  cache.add(1, 8);
  Moves moves;
  cache.prepare(1, 7, moves);
  cache.advance(1, 3);
  CHECK_EQ(cache.used_blocks(0), 4);
  cache.truncate(1, 3);
  CHECK_EQ(cache.used_blocks(0), 2);
  cache.check_invariants();
}

// After a cut into a block that another sequence shares, the next write needs a copy, and the pool
// may have none to promise.
TEST(kv_cache_truncate_into_a_shared_block_keeps_promises) {
  KvCache cache(layout(2, 3));
  cache.add(1, 4);
  grow(cache, 1, 4);
  cache.fork(1, 2, 4);
  cache.add(3, 2);
  CHECK_EQ(cache.available_blocks(), 0);
  CHECK_THROWS(cache.truncate(2, 3), CapacityError, "[kv cache]");
  CHECK_EQ(cache.length(2), 4);
  CHECK(table(cache, 1) == table(cache, 2));
  cache.check_invariants();
  grow(cache, 3, 2);
  CHECK_THROWS(cache.truncate(2, 2), CapacityError, "[kv cache]");  // a whole block likewise
  cache.remove(3);
  cache.truncate(2, 3);
  CHECK_EQ(cache.available_blocks(), 0);
  cache.check_invariants();
  grow(cache, 2, 4);
  CHECK_EQ(cache.used_blocks(0), 3);
}

TEST(kv_cache_window_frees_blocks) {
  KvCache cache(layout(2, 8, 3));
  cache.add(1, 12);
  grow(cache, 1, 5);  // the next query, at 5, sees 3, 4, 5
  CHECK_EQ(cache.used_blocks(0), 2);
  CHECK_EQ(table(cache, 1)[0], -1);
  CHECK(table(cache, 1)[1] >= 0);
  grow(cache, 1, 6);
  grow(cache, 1, 12);
  CHECK_EQ(cache.used_blocks(0), 1);
  CHECK_THROWS(cache.truncate(1, 7), InvalidArgument, "whose window is still held, got 7");
  CHECK_EQ(cache.length(1), 12);
  cache.truncate(1, 12);
  cache.check_invariants();
  cache.remove(1);
  CHECK_EQ(cache.available_blocks(), 8);
}

// Blocks that left the window went back to the pool and may be promised to others; starting over
// needs them all again.
TEST(kv_cache_truncate_to_nothing_with_a_window_keeps_promises) {
  KvCache cache(layout(1, 8, 2));
  cache.add(1, 6);
  grow(cache, 1, 6);
  CHECK_EQ(cache.used_blocks(0), 1);
  cache.add(2, 7);
  CHECK_THROWS(cache.truncate(1, 0), CapacityError, "[kv cache]");
  cache.check_invariants();
  grow(cache, 2, 7);
  cache.remove(1);
  cache.check_invariants();
  CHECK_EQ(cache.available_blocks(), 7);
}

// A block that two share leaves the window of one: it is not free, and both still get all that they
// were promised, in whatever order.
TEST(kv_cache_fork_with_a_window_keeps_promises) {
  for (const bool parent_first : {true, false}) {
    KvCache cache(layout(2, 12, 4, 2));  // (4 + 2) / 2 + 1 = 4 blocks each
    cache.add(1, 40);
    grow(cache, 1, 2);
    grow(cache, 1, 4);
    grow(cache, 1, 5);
    cache.fork(1, 2, 40);
    cache.check_invariants();
    CHECK(table(cache, 1) == table(cache, 2));
    CHECK_EQ(cache.used_blocks(0), 2);
    CHECK_EQ(cache.available_blocks(), 4);
    cache.add(3, 40);
    CHECK_EQ(cache.available_blocks(), 0);
    CHECK_THROWS(cache.fork(1, 4, 40), CapacityError, "[kv cache]");
    for (std::int64_t length = 2; length <= 6; length += 2) grow(cache, 3, length);
    const specrt::SequenceId first = parent_first ? 1 : 2;
    for (std::int64_t length = 6; length <= 40; ++length) grow(cache, first, length);
    for (std::int64_t length = 6; length <= 40; ++length) grow(cache, 3 - first, length);
    for (std::int64_t length = 7; length <= 40; ++length) grow(cache, 3, length);
    for (const specrt::SequenceId id : {1, 2, 3}) cache.remove(id);
    cache.check_invariants();
    CHECK_EQ(cache.available_blocks(), 12);
  }
}

// What advance() kept for a cut goes with the cut, or the next pass would not fit beside it.
TEST(kv_cache_window_that_is_kept_for_a_cut) {
  KvCache cache(layout(1, 8, 3, 4));
  cache.add(1, 30);
  grow(cache, 1, 4);
  Moves moves;
  for (std::int64_t length = 5; length <= 8; ++length) {
    cache.prepare(1, length, moves);
    cache.advance(1, length, 4);
    cache.check_invariants();
  }
  CHECK_EQ(cache.used_blocks(0), 6);
  cache.truncate(1, 7);
  cache.check_invariants();
  CHECK_EQ(cache.used_blocks(0), 2);
  grow(cache, 1, 11);
}

TEST(kv_layout_sizes_groups) {
  KvLayout two = layout(4, 1);
  two.scratch_slots = 8;
  two.groups.push_back(two.groups[0]);
  two.groups[1].window = 6;  // (6 + 8 + 3) / 4 + 1 = 5 blocks at once
  const auto sizes = [&](std::int64_t blocks, bool reuse) {
    two.prefix_reuse = reuse;
    two.set_blocks(blocks, 3, 10);
    return std::vector<std::int64_t>{two.groups[0].num_blocks, two.groups[1].num_blocks};
  };
  for (const bool reuse : {false, true}) {
    CHECK(sizes(1, reuse) == (std::vector<std::int64_t>{1, 1}));
    CHECK(sizes(4, reuse) == (std::vector<std::int64_t>{4, 4}));
    CHECK(sizes(20, reuse) == (std::vector<std::int64_t>{20, 15}));
    CHECK(sizes(30, reuse) == (std::vector<std::int64_t>{30, 15}));
  }
  // Three sequences of ten blocks are all that can run; the rest keeps what has run.
  CHECK(sizes(37, false) == (std::vector<std::int64_t>{30, 15}));
  CHECK(sizes(37, true) == (std::vector<std::int64_t>{37, 22}));
}
