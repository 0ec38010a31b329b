#include "core/suffix_index.h"

#include <algorithm>
#include <string>

#include "specrt/error.h"

// Which strings occurred before is kept in a suffix automaton, grown online (Blumer et al. 1985):
// a state is the set of substrings that end at the same places, and its link leads to the longest
// suffix that ends at more places. Where a state's strings ended last is a maximum over the
// subtree of the link tree; each new prefix is the latest end of all its ancestors, which is the
// "access" of a link-cut tree (Sleator & Tarjan 1983). All of it is amortised O(log n) a token,
// whatever max_match is.

namespace specrt {
namespace {

constexpr std::int32_t kNone = -1;
constexpr std::int64_t kMaxCapacity = (std::int64_t{1} << 30) - 2;

// A text of n tokens has at most 2n states and 3n transitions, n of them (from prefix to prefix)
// implied by the text. The table is at most two thirds full.
constexpr std::int64_t max_states(std::int64_t capacity) { return 2 * capacity + 1; }
constexpr std::int64_t max_slots(std::int64_t capacity) { return 3 * capacity + 3; }

struct Automaton {
  std::int32_t length;  // of the longest string
  std::int32_t link;
  std::int32_t first;  // tokens up to the first end
  TokenId edge;        // token of the newest explicit transition, or kNone
};

struct Edge {
  std::int32_t from = kNone;  // kNone: a free slot
  TokenId token = 0;
  std::int32_t to = 0;
  TokenId next = 0;  // token of the next older transition of `from`, or kNone
};

// A splay tree holds the states of one path of the link tree, shallow to deep, that share their
// latest end. A root's parent is the state above the path.
struct Path {
  std::int32_t parent;
  std::int32_t left;
  std::int32_t right;
  std::int32_t latest;  // tokens up to the latest end; meaningful at a root
};

template <typename T>
void grow(std::vector<T>& values, std::size_t needed, std::int64_t bound) {
  if (values.capacity() >= needed) return;
  const std::size_t wanted = std::max({needed, 2 * values.capacity(), std::size_t{64}});
  values.reserve(std::max(needed, std::min(wanted, static_cast<std::size_t>(bound))));
}

}  // namespace

struct SuffixIndex::State {
  std::int64_t max_match;
  bool most_recent;
  std::int64_t capacity;
  Match match;
  std::int64_t steps = 0;

  std::vector<TokenId> text;
  std::vector<Automaton> states;
  std::vector<Path> paths;  // parallel to states; empty unless most_recent
  std::vector<Edge> table;
  std::int64_t edges = 0;
  std::int32_t last = 0;   // the state of the whole text
  std::int32_t point = 0;  // the state of the matched suffix

  bool is_prefix(std::int32_t state) const { return states[state].length == states[state].first; }

  // Prefixes get their states in order, each with at most one clone after it.
  std::int32_t next_prefix(std::int32_t state) const {
    return is_prefix(state + 1) ? state + 1 : state + 2;
  }

  std::size_t slot_of(std::int32_t state, TokenId token) const {
    std::uint64_t h =
        std::uint64_t{static_cast<std::uint32_t>(state)} << 32 | static_cast<std::uint32_t>(token);
    h = (h ^ (h >> 32)) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9u;
    return static_cast<std::size_t>((h >> 32) * table.size() >> 32);
  }

  // The slot of a transition, or the free one where it belongs.
  Edge& edge(std::int32_t state, TokenId token) {
    for (std::size_t i = slot_of(state, token);; i = i + 1 == table.size() ? 0 : i + 1) {
      ++steps;
      Edge& candidate = table[i];
      if (candidate.from == kNone || (candidate.from == state && candidate.token == token)) {
        return candidate;
      }
    }
  }

  std::int32_t target(std::int32_t state, TokenId token) {
    const Automaton& from = states[state];
    if (from.length == from.first && text[from.length] == token) return next_prefix(state);
    const Edge& found = edge(state, token);
    return found.from == kNone ? kNone : found.to;
  }

  void add_edge(std::int32_t state, TokenId token, std::int32_t to) {
    if ((edges + 1) * 3 > static_cast<std::int64_t>(table.size()) * 2) grow_table();
    edge(state, token) = {state, token, to, states[state].edge};
    states[state].edge = token;
    ++edges;
  }

