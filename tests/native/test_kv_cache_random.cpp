// Random operations on the cache against a model that keeps what every slot holds. K and V depend
// on a token and all before it, so that is what a slot's value stands for.

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/kv_cache.h"
#include "specrt/error.h"
#include "tiny_model.h"

namespace {

using specrt::CapacityError;
using specrt::InvalidArgument;
using specrt::KvCache;
using specrt::KvGroup;
using specrt::KvLayout;
using specrt::KvPlane;
using specrt::SequenceId;

constexpr std::int64_t kScratch = 12;
constexpr int kGarbage = -1;

struct Setting {
  std::int64_t block_size;
  std::vector<std::int64_t> blocks;  // by group
  std::vector<std::int64_t> windows;
  bool reuse = false;
};

KvLayout layout_of(const Setting& setting) {
  KvLayout layout;
  layout.block_size = setting.block_size;
  layout.scratch_slots = kScratch;
  layout.prefix_reuse = setting.reuse;
  for (std::size_t g = 0; g < setting.blocks.size(); ++g) {
    KvGroup group;
    group.layers = {static_cast<std::int64_t>(g)};
    group.planes = {KvPlane{1, 2, specrt::KvDType::f32}};
    group.num_blocks = setting.blocks[g];
    group.window = setting.windows[g];
    layout.groups.push_back(group);
  }
  return layout;
}

class World {
 public:
  World(const Setting& setting, std::uint64_t seed) : cache_(layout_of(setting)), random_(seed) {
    for (const KvGroup& group : cache_.layout().groups) {
      slots_.emplace_back(
          static_cast<std::size_t>(group.num_blocks * setting.block_size + kScratch), kGarbage);
    }
    available_at_first_ = cache_.available_blocks();
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      step();
      verify();
      if (i % 3 == 0) verify_promises();
    }
    while (!texts_.empty()) {
      remove();
      verify();
    }
    CHECK_EQ(cache_.available_blocks(), available_at_first_);
    for (std::size_t g = 0; g < slots_.size(); ++g) {
      CHECK_EQ(cache_.used_blocks(static_cast<std::int64_t>(g)), 0);
    }
  }

  std::int64_t refused() const { return refused_; }
  std::int64_t forked() const { return forked_; }
  std::int64_t committed() const { return committed_; }
  std::int64_t hits() const { return hits_; }
  std::int64_t reserved() const { return reserved_; }
  std::int64_t refused_reserves() const { return short_; }

 private:
  struct Text {
    std::vector<specrt::TokenId> tokens;  // of the prompt some may not be computed yet
    std::vector<int> values;              // of the positions that are
    std::int64_t reserved = 0;
  };

