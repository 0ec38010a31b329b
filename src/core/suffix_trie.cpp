#include "core/suffix_trie.h"

#include <algorithm>
#include <string>

#include "specrt/error.h"

// Suffixes of the open text that still follow strings that occurred before are "active": each token
// moves them down one step, and where the trie ends they become leaves, which need no care any more
// (Ukkonen 1995). So a token costs as much as the text repeats itself, at most max_depth steps.
// A node's count is that of paths that enter its edge; who stands further up on the edge is among
// the active ones. Complete texts have their suffixes' ends in nodes of their own, so that counts
// along an edge are equal. Labels lie in the newest text that runs all along them, so forgetting
// the oldest text never takes away the label of a string that is left.

namespace specrt {
namespace {

constexpr std::int32_t kRoot = 0;
constexpr std::int64_t kMaxCapacity = (std::int64_t{1} << 29) - 2;

constexpr std::int64_t max_nodes(std::int64_t capacity) { return 2 * capacity + 2; }
constexpr std::int64_t max_slots(std::int64_t capacity) { return 3 * capacity + 6; }

// Doubles up to a bound that is known, so that memory is too.
template <typename T>
void make_room(std::vector<T>& values, std::size_t size, std::int64_t most) {
  if (size <= values.capacity()) return;
  const std::size_t wanted = std::max<std::size_t>({size, 2 * values.capacity(), 64});
  values.reserve(std::max(size, std::min(wanted, static_cast<std::size_t>(most))));
}

}  // namespace

void SuffixDraft::clear() {
  tokens.clear();
  parents.clear();
  depths.clear();
  probs.clear();
  score = 0.0f;
  match = 0;
}

SuffixTrie::SuffixTrie(std::int64_t max_depth, std::int64_t capacity)
    : max_depth_(max_depth), capacity_(capacity) {
  if (max_depth < 1 || max_depth > 4096) {
    throw InvalidArgument(
        expected_got("max_depth", "an integer in [1, 4096]", std::to_string(max_depth)));
  }
  if (capacity < 0 || capacity > kMaxCapacity) {
    throw InvalidArgument(expected_got("capacity",
                                       "an integer in [0, " + std::to_string(kMaxCapacity) + "]",
                                       std::to_string(capacity)));
  }
  const auto depth = static_cast<std::size_t>(max_depth);
  active_.reserve(depth + 1);
  path_.reserve(depth);
  leaves_.assign(depth, kNone);
  nodes_.push_back({0, kNone, 0, 0, kNone, kNone, kNone});
  used_ = 1;
}

std::int64_t SuffixTrie::texts() const {
  return static_cast<std::int64_t>(starts_.size() - oldest_);
}

std::int64_t SuffixTrie::tokens() const { return size_ - start_; }

std::span<const TokenId> SuffixTrie::open_text() const {
  return std::span(text_).subspan(static_cast<std::size_t>(open_));
}

std::int64_t SuffixTrie::bytes() const {
  return static_cast<std::int64_t>(
      sizeof(SuffixTrie) + text_.capacity() * sizeof(TokenId) +
      starts_.capacity() * sizeof(std::int64_t) + nodes_.capacity() * sizeof(Node) +
      table_.capacity() * sizeof(Slot) + active_.capacity() * sizeof(Place) +
      (leaves_.capacity() + path_.capacity()) * sizeof(std::int32_t));
}

std::int64_t SuffixTrie::bytes_for(std::int64_t max_depth, std::int64_t capacity) {
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return count * static_cast<std::int64_t>(size);
  };
  // Texts have a token at least each, and the table is there twice while it grows.
  return static_cast<std::int64_t>(sizeof(SuffixTrie)) +
         bytes(std::max<std::int64_t>(capacity, 64), sizeof(TokenId)) +
         bytes(std::max<std::int64_t>(2 * capacity, 64), sizeof(std::int64_t)) +
         bytes(std::max<std::int64_t>(max_nodes(capacity), 64), sizeof(Node)) +
         2 * bytes(std::max<std::int64_t>(max_slots(capacity), 96), sizeof(Slot)) +
         bytes(max_depth + 1, sizeof(Place)) + 2 * bytes(max_depth, sizeof(std::int32_t));
}

// The texts.