  void grow_table() {
    const std::int64_t size = static_cast<std::int64_t>(table.size());
    std::vector<Edge> old(static_cast<std::size_t>(
        std::min(std::max<std::int64_t>(2 * size, 96), max_slots(capacity))));
    old.swap(table);
    for (const Edge& moved : old) {
      if (moved.from != kNone) edge(moved.from, moved.token) = moved;
    }
  }

  std::int32_t add_state(std::int32_t length, std::int32_t link, std::int32_t first) {
    states.push_back({length, link, first, kNone});
    if (most_recent) paths.push_back({link, kNone, kNone, first});
    return static_cast<std::int32_t>(states.size()) - 1;
  }

  bool is_root(std::int32_t x) const {
    const std::int32_t up = paths[x].parent;
    return up == kNone || (paths[up].left != x && paths[up].right != x);
  }

  void rotate(std::int32_t x) {
    ++steps;
    const std::int32_t y = paths[x].parent;
    const std::int32_t z = paths[y].parent;
    if (z != kNone) {
      if (paths[z].left == y) {
        paths[z].left = x;
      } else if (paths[z].right == y) {
        paths[z].right = x;
      }
    }
    if (paths[y].left == x) {
      paths[y].left = paths[x].right;
      if (paths[y].left != kNone) paths[paths[y].left].parent = y;
      paths[x].right = y;
    } else {
      paths[y].right = paths[x].left;
      if (paths[y].right != kNone) paths[paths[y].right].parent = y;
      paths[x].left = y;
    }
    paths[x].parent = z;
    paths[y].parent = x;
    paths[x].latest = paths[y].latest;  // matters where y was the root
  }

  void splay(std::int32_t x) {
    while (!is_root(x)) {
      const std::int32_t y = paths[x].parent;
      if (!is_root(y)) {
        const bool straight = (paths[paths[y].parent].left == y) == (paths[y].left == x);
        rotate(straight ? y : x);
      }
      rotate(x);
    }
  }

  // Splits `state`: the clone takes its strings of at most `length` tokens and goes just above.
  std::int32_t clone(std::int32_t state, std::int32_t length) {
    const std::int32_t copy = add_state(length, states[state].link, states[state].first);
    states[state].link = copy;
    if (is_prefix(state)) {
      add_edge(copy, text[states[state].length], next_prefix(state));
    }
    for (TokenId token = states[state].edge; token != kNone;) {
      const Edge copied = edge(state, token);
      add_edge(copy, token, copied.to);
      token = copied.next;
    }
    if (most_recent) {  // both ended last at the same place: they share a path
      splay(state);
      paths[copy].parent = state;
      paths[copy].left = paths[state].left;
      if (paths[copy].left != kNone) paths[paths[copy].left].parent = copy;
      paths[state].left = copy;
    }
    return copy;
  }

  // Makes `end` the latest end of `leaf` and all above it; returns what that was for `ancestor`.
  std::int32_t access(std::int32_t leaf, std::int32_t end, std::int32_t ancestor) {
    const std::int32_t length = states[ancestor].length;
    std::int32_t before = kNone;
    std::int32_t below = leaf;
    for (std::int32_t x = paths[leaf].parent; x != kNone; x = paths[x].parent) {
      ++steps;
      splay(x);
      // The paths met on the way up cover the ancestors in order of length.
      if (states[x].length >= length) before = paths[x].latest;
      const std::int32_t cut = paths[x].right;
      if (cut != kNone) paths[cut].latest = paths[x].latest;
      paths[x].right = below;
      below = x;
    }
    paths[below].latest = end;
    splay(leaf);
    return before;
  }

