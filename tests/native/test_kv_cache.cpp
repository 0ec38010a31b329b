#include <cstdint>
#include <map>
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

TEST(kv_cache_shares_nothing_with_a_window) {
  KvLayout windowed = layout(2, 10, 4);
  windowed.prefix_reuse = true;
  KvCache cache(windowed);
  const std::vector<specrt::TokenId> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  CHECK_EQ(cache.add(1, 12, prompt), 0);
  grow(cache, 1, 8);
  cache.remember(1, prompt);
  CHECK_THROWS(cache.fork(1, 2, 12), specrt::UnsupportedError, "[fork]");
  CHECK_EQ(cache.add(3, 12, prompt), 0);
  cache.check_invariants();
}

TEST(kv_cache_prefix_reuse) {
  KvLayout reusing = layout(4, 10);
  reusing.prefix_reuse = true;
  KvCache cache(reusing);
  std::vector<specrt::TokenId> text(20);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<specrt::TokenId>(i * 3 % 7);
  CHECK_EQ(cache.add(1, 20, text), 0);
  grow(cache, 1, 18);
  cache.remember(1, text);
  cache.check_invariants();
  const auto first = table(cache, 1);
  // While the first still runs: whole blocks only, and never the last token.
  CHECK_EQ(cache.add(2, 20, text), 16);
  CHECK_EQ(table(cache, 2)[3], first[3]);
  cache.check_invariants();
  cache.remove(2);
  CHECK_EQ(cache.add(2, 16, std::span(text).first(16)), 12);
  cache.remove(2);
  cache.remove(1);
  cache.check_invariants();
  CHECK_EQ(cache.available_blocks(), 10);  // remembered blocks give way
  CHECK_EQ(cache.used_blocks(0), 0);
  CHECK_EQ(cache.remembered_blocks(), 4);
  // Another beginning, another text.
  std::vector<specrt::TokenId> other = text;
  other[0] += 1;
  CHECK_EQ(cache.add(3, 20, other), 0);
  grow(cache, 3, 20);
  cache.remember(3, other);
  cache.check_invariants();
  // Pressure: the oldest go, and what is in use stays whole.
  CHECK_EQ(cache.add(4, 12, std::span(text).first(12)), 8);
  cache.check_invariants();
  grow(cache, 4, 12);
  CHECK_EQ(table(cache, 4)[0], first[0]);
  CHECK_EQ(table(cache, 4)[1], first[1]);
  cache.remove(3);
  cache.remove(4);
  cache.check_invariants();
  CHECK_EQ(cache.available_blocks(), 10);
}

TEST(kv_cache_prefix_reuse_at_random) {
  // Few tokens and short blocks, so that prompts share beginnings of every length; `slots` holds
  // what a real cache would, and every position of every sequence must read its own token.
  for (const std::int64_t block_size : {1, 2, 3}) {
    for (std::uint32_t seed = 0; seed < 40; ++seed) {
      KvLayout reusing = layout(block_size, 24 / block_size);
      reusing.prefix_reuse = true;
      KvCache cache(reusing);
      std::uint32_t state = seed * 2654435761u + 1;
      const auto below = [&](std::uint32_t limit) {
        state = state * 1664525u + 1013904223u;
        return (state >> 8) % limit;
      };
      std::vector<std::vector<specrt::TokenId>> slots(1000);
      std::map<specrt::SequenceId, std::vector<specrt::TokenId>> texts;
      specrt::SequenceId next = 0;
      std::int64_t hits = 0;
      for (int i = 0; i < 200; ++i) {
        if (texts.empty() || (below(3) == 0 && texts.size() < 4)) {
          std::vector<specrt::TokenId> prompt(1 + below(8));
          for (auto& token : prompt) token = static_cast<specrt::TokenId>(below(2));
          const std::int64_t reserved = static_cast<std::int64_t>(prompt.size()) + 4;
          if (!cache.can_add(reserved)) continue;
          const std::int64_t known = cache.add(next, reserved, prompt);
          CHECK(known < static_cast<std::int64_t>(prompt.size()));
          hits += known;
          texts[next] = prompt;
          ++next;
        } else {
          auto at = texts.begin();
          std::advance(at, below(static_cast<std::uint32_t>(texts.size())));
          const specrt::SequenceId id = at->first;
          auto& text = at->second;
          const std::int64_t length = cache.length(id);
          if (length == static_cast<std::int64_t>(text.size())) {
            cache.remove(id);
            texts.erase(at);
          } else {
            const std::int64_t to =
                length + 1 +
                below(static_cast<std::uint32_t>(static_cast<std::int64_t>(text.size()) - length));
            Moves moves;
            cache.prepare(id, to, moves);
            CHECK(moves.empty());
            for (std::int64_t p = length; p < to; ++p) {
              // A slot's content is its whole history: that is what K and V depend on.
              slots[static_cast<std::size_t>(cache.slot(id, 0, p))].assign(text.begin(),
                                                                           text.begin() + p + 1);
            }
            cache.advance(id, to);
            cache.remember(id, text);
          }
        }
        cache.check_invariants();
        for (const auto& [id, text] : texts) {
          for (std::int64_t p = 0; p < cache.length(id); ++p) {
            const auto& held = slots[static_cast<std::size_t>(cache.slot(id, 0, p))];
            CHECK(std::equal(held.begin(), held.end(), text.begin(), text.begin() + p + 1));
          }
        }
      }
      CHECK(hits > 0);
    }
  }
}