  // What a slot holds behind a history that ends in `before`.
  int value(int before, specrt::TokenId token) {
    const auto [at, fresh] = values_.try_emplace({before, token}, next_value_);
    if (fresh) ++next_value_;
    return at->second;
  }
  // The next position's: the prompt's token, or one of two.
  int append(Text& text) {
    const std::size_t p = text.values.size();
    if (p == text.tokens.size()) text.tokens.push_back(static_cast<specrt::TokenId>(below(2)));
    text.values.push_back(value(p == 0 ? kGarbage : text.values.back(), text.tokens[p]));
    return text.values.back();
  }

  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }
  SequenceId any() {
    auto at = texts_.begin();
    std::advance(at, below(std::ssize(texts_)));
    return at->first;
  }

  void step() {
    const std::int64_t dice = below(20);
    if (texts_.empty() || (dice < 3 && texts_.size() < 6)) return add();
    if (dice < 5 && texts_.size() < 6) return fork();
    if (dice < 10) return extend();
    if (dice < 14) return commit();
    if (dice < 15) return guess();
    if (dice < 17) return truncate();
    if (dice < 18) return reserve();
    remove();
  }

  // Runs an operation; one that is refused must have changed nothing.
  template <typename Operation>
  bool attempt(Operation&& operation) {
    const KvCache before = cache_;
    try {
      operation();
      return true;
    } catch (const CapacityError&) {
    } catch (const InvalidArgument&) {
    }
    ++refused_;
    CHECK_EQ(cache_.available_blocks(), before.available_blocks());
    CHECK_EQ(cache_.size(), before.size());
    for (const auto& [id, text] : texts_) {
      CHECK_EQ(cache_.length(id), before.length(id));
      for (std::size_t g = 0; g < slots_.size(); ++g) {
        const auto group = static_cast<std::int64_t>(g);
        CHECK(std::ranges::equal(cache_.table(id, group), before.table(id, group)));
      }
    }
    return false;
  }

  void add() {
    const std::int64_t reserved = below(30);
    const bool fits = cache_.can_add(reserved);
    const SequenceId id = next_id_++;
    Text text;
    text.reserved = reserved;
    text.tokens.resize(static_cast<std::size_t>(below(reserved + 1)));
    for (auto& token : text.tokens) token = static_cast<specrt::TokenId>(below(8) == 0);
    std::int64_t known = 0;
    CHECK_EQ(attempt([&] { known = cache_.add(id, reserved, text.tokens); }), fits);
    if (!fits) return;
    CHECK(known == 0 || (cache_.layout().prefix_reuse && known < std::ssize(text.tokens)));
    while (std::ssize(text.values) < known) append(text);
    texts_[id] = text;
    hits_ += known > 0 ? 1 : 0;
  }

  void reserve() {
    const SequenceId id = any();
    const std::int64_t wanted = below(40);
    bool fine = false;
    CHECK(attempt([&] { fine = cache_.reserve(id, wanted); }));
    Text& text = texts_[id];
    CHECK(fine || wanted > std::max(text.reserved, std::ssize(text.values)));
    if (fine) text.reserved = std::max(text.reserved, wanted);
    reserved_ += fine ? 1 : 0;
    short_ += fine ? 0 : 1;
  }

  void fork() {
    const SequenceId parent = any();
    const SequenceId child = next_id_++;
    const std::int64_t reserved = below(30);
    if (!attempt([&] { cache_.fork(parent, child, reserved); })) return;
    texts_[child] = texts_[parent];
    texts_[child].reserved = std::max(reserved, std::ssize(texts_[parent].values));
    ++forked_;
  }

  void apply(const std::vector<KvCache::Move>& moves) {
    for (const KvCache::Move& move : moves) {
      std::vector<int>& slots = slots_[static_cast<std::size_t>(move.group)];
      for (std::int32_t i = 0; i < move.count; ++i) {
        slots.at(static_cast<std::size_t>(move.to + i)) =
            slots.at(static_cast<std::size_t>(move.from + i));
      }
    }
  }

  void extend() {
    const SequenceId id = any();
    Text& text = texts_[id];
    const std::int64_t length = std::ssize(text.values);
    const std::int64_t wanted = length + below(12);
    std::vector<KvCache::Move> moves;
    if (!attempt([&] { cache_.prepare(id, wanted, moves); })) {
      CHECK(wanted > text.reserved);
      CHECK(moves.empty());
      return;
    }
    apply(moves);
    // Not everything that was prepared need be used.
    const std::int64_t used = wanted - (wanted > length && below(4) == 0 ? 1 : 0);
    for (std::int64_t position = length; position < used; ++position) {
      write(id, position, append(text));
    }
    if (below(4) == 0) {
      cache_.advance(id, used);
      if (below(2) == 0) cache_.remember(id, text.tokens);
    } else {
      cache_.advance(id, used, used, text.tokens);
    }
  }

  void write(SequenceId id, std::int64_t position, int value) {
    for (std::size_t g = 0; g < slots_.size(); ++g) {
      slots_[g].at(static_cast<std::size_t>(
          cache_.slot(id, static_cast<std::int64_t>(g), position))) = value;
    }
  }

  // A drafter writes its guesses in place, one a pass, and is cut back to what came true.
  void guess() {
    const SequenceId id = any();
    Text& text = texts_[id];
    const std::int64_t length = std::ssize(text.values);
    const std::int64_t room = std::max<std::int64_t>(0, text.reserved - length);
    const std::int64_t guesses = below(std::min(kScratch, room) + 1);
    std::vector<KvCache::Move> moves;
    for (std::int64_t i = 0; i < guesses; ++i) {
      moves.clear();
      cache_.prepare(id, length + i + 1, moves);
      apply(moves);
      write(id, length + i, append(text));
      cache_.advance(id, length + i + 1, length);
      verify();
    }
    const std::int64_t kept = length + below(guesses + 1);
    cache_.truncate(id, kept);
    text.values.resize(static_cast<std::size_t>(kept));
    text.tokens.resize(text.values.size());
  }

  void commit() {
    const SequenceId id = any();
    Text& text = texts_[id];
    std::vector<std::int32_t> path;
    for (std::int32_t i = static_cast<std::int32_t>(below(3)); i < kScratch;
         i += 1 + static_cast<std::int32_t>(below(4))) {
      path.push_back(i);
    }
    path.resize(static_cast<std::size_t>(below(std::ssize(path) + 1)));
    Text then = text;
    for (const std::int32_t node : path) {
      const int value = append(then);
      for (std::size_t g = 0; g < slots_.size(); ++g) {
        slots_[g].at(static_cast<std::size_t>(
            cache_.scratch_slot(static_cast<std::int64_t>(g), node))) = value;
      }
    }
    std::vector<KvCache::Move> moves;
    if (!attempt([&] { cache_.commit(id, path, moves, then.tokens); })) {
      CHECK(std::ssize(text.values) + std::ssize(path) > text.reserved);
      CHECK(moves.empty());
      return;
    }
    apply(moves);
    text = then;
    ++committed_;
  }

  void truncate() {
    const SequenceId id = any();
    Text& text = texts_[id];
    const std::int64_t length = std::ssize(text.values);
    // Mostly a little, as a rollback is.
    const std::int64_t cut =
        below(4) == 0 ? below(length + 1) : below(std::min<std::int64_t>(length, 5) + 1);
    if (!attempt([&] { cache_.truncate(id, length - cut); })) return;
    text.values.resize(static_cast<std::size_t>(length - cut));
    text.tokens.resize(text.values.size());
  }

  void remove() {
    const SequenceId id = any();
    cache_.remove(id);
    CHECK(!cache_.contains(id));
    texts_.erase(id);
  }

  void verify() {
    cache_.check_invariants();
    for (std::size_t g = 0; g < slots_.size(); ++g) {
      const auto group = static_cast<std::int64_t>(g);
      const KvGroup& spec = cache_.layout().groups[g];
      std::vector<bool> used(static_cast<std::size_t>(spec.num_blocks), false);
      for (const auto& [id, text] : texts_) {
        for (const std::int32_t block : cache_.table(id, group)) {
          if (block >= 0) used[static_cast<std::size_t>(block)] = true;
        }
        CHECK_EQ(cache_.length(id), std::ssize(text.values));
        const std::int64_t first =
            spec.window == 0 ? 0 : std::max<std::int64_t>(0, cache_.length(id) - spec.window + 1);
        for (std::int64_t p = first; p < cache_.length(id); ++p) {
          CHECK_EQ(slots_[g].at(static_cast<std::size_t>(cache_.slot(id, group, p))),
                   text.values[static_cast<std::size_t>(p)]);
        }
      }
      CHECK_EQ(cache_.used_blocks(group), std::count(used.begin(), used.end(), true));
      // Whoever still reads what was given back, or never written, shall see it.
      const std::vector<bool> filled = cache_.filled_slots(group);
      for (std::size_t slot = 0; slot < filled.size(); ++slot) {
        if (!filled[slot]) slots_[g][slot] = kGarbage;
      }
    }
  }

  // Every sequence can grow to its reserved length, in any order and however the others grow.
  void verify_promises() {
    KvCache trial = cache_;
    std::vector<SequenceId> left;
    for (const auto& [id, text] : texts_) left.push_back(id);
    std::vector<KvCache::Move> moves;
    while (!left.empty()) {
      const auto at = left.begin() + below(std::ssize(left));
      const std::int64_t length = trial.length(*at);
      const std::int64_t reserved = texts_[*at].reserved;
      if (length >= reserved) {
        left.erase(at);
        continue;
      }
      // No pass writes more than there are scratch slots.
      const std::int64_t to = length + 1 + below(std::min(reserved - length, kScratch));
      trial.prepare(*at, to, moves);
      trial.advance(*at, to);
    }
    trial.check_invariants();
  }

  KvCache cache_;
  std::mt19937_64 random_;
  std::vector<std::vector<int>> slots_;  // by group: the value that each slot holds
  std::map<SequenceId, Text> texts_;
  SequenceId next_id_ = 0;
  std::map<std::pair<int, specrt::TokenId>, int> values_;
  int next_value_ = 0;
  std::int64_t available_at_first_ = 0;
  std::int64_t refused_ = 0;
  std::int64_t forked_ = 0;
  std::int64_t committed_ = 0;
  std::int64_t hits_ = 0;
  std::int64_t reserved_ = 0;
  std::int64_t short_ = 0;
};

}  // namespace