void SuffixTrie::append(std::span<const TokenId> tokens) {
  const auto added = static_cast<std::int64_t>(tokens.size());
  if (this->tokens() + added > capacity_) {
    throw CapacityError(expected_got("suffix trie",
                                     "at most " + std::to_string(capacity_) + " tokens",
                                     std::to_string(this->tokens() + added)));
  }
  for (const TokenId token : tokens) {
    if (token < 0) throw InvalidArgument(expected_got("token", "ids >= 0", std::to_string(token)));
  }
  for (const TokenId token : tokens) append(token);
}

void SuffixTrie::append(TokenId token) {
  if (static_cast<std::int64_t>(text_.size()) < capacity_) {
    make_room(text_, text_.size() + 1, capacity_);
    text_.push_back(token);
  } else {
    text_[static_cast<std::size_t>(size_ % capacity_)] = token;
  }
  leaves_[static_cast<std::size_t>(size_ % max_depth_)] = kNone;
  ++size_;
  active_.push_back({kRoot, 0});
  // Places that step() still sees behind the current one are of the text before this token, as it
  // expects; those in front have been moved.
  std::size_t kept = 0;
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const bool stays = step(active_[i], token);
    const Place place = active_[i];
    active_[i] = {kNone, 0};
    if (stays) active_[kept++] = place;
  }
  active_.resize(kept);
}

// One token down; false where the suffix is no longer active.
bool SuffixTrie::step(Place& place, TokenId token) {
  std::int32_t above = place.node;
  if (place.depth == nodes_[place.node].depth) {
    const std::int32_t child = find(place.node, token);
    if (child != kNone) {
      ++nodes_[child].count;
      if (nodes_[place.node].child != child) {
        unlink_child(child);
        link_child(place.node, child);
      }
      place = {child, place.depth + 1};
      above = kNone;
    }
  } else if (at(label(place.node, place.depth)) == token) {
    ++place.depth;
    above = kNone;
  } else {
    above = split(place.node, place.depth, size_ - 1);
  }
  if (above != kNone) {
    const std::int64_t from = size_ - 1 - place.depth;
    const std::int32_t leaf = new_node(
        {from + max_depth_, above, static_cast<std::int32_t>(max_depth_), 1, kNone, kNone, kNone});
    set_edge(above, token, leaf);
    link_child(above, leaf);
    leaves_[static_cast<std::size_t>(from % max_depth_)] = leaf;
    return false;
  }
  if (place.depth == nodes_[place.node].depth) nodes_[place.node].end = size_;
  return place.depth < max_depth_;
}

// A node `depth` tokens down on the edge of `node`, for a path of the open text that ends before
// token `end`. Those that stand no further down go with it.
std::int32_t SuffixTrie::split(std::int32_t node, std::int32_t depth, std::int64_t end) {
  const Node lower = nodes_[node];
  const std::int32_t upper = new_node({end, lower.parent, depth, lower.count, kNone, kNone, kNone});
  const std::int64_t first = lower.end - lower.depth;
  replace_child(node, upper);
  set_edge(lower.parent, at(first + nodes_[lower.parent].depth), upper);
  nodes_[node].parent = upper;
  for (Place& place : active_) {
    if (place.node != node || place.depth > depth) continue;
    place.node = upper;
    --nodes_[node].count;
  }
  nodes_[node].older = nodes_[node].newer = kNone;
  link_child(upper, node);
  set_edge(upper, at(first + depth), node);
  return upper;
}

void SuffixTrie::close() {
  if (size_ == open_) return;
  for (std::int64_t from = std::max(open_, size_ - max_depth_ + 1); from < size_; ++from) {
    const std::int32_t leaf = leaves_[static_cast<std::size_t>(from % max_depth_)];
    if (leaf == kNone) continue;
    nodes_[leaf].depth = static_cast<std::int32_t>(size_ - from);
    nodes_[leaf].end = size_;
  }
  std::fill(leaves_.begin(), leaves_.end(), kNone);
  for (const Place& place : active_) {
    if (place.depth < nodes_[place.node].depth) split(place.node, place.depth, size_);
  }
  active_.clear();
  if (oldest_ > 32 && oldest_ * 2 > starts_.size()) {
    starts_.erase(starts_.begin(), starts_.begin() + static_cast<std::ptrdiff_t>(oldest_));
    oldest_ = 0;
  }
  make_room(starts_, starts_.size() + 1, 2 * capacity_);
  starts_.push_back(open_);
  open_ = size_;
}

