// Sharing the beginnings of prompts, in caches with and without windows.

#include <cstdint>
#include <map>
#include <vector>

#include "check.h"
#include "core/kv_cache.h"
#include "specrt/error.h"

namespace {

using specrt::KvCache;
using specrt::KvGroup;
using specrt::KvLayout;
using specrt::KvPlane;
using specrt::SequenceId;
using specrt::TokenId;
using Moves = std::vector<KvCache::Move>;
using Table = std::vector<std::int32_t>;

struct Group {
  std::int64_t blocks;
  std::int64_t window;
};

KvLayout layout(std::int64_t block_size, const std::vector<Group>& groups,
                std::int64_t scratch = 4) {
  KvLayout out;
  out.block_size = block_size;
  out.scratch_slots = scratch;
  out.prefix_reuse = true;
  for (const Group& one : groups) {
    KvGroup group;
    group.layers = {static_cast<std::int64_t>(out.groups.size())};
    group.planes = {KvPlane{1, 2, specrt::KvDType::f32}};
    group.num_blocks = one.blocks;
    group.window = one.window;
    out.groups.push_back(group);
  }
  return out;
}

// In passes of at most four positions, remembering what becomes full.
void grow(KvCache& cache, SequenceId id, std::int64_t length, const std::vector<TokenId>& text) {
  while (cache.length(id) < length) {
    const std::int64_t to = std::min(length, cache.length(id) + 4);
    Moves moves;
    cache.prepare(id, to, moves);
    cache.advance(id, to, to, text);
    cache.check_invariants();
  }
}

Table table(const KvCache& cache, SequenceId id, std::int64_t group = 0) {
  return {cache.table(id, group).begin(), cache.table(id, group).end()};
}

std::vector<TokenId> text_of(std::size_t size, std::size_t step = 3) {
  std::vector<TokenId> text(size);
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<TokenId>(i * step % 7);
  return text;
}

}  // namespace