  void append(TokenId token) {
    const auto end = static_cast<std::int32_t>(text.size()) + 1;
    text.push_back(token);
    const std::int32_t leaf = add_state(end, kNone, end);

    // Suffixes of the old text that were never followed by `token` now are. The whole old text
    // is one, and its transition is implied.
    std::int32_t p = states[last].link;
    std::int32_t q = kNone;
    while (p != kNone) {
      ++steps;
      q = target(p, token);
      if (q != kNone) break;
      add_edge(p, token, leaf);
      p = states[p].link;
    }
    std::int32_t above = 0;
    if (p != kNone) {
      const std::int32_t length = states[p].length + 1;
      above = q;
      if (states[q].length != length) {
        above = clone(q, length);
        for (; p != kNone; p = states[p].link) {  // never the implied one: q is not p's prefix
          Edge& turned = edge(p, token);
          if (turned.from == kNone || turned.to != q) break;
          turned.to = above;
        }
      }
    }
    states[leaf].link = above;
    last = leaf;

    // `above` holds the longest repeated suffix. If that is too long, the old match had max_match
    // tokens: the new one continues it and drops its first. (Had `point` just been split, both
    // halves still have the same transitions.)
    if (states[above].length <= max_match) {
      point = above;
      match.length = states[above].length;
    } else {
      point = target(point, token);
      if (states[states[point].link].length >= max_match) point = states[point].link;
      match.length = max_match;
    }

    std::int32_t next = states[point].first;
    if (most_recent) {
      paths[leaf].parent = above;
      next = access(leaf, end, point);
    }
    match.next = match.length == 0 ? 0 : next;
  }
};

SuffixIndex::SuffixIndex(std::int64_t max_match, bool most_recent, std::int64_t capacity) {
  if (max_match < 1) {
    throw InvalidArgument(expected_got("max_match", "an integer >= 1", std::to_string(max_match)));
  }
  if (capacity < 0 || capacity > kMaxCapacity) {
    throw InvalidArgument(expected_got("capacity",
                                       "an integer in [0, " + std::to_string(kMaxCapacity) + "]",
                                       std::to_string(capacity)));
  }
  state_ = std::make_unique<State>();
  state_->max_match = max_match;
  state_->most_recent = most_recent;
  state_->capacity = capacity;
  grow(state_->states, 1, max_states(capacity));
  if (most_recent) grow(state_->paths, 1, max_states(capacity));
  state_->grow_table();
  state_->add_state(0, kNone, 0);
}

SuffixIndex::~SuffixIndex() = default;
SuffixIndex::SuffixIndex(SuffixIndex&&) noexcept = default;
SuffixIndex& SuffixIndex::operator=(SuffixIndex&&) noexcept = default;

void SuffixIndex::append(TokenId token) { append(std::span<const TokenId>(&token, 1)); }

void SuffixIndex::append(std::span<const TokenId> tokens) {
  State& s = *state_;
  const std::size_t size = s.text.size() + tokens.size();
  if (size > static_cast<std::size_t>(s.capacity)) {
    throw CapacityError(expected_got(
        "suffix index", "at most " + std::to_string(s.capacity) + " tokens", std::to_string(size)));
  }
  for (const TokenId token : tokens) {
    if (token < 0) throw InvalidArgument(expected_got("token", "ids >= 0", std::to_string(token)));
  }
  grow(s.text, size, s.capacity);
  for (const TokenId token : tokens) {
    grow(s.states, s.states.size() + 2, max_states(s.capacity));
    if (s.most_recent) grow(s.paths, s.paths.size() + 2, max_states(s.capacity));
    s.append(token);
  }
}

SuffixIndex::Match SuffixIndex::match() const { return state_->match; }

std::span<const TokenId> SuffixIndex::text() const { return state_->text; }

std::int64_t SuffixIndex::steps() const { return state_->steps; }

std::int64_t SuffixIndex::bytes() const {
  const State& s = *state_;
  return static_cast<std::int64_t>(sizeof(State) + s.text.capacity() * sizeof(TokenId) +
                                   s.states.capacity() * sizeof(Automaton) +
                                   s.paths.capacity() * sizeof(Path) +
                                   s.table.capacity() * sizeof(Edge));
}

std::int64_t SuffixIndex::bytes_for(std::int64_t capacity) {
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return count * static_cast<std::int64_t>(size);
  };
  const std::int64_t table = bytes(max_slots(capacity), sizeof(Edge));
  // An array that grows is there twice for a moment, the old one at most as large as the new.
  return static_cast<std::int64_t>(sizeof(State)) + bytes(capacity, sizeof(TokenId)) +
         bytes(max_states(capacity), sizeof(Automaton) + sizeof(Path)) + 2 * table;
}

}  // namespace specrt