void SuffixTrie::evict() {
  if (texts() == 0 || size_ != open_) {
    throw InternalError("[suffix trie] expected complete texts only, and at least one");
  }
  const std::int64_t from = starts_[oldest_++];
  const std::int64_t to = texts() > 0 ? starts_[oldest_] : open_;
  for (std::int64_t suffix = from; suffix < to; ++suffix) {
    const auto length = static_cast<std::int32_t>(std::min(max_depth_, to - suffix));
    path_.clear();
    std::int32_t node = kRoot;
    while (nodes_[node].depth < length) {
      node = find(node, at(suffix + nodes_[node].depth));
      --nodes_[node].count;
      path_.push_back(node);
    }
    while (!path_.empty() && nodes_[path_.back()].count == 0) {
      const std::int32_t gone = path_.back();
      const std::int32_t parent = nodes_[gone].parent;
      erase_edge(parent, at(suffix + nodes_[parent].depth));
      unlink_child(gone);
      free_node(gone);
      path_.pop_back();
    }
    if (!path_.empty()) merge_into_child(path_.back());
  }
  start_ = to;
}

// A node whose every path goes on into its only child is none.
void SuffixTrie::merge_into_child(std::int32_t node) {
  const std::int32_t child = nodes_[node].child;
  if (child == kNone || nodes_[child].older != kNone || nodes_[child].count != nodes_[node].count) {
    return;
  }
  const std::int64_t first = nodes_[child].end - nodes_[child].depth;
  const std::int32_t parent = nodes_[node].parent;
  erase_edge(node, at(first + nodes_[node].depth));
  nodes_[child].parent = parent;
  replace_child(node, child);
  set_edge(parent, at(first + nodes_[parent].depth), child);
  free_node(node);
}

// Nodes, their siblings and the table of edges.

std::int32_t SuffixTrie::new_node(const Node& node) {
  ++used_;
  if (free_ != kNone) {
    const std::int32_t index = free_;
    free_ = nodes_[index].parent;
    nodes_[index] = node;
    return index;
  }
  make_room(nodes_, nodes_.size() + 1, max_nodes(capacity_));
  nodes_.push_back(node);
  return static_cast<std::int32_t>(nodes_.size()) - 1;
}

void SuffixTrie::free_node(std::int32_t node) {
  --used_;
  nodes_[node].parent = free_;
  free_ = node;
}

void SuffixTrie::link_child(std::int32_t parent, std::int32_t node) {
  const std::int32_t next = nodes_[parent].child;
  nodes_[node].older = next;
  nodes_[node].newer = kNone;
  if (next != kNone) nodes_[next].newer = node;
  nodes_[parent].child = node;
}

void SuffixTrie::unlink_child(std::int32_t node) {
  const Node& gone = nodes_[node];
  if (gone.older != kNone) nodes_[gone.older].newer = gone.newer;
  if (gone.newer != kNone) {
    nodes_[gone.newer].older = gone.older;
  } else {
    nodes_[gone.parent].child = gone.older;
  }
}

// `by` takes the place of `node` among its siblings.
void SuffixTrie::replace_child(std::int32_t node, std::int32_t by) {
  const Node& old = nodes_[node];
  nodes_[by].older = old.older;
  nodes_[by].newer = old.newer;
  if (old.older != kNone) nodes_[old.older].newer = by;
  if (old.newer != kNone) {
    nodes_[old.newer].older = by;
  } else {
    nodes_[old.parent].child = by;
  }
}

std::size_t SuffixTrie::slot_of(std::int32_t from, TokenId token) const {
  std::uint64_t h =
      std::uint64_t{static_cast<std::uint32_t>(from)} << 32 | static_cast<std::uint32_t>(token);
  h = (h ^ (h >> 32)) * 0x9E3779B97F4A7C15u;
  h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9u;
  return static_cast<std::size_t>((h >> 32) * table_.size() >> 32);
}

std::int32_t SuffixTrie::find(std::int32_t from, TokenId token) const {
  if (table_.empty()) return kNone;
  for (std::size_t i = slot_of(from, token);; i = i + 1 == table_.size() ? 0 : i + 1) {
    const Slot& slot = table_[i];
    if (slot.from == kNone) return kNone;
    if (slot.from == from && slot.token == token) return slot.to;
  }
}