TEST(kv_cache_random_operations) {
  const std::uint64_t seeds = tiny::kThinned ? 5 : 20;
  const auto enough = static_cast<std::int64_t>(25 * seeds);
  for (const bool reuse : {false, true}) {
    std::int64_t refused = 0;
    std::int64_t forked = 0;
    std::int64_t committed = 0;
    std::int64_t hits = 0;
    std::int64_t reserved = 0;
    std::int64_t lacking = 0;
    for (const std::int64_t block_size : {1, 3, 4, 16}) {
      const std::int64_t blocks = 60 / block_size + 2;
      const std::vector<Setting> settings{
          {block_size, {blocks}, {0}, reuse},
          {block_size, {blocks}, {7}, reuse},
          {block_size, {blocks}, {1}, reuse},
          {block_size, {blocks, blocks / 2 + 2}, {0, 5}, reuse},
          {block_size, {blocks, blocks - 1, blocks / 2 + 2}, {0, 9, 2}, reuse},
      };
      for (const Setting& setting : settings) {
        for (std::uint64_t seed = 0; seed < seeds; ++seed) {
          try {
            World world(setting, seed);
            world.run(150);
            refused += world.refused();
            forked += world.forked();
            committed += world.committed();
            hits += world.hits();
            reserved += world.reserved();
            lacking += world.refused_reserves();
          } catch (const std::exception& error) {
            check::fail(__FILE__, __LINE__,
                        "block size " + std::to_string(block_size) + ", groups " +
                            std::to_string(setting.blocks.size()) + ", last window " +
                            std::to_string(setting.windows.back()) + ", seed " +
                            std::to_string(seed) + (reuse ? ", reuse: " : ": ") + error.what());
          }
        }
      }
    }
    CHECK(refused > enough && forked > enough && committed > enough);
    CHECK(reserved > enough && lacking > enough);
    CHECK(reuse ? hits > enough : hits == 0);
  }
}