TEST(kv_cache_prefix_reuse) {
  KvCache cache(layout(4, {{10, 0}}));
  const std::vector<TokenId> text = text_of(20);
  CHECK_EQ(cache.add(1, 20, text), 0);
  grow(cache, 1, 18, text);
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
  std::vector<TokenId> other = text;
  other[0] += 1;
  CHECK_EQ(cache.add(3, 20, other), 0);
  grow(cache, 3, 20, other);
  // Pressure: the oldest go, and what is in use stays whole.
  CHECK_EQ(cache.add(4, 12, std::span(text).first(12)), 8);
  cache.check_invariants();
  grow(cache, 4, 12, text);
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
      KvCache cache(layout(block_size, {{24 / block_size, 0}}));
      std::uint32_t state = seed * 2654435761u + 1;
      const auto below = [&](std::uint32_t limit) {
        state = state * 1664525u + 1013904223u;
        return (state >> 8) % limit;
      };
      std::vector<std::vector<TokenId>> slots(1000);
      std::map<SequenceId, std::vector<TokenId>> texts;
      SequenceId next = 0;
      std::int64_t hits = 0;
      for (int i = 0; i < 200; ++i) {
        if (texts.empty() || (below(3) == 0 && texts.size() < 4)) {
          std::vector<TokenId> prompt(1 + below(8));
          for (auto& token : prompt) token = static_cast<TokenId>(below(2));
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
          const SequenceId id = at->first;
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

// Two compute the same at the same time: one copy is kept, and shared.
TEST(kv_cache_keeps_one_copy_of_what_two_computed) {
  for (const std::int64_t window : {0, 5}) {
    KvCache cache(layout(2, {{20, window}}));
    const std::vector<TokenId> text = text_of(9);
    for (const SequenceId id : {1, 2}) CHECK_EQ(cache.add(id, 20, text), 0);
    grow(cache, 1, 4, text);
    CHECK_EQ(cache.used_blocks(0), 2);
    grow(cache, 2, 4, text);
    CHECK_EQ(cache.used_blocks(0), 2);
    CHECK(table(cache, 1) == table(cache, 2));
    cache.remove(1);
    cache.check_invariants();
    CHECK_EQ(cache.add(3, 20, text), 4);
    CHECK(table(cache, 3) == table(cache, 2));
  }
}

// A cut takes back what was remembered behind it: what comes instead is another text.
TEST(kv_cache_remembers_the_text_after_a_cut) {
  for (const std::int64_t window : {0, 20}) {
    KvCache cache(layout(2, {{20, window}}));
    const std::vector<TokenId> text = text_of(12);
    std::vector<TokenId> other = text;
    for (std::size_t i = 5; i < other.size(); ++i) other[i] = 9;
    cache.add(1, 20, text);
    grow(cache, 1, 10, text);
    cache.truncate(1, 5);
    cache.check_invariants();
    grow(cache, 1, 10, other);
    const Table blocks = table(cache, 1);
    CHECK_EQ(cache.add(2, 20, other), 10);
    CHECK(table(cache, 2) == blocks);
    cache.check_invariants();
    // The third block was written over, or copied; its old text ends there.
    cache.remove(2);
    CHECK_EQ(cache.add(2, 20, text), 4);
    cache.check_invariants();
  }
}

// A query behind a hit sees a window back, so that is all that has to be there.
TEST(kv_cache_hit_needs_no_more_than_the_window) {
  KvCache cache(layout(2, {{20, 5}}));
  const std::vector<TokenId> text = text_of(21);
  CHECK_EQ(cache.add(1, 21, text), 0);
  grow(cache, 1, 20, text);
  CHECK_EQ(cache.used_blocks(0), 2);
  const Table first = table(cache, 1);
  cache.remove(1);
  cache.check_invariants();
  CHECK_EQ(cache.remembered_blocks(), 10);
  CHECK_EQ(cache.add(2, 30, text), 20);
  cache.check_invariants();
  CHECK(table(cache, 2) == first);
  CHECK_EQ(cache.used_blocks(0), 2);
  cache.remove(2);
  // Another text drives out the oldest: they left their window first.
  const std::vector<TokenId> other = text_of(40, 5);
  CHECK_EQ(cache.add(3, 34, other), 0);
  grow(cache, 3, 32, other);
  CHECK_EQ(cache.remembered_blocks(), 18);
  cache.remove(3);
  cache.check_invariants();
  CHECK_EQ(cache.add(4, 30, text), 20);
  CHECK_EQ(cache.add(5, 30, std::span(text).first(13)), 0);  // in the middle of what is gone
  cache.check_invariants();
  for (const SequenceId id : {4, 5}) cache.remove(id);
  CHECK_EQ(cache.available_blocks(), 20);
}

// A hit ends where every group has what it needs.
TEST(kv_cache_hit_ends_where_every_group_has_its_blocks) {
  // The windowed group has few blocks, and loses the first text's end to the second text.
  KvCache cache(layout(2, {{40, 0}, {15, 3}}));
  const std::vector<TokenId> text = text_of(21);
  const std::vector<TokenId> other = text_of(40, 5);
  cache.add(1, 21, text);
  grow(cache, 1, 12, text);
  cache.fork(1, 2, 21);  // stays, and holds the window at 12
  grow(cache, 1, 20, text);
  cache.remove(1);
  CHECK_EQ(cache.add(1, 21, text), 20);
  cache.remove(1);
  cache.add(3, 30, other);
  grow(cache, 3, 28, other);
  CHECK_EQ(cache.add(1, 21, text), 12);
  CHECK_EQ(cache.table(1, 0).size(), 6u);
  CHECK(table(cache, 1, 1) == table(cache, 2, 1));
  cache.check_invariants();
  // Computed again, it is known again.
  grow(cache, 1, 20, text);
  cache.remove(3);
  cache.remove(2);
  cache.remove(1);
  CHECK_EQ(cache.add(1, 21, text), 20);
  cache.remove(1);
  cache.check_invariants();
  CHECK_EQ(cache.available_blocks(), 15);
}

// Without a window a beginning goes from its far end, and takes along what other groups have of it.
TEST(kv_cache_forgets_in_all_groups_at_once) {
  KvCache cache(layout(2, {{10, 0}, {20, 5}}));
  const std::vector<TokenId> text = text_of(21);
  cache.add(1, 20, text);
  grow(cache, 1, 16, text);
  cache.remove(1);
  CHECK_EQ(cache.remembered_blocks(), 8);
  const std::vector<TokenId> other = text_of(40, 5);
  cache.add(2, 10, other);
  grow(cache, 2, 8, other);
  cache.check_invariants();
  cache.remove(2);
  // Eight blocks were known, four had to be had, two were free.
  CHECK_EQ(cache.add(3, 20, text), 12);
  cache.check_invariants();
}