void SuffixTrie::set_edge(std::int32_t from, TokenId token, std::int32_t to) {
  if ((edges_ + 1) * 3 > static_cast<std::int64_t>(table_.size()) * 2) {
    const auto size = static_cast<std::int64_t>(table_.size());
    std::vector<Slot> old(static_cast<std::size_t>(
        std::max<std::int64_t>(96, std::min(2 * size, max_slots(capacity_)))));
    old.swap(table_);
    edges_ = 0;
    for (const Slot& slot : old) {
      if (slot.from != kNone) set_edge(slot.from, slot.token, slot.to);
    }
  }
  for (std::size_t i = slot_of(from, token);; i = i + 1 == table_.size() ? 0 : i + 1) {
    Slot& slot = table_[i];
    if (slot.from == from && slot.token == token) {
      slot.to = to;
      return;
    }
    if (slot.from == kNone) {
      slot = {from, token, to};
      ++edges_;
      return;
    }
  }
}

// Slots behind it move up, so that no search ends too early.
void SuffixTrie::erase_edge(std::int32_t from, TokenId token) {
  std::size_t hole = slot_of(from, token);
  while (table_[hole].from != from || table_[hole].token != token) {
    hole = hole + 1 == table_.size() ? 0 : hole + 1;
  }
  for (std::size_t i = hole;;) {
    i = i + 1 == table_.size() ? 0 : i + 1;
    if (table_[i].from == kNone) break;
    const std::size_t home = slot_of(table_[i].from, table_[i].token);
    // It may move up where its home does not lie behind the hole, cyclically.
    const bool between = hole <= i ? hole < home && home <= i : hole < home || home <= i;
    if (between) continue;
    table_[hole] = table_[i];
    hole = i;
  }
  table_[hole] = {};
  --edges_;
}

// Drafts.

bool SuffixTrie::advance(Place& place, TokenId token) const {
  if (place.depth == nodes_[place.node].depth) {
    const std::int32_t child = find(place.node, token);
    if (child == kNone) return false;
    place = {child, place.depth + 1};
    return true;
  }
  const std::int64_t next = label(place.node, place.depth);
  if (next >= size_ || at(next) != token) return false;
  ++place.depth;
  return true;
}

std::int32_t SuffixTrie::count_at(const Place& place) const {
  std::int32_t count = nodes_[place.node].count;
  for (const Place& other : active_) {
    if (other.node == place.node && other.depth < place.depth) --count;
  }
  return count;
}

// The places one token further, the most recent first, until `visit` has had enough.
template <typename Visit>
void SuffixTrie::successors(const Place& place, const Visit& visit) const {
  if (place.depth < nodes_[place.node].depth) {
    if (label(place.node, place.depth) < size_) visit(Place{place.node, place.depth + 1});
    return;
  }
  for (std::int32_t child = nodes_[place.node].child; child != kNone; child = nodes_[child].older) {
    if (!visit(Place{child, place.depth + 1})) return;
  }
}

void SuffixTrie::speculate(std::span<const TokenId> context, const SuffixRule& rule,
                           Scratch& scratch, SuffixDraft& out) const {
  out.clear();
  const auto most = std::min(max_depth_, static_cast<std::int64_t>(context.size()));
  SuffixDraft& candidate = scratch.candidate;
  for (std::int64_t match = 1; match <= most; ++match) {
    Place place{kRoot, 0};
    for (const TokenId token : context.last(static_cast<std::size_t>(match))) {
      if (!advance(place, token)) return;  // then no longer suffix occurs either
    }
    SuffixRule own = rule;
    const double limit = static_cast<double>(match) * rule.factor + rule.offset + 1e-6;
    own.max_nodes = limit < static_cast<double>(rule.max_nodes)
                        ? static_cast<std::int64_t>(std::max(limit, 0.0))
                        : rule.max_nodes;
    candidate.clear();
    candidate.match = match;
    if (rule.tree) {
      draft_tree(place, own, scratch, candidate);
    } else {
      draft_path(place, own, candidate);
    }
    if (candidate.score >= out.score && !candidate.tokens.empty()) std::swap(candidate, out);
  }
}

void SuffixTrie::draft_path(Place place, const SuffixRule& rule, SuffixDraft& out) const {
  const std::int64_t most = std::min(rule.max_nodes, rule.max_depth);
  float prob = 1.0f;
  std::int32_t count = count_at(place);
  while (static_cast<std::int64_t>(out.tokens.size()) < most) {
    Place best{kNone, 0};
    std::int32_t best_count = 0;
    std::int32_t left = count;
    successors(place, [&](const Place& next) {
      const std::int32_t own = count_at(next);
      left -= own;
      if (own > best_count) {
        best_count = own;
        best = next;
      }
      return best_count < left;  // else none of the others can have more
    });
    if (best.node == kNone) return;
    prob *= static_cast<float>(best_count) / static_cast<float>(count);
    if (prob < rule.min_prob) return;
    place = best;
    count = best_count;
    const auto index = static_cast<std::int32_t>(out.tokens.size());
    out.tokens.push_back(at(label(place.node, place.depth - 1)));
    out.parents.push_back(index - 1);
    out.depths.push_back(index + 1);
    out.probs.push_back(prob);
    out.score += prob;
  }
}

void SuffixTrie::draft_tree(Place place, const SuffixRule& rule, Scratch& scratch,
                            SuffixDraft& out) const {
  std::vector<Scratch::Item>& queue = scratch.queue;
  // The likeliest first, of equals the one that was found first.
  const auto later = [](const Scratch::Item& a, const Scratch::Item& b) {
    return a.prob != b.prob ? a.prob < b.prob : a.order > b.order;
  };
  queue.clear();
  std::int32_t order = 0;
  const auto open = [&](const Place& from, float prob, std::int32_t parent) {
    const std::int32_t count = count_at(from);
    std::int32_t left = count;
    successors(from, [&](const Place& next) {
      const std::int32_t own = count_at(next);
      left -= own;
      const float reached =
          own == count ? prob : prob * static_cast<float>(own) / static_cast<float>(count);
      if (reached >= rule.min_prob) {
        queue.push_back({reached, order++, next.node, next.depth, parent});
        std::push_heap(queue.begin(), queue.end(), later);
      }
      return left > 0 &&
             prob * static_cast<float>(left) / static_cast<float>(count) >= rule.min_prob;
    });
  };
  open(place, 1.0f, -1);
  while (static_cast<std::int64_t>(out.tokens.size()) < rule.max_nodes && !queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), later);
    const Scratch::Item item = queue.back();
    queue.pop_back();
    const std::int32_t depth = item.parent < 0 ? 1 : out.depths[item.parent] + 1;
    if (depth > rule.max_depth) continue;
    const auto index = static_cast<std::int32_t>(out.tokens.size());
    out.tokens.push_back(at(label(item.node, item.depth - 1)));
    out.parents.push_back(item.parent);
    out.depths.push_back(depth);
    out.probs.push_back(item.prob);
    out.score += item.prob;
    open({item.node, item.depth}, item.prob, index);
  }
}

std::int64_t SuffixTrie::count(std::span<const TokenId> string) const {
  if (static_cast<std::int64_t>(string.size()) > max_depth_) return 0;
  Place place{kRoot, 0};
  for (const TokenId token : string) {
    if (!advance(place, token)) return 0;
  }
  return string.empty() ? tokens() : count_at(place);
}

void SuffixTrie::check_invariants() const {
  const auto fail = [](const std::string& what) { throw InternalError("[suffix trie] " + what); };
  std::vector<std::int32_t> stack{kRoot};
  std::int64_t seen = 0;
  while (!stack.empty()) {
    const std::int32_t node = stack.back();
    stack.pop_back();
    ++seen;
    std::int64_t below = 0;
    std::int32_t newer = kNone;
    for (std::int32_t child = nodes_[node].child; child != kNone; child = nodes_[child].older) {
      const Node& c = nodes_[child];
      const std::int64_t first = label(child, nodes_[node].depth);
      if (c.parent != node || c.newer != newer) fail("siblings are linked wrongly");
      if (c.count < 1 || c.depth <= nodes_[node].depth || c.depth > max_depth_) {
        fail("a node is out of order");
      }
      if (c.end - c.depth < start_ || first >= size_) fail("a label is no longer there");
      if (find(node, at(first)) != child) fail("an edge is missing");
      below += c.count;
      newer = child;
      stack.push_back(child);
    }
    if (node != kRoot && below > nodes_[node].count) fail("a node counts less than its children");
    if (node != kRoot && active_.empty() && nodes_[node].child != kNone &&
        nodes_[nodes_[node].child].older == kNone && below == nodes_[node].count) {
      fail("a node should be part of its child");
    }
  }
  if (seen != used_ || edges_ != used_ - 1) fail("nodes and edges are not counted right");
}

}  // namespace specrt
