#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "core/suffix_trie.h"
#include "specrt/error.h"

namespace {

using specrt::SuffixDraft;
using specrt::SuffixRule;
using specrt::SuffixTrie;
using specrt::TokenId;
using Text = std::vector<TokenId>;

// The definition: strings are counted one by one, and a draft is built from those counts.
class Reference {
 public:
  explicit Reference(std::int64_t max_depth) : max_depth_(max_depth) {}

  void append(TokenId token) { open_.push_back(token); }
  void close() {
    if (!open_.empty()) texts_.push_back(std::move(open_));
    open_.clear();
  }
  void evict() { texts_.pop_front(); }

  void count() {
    counts_.clear();
    std::int64_t time = 0;
    for (const Text& text : texts_) add(text, time);
    add(open_, time);
  }

  std::int64_t of(const Text& string) const {
    const auto found = counts_.find(string);
    return found == counts_.end() ? 0 : found->second.count;
  }
  std::size_t strings() const { return counts_.size(); }
  const auto& all() const { return counts_; }

  SuffixDraft speculate(const Text& context, const SuffixRule& rule) const {
    SuffixDraft best;
    for (std::int64_t m = 1; m <= std::min<std::int64_t>(max_depth_, std::ssize(context)); ++m) {
      const Text suffix(context.end() - m, context.end());
      if (of(suffix) == 0) break;
      SuffixRule own = rule;
      own.max_nodes = std::min<std::int64_t>(
          rule.max_nodes,
          std::max<std::int64_t>(0, static_cast<std::int64_t>(static_cast<double>(m) * rule.factor +
                                                              rule.offset + 1e-6)));
      const SuffixDraft draft = rule.tree ? tree(suffix, own) : path(suffix, own);
      if (draft.score >= best.score && !draft.tokens.empty()) {
        best = draft;
        best.match = m;
      }
    }
    return best;
  }

 private:
  struct Seen {
    std::int64_t count = 0;
    std::int64_t last = 0;
  };
  struct Child {
    TokenId token;
    std::int64_t count;
    std::int64_t last;
  };

  void add(const Text& text, std::int64_t& time) {
    for (std::size_t end = 1; end <= text.size(); ++end) {
      ++time;
      for (std::int64_t length = 1; length <= max_depth_; ++length) {
        if (length > static_cast<std::int64_t>(end)) break;
        const auto to = text.begin() + static_cast<std::ptrdiff_t>(end);
        Seen& seen = counts_[Text(to - length, to)];
        ++seen.count;
        seen.last = time;
      }
    }
  }

  // Most recent first.
  std::vector<Child> children(const Text& string) const {
    std::vector<Child> out;
    for (auto it = counts_.upper_bound(string); it != counts_.end(); ++it) {
      const Text& other = it->first;
      if (other.size() < string.size() ||
          !std::equal(string.begin(), string.end(), other.begin())) {
        break;
      }
      if (other.size() == string.size() + 1) {
        out.push_back({other.back(), it->second.count, it->second.last});
      }
    }
    std::sort(out.begin(), out.end(),
              [](const Child& a, const Child& b) { return a.last > b.last; });
    return out;
  }

  SuffixDraft path(Text string, const SuffixRule& rule) const {
    SuffixDraft out;
    float prob = 1.0f;
    while (std::ssize(out.tokens) < std::min(rule.max_nodes, rule.max_depth)) {
      const Child* best = nullptr;
      const std::vector<Child> next = children(string);
      for (const Child& child : next) {
        if (best == nullptr || child.count > best->count) best = &child;
      }
      if (best == nullptr) break;
      prob *= static_cast<float>(best->count) / static_cast<float>(of(string));
      if (prob < rule.min_prob) break;
      string.push_back(best->token);
      add_node(out, best->token, static_cast<std::int32_t>(out.tokens.size()) - 1, prob);
    }
    return out;
  }

  SuffixDraft tree(const Text& string, const SuffixRule& rule) const {
    struct Item {
      float prob;
      Text string;
      std::int32_t parent;
    };
    SuffixDraft out;
    std::vector<Item> waiting;  // in order of discovery
    const auto open = [&](const Text& from, float prob, std::int32_t parent) {
      for (const Child& child : children(from)) {
        const float reached = child.count == of(from) ? prob
                                                      : prob * static_cast<float>(child.count) /
                                                            static_cast<float>(of(from));
        if (reached < rule.min_prob) continue;
        Text to = from;
        to.push_back(child.token);
        waiting.push_back({reached, to, parent});
      }
    };
    open(string, 1.0f, -1);
    while (std::ssize(out.tokens) < rule.max_nodes && !waiting.empty()) {
      const auto best =
          std::max_element(waiting.begin(), waiting.end(),
                           [](const Item& a, const Item& b) { return a.prob < b.prob; });
      const Item item = *best;
      waiting.erase(best);
      const std::int32_t depth = item.parent < 0 ? 1 : out.depths[item.parent] + 1;
      if (depth > rule.max_depth) continue;
      add_node(out, item.string.back(), item.parent, item.prob);
      open(item.string, item.prob, static_cast<std::int32_t>(out.tokens.size()) - 1);
    }
    return out;
  }

  static void add_node(SuffixDraft& out, TokenId token, std::int32_t parent, float prob) {
    out.tokens.push_back(token);
    out.parents.push_back(parent);
    out.depths.push_back(parent < 0 ? 1 : out.depths[parent] + 1);
    out.probs.push_back(prob);
    out.score += prob;
  }

  std::int64_t max_depth_;
  std::deque<Text> texts_;
  Text open_;
  std::map<Text, Seen> counts_;
};

void compare_drafts(const SuffixTrie& trie, const Reference& reference, const Text& context,
                    std::mt19937& random) {
  SuffixRule rule;
  rule.max_nodes = static_cast<std::int64_t>(random() % 9);
  rule.max_depth = static_cast<std::int64_t>(1 + random() % 9);
  rule.factor = std::vector<double>{0.5, 1.0, 2.0}[random() % 3];
  rule.offset = std::vector<double>{-1.0, 0.0, 2.0}[random() % 3];
  rule.min_prob = std::vector<float>{0.0f, 0.1f, 0.34f, 1.0f}[random() % 4];
  SuffixTrie::Scratch scratch;
  for (const bool tree : {false, true}) {
    rule.tree = tree;
    SuffixDraft got;
    trie.speculate(context, rule, scratch, got);
    const SuffixDraft expected = reference.speculate(context, rule);
    CHECK(got.tokens == expected.tokens);
    CHECK(got.parents == expected.parents);
    CHECK(got.depths == expected.depths);
    CHECK(got.probs == expected.probs);
    CHECK_EQ(got.score, expected.score);
    CHECK_EQ(got.match, expected.match);
  }
}

// Copies pieces of itself with a fresh letter now and then, or is all random.
TokenId next_letter(std::mt19937& random, const Text& text, std::size_t letters, bool copies) {
  if (copies && text.size() > 5 && random() % 5 != 0) {
    return text[text.size() - 1 - random() % 3 - 2];
  }
  return static_cast<TokenId>(random() % letters);
}

}  // namespace

TEST(suffix_trie_counts_what_a_growing_text_holds) {
  std::mt19937 random(1);
  for (int round = 0; round < 40; ++round) {
    const auto depth = static_cast<std::int64_t>(1 + random() % 7);
    const std::size_t letters = 1 + random() % 4;
    const std::int64_t size = 60;
    SuffixTrie trie(depth, size);
    Reference reference(depth);
    Text text;
    while (std::ssize(text) < size) {
      const TokenId token = next_letter(random, text, letters, round % 2 == 0);
      text.push_back(token);
      trie.append({&token, 1});
      reference.append(token);
      if (random() % 4 != 0) continue;
      trie.check_invariants();
      reference.count();
      for (const auto& [string, seen] : reference.all()) CHECK_EQ(trie.count(string), seen.count);
      compare_drafts(trie, reference, text, random);
    }
    CHECK(std::equal(text.begin(), text.end(), trie.open_text().begin(), trie.open_text().end()));
    CHECK(trie.bytes() <= SuffixTrie::bytes_for(depth, size));
    CHECK_THROWS(trie.append(Text{0}), specrt::CapacityError, "suffix trie");
  }
}

// Texts come and the oldest go, in a ring of tokens that wraps round many times.
TEST(suffix_trie_forgets_the_oldest_texts) {
  std::mt19937 random(2);
  for (int round = 0; round < 30; ++round) {
    const auto depth = static_cast<std::int64_t>(1 + random() % 6);
    const std::size_t letters = 1 + random() % 4;
    const std::int64_t capacity = 50;
    SuffixTrie trie(depth, capacity);
    Reference reference(depth);
    std::int64_t most_nodes = 0;
    for (int text = 0; text < 30; ++text) {
      const auto size = static_cast<std::int64_t>(random() % 20);
      while (trie.tokens() + size > capacity) {
        trie.evict();
        reference.evict();
        trie.check_invariants();
      }
      Text tokens;
      while (std::ssize(tokens) < size) {
        tokens.push_back(next_letter(random, tokens, letters, round % 2 == 0));
      }
      trie.append(tokens);
      for (const TokenId token : tokens) reference.append(token);
      trie.close();
      reference.close();
      trie.check_invariants();
      most_nodes = std::max(most_nodes, trie.nodes());
      CHECK(trie.nodes() <= 2 * trie.tokens() + 1);
      reference.count();
      for (const auto& [string, seen] : reference.all()) CHECK_EQ(trie.count(string), seen.count);
      Text context;
      for (int i = 0; i < 8; ++i) context.push_back(static_cast<TokenId>(random() % letters));
      compare_drafts(trie, reference, context, random);
      compare_drafts(trie, reference, tokens, random);
    }
    CHECK(trie.bytes() <= SuffixTrie::bytes_for(depth, capacity));
    while (trie.texts() > 0) trie.evict();
    trie.check_invariants();
    CHECK_EQ(trie.nodes(), 1);
    CHECK_EQ(trie.tokens(), 0);
    CHECK(most_nodes > 1);
  }
}

// By hand: after "1 2" came 3 twice and 4 once; the end of the context counts for "1 2" too.
TEST(suffix_trie_known_draft) {
  SuffixTrie trie(8, 100);
  const Text text{1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2};
  trie.append(text);
  SuffixRule rule;
  rule.max_nodes = 8;
  rule.max_depth = 8;
  SuffixTrie::Scratch scratch;
  SuffixDraft draft;
  trie.speculate(text, rule, scratch, draft);
  CHECK(draft.tokens == (Text{3, 7}));  // of 9 and 7, each once, 7 came last
  CHECK(draft.probs == (std::vector<float>{0.5f, 0.25f}));
  CHECK_EQ(draft.match, 2);
  rule.tree = true;
  rule.factor = 2.0;
  trie.speculate(text, rule, scratch, draft);
  CHECK(draft.tokens == (Text{3, 4, 7, 9}));
  CHECK(draft.parents == (std::vector<std::int32_t>{-1, -1, 0, 0}));
  rule.max_depth = 1;
  trie.speculate(text, rule, scratch, draft);
  CHECK(draft.tokens == (Text{3, 4}));
}

TEST(suffix_trie_refuses) {
  CHECK_THROWS(SuffixTrie(0, 10), specrt::InvalidArgument, "max_depth");
  CHECK_THROWS(SuffixTrie(5000, 10), specrt::InvalidArgument, "max_depth");
  CHECK_THROWS(SuffixTrie(4, -1), specrt::InvalidArgument, "capacity");
  SuffixTrie trie(4, 10);
  CHECK_THROWS(trie.append(Text{1, -1}), specrt::InvalidArgument, "token");
  CHECK_EQ(trie.tokens(), 0);
  CHECK_THROWS(trie.evict(), specrt::InternalError, "at least one");
  trie.close();
  CHECK_EQ(trie.texts(), 0);
}

// A token costs at most max_depth steps, also where the text is all alike: this takes minutes if it
// depends on the length.
TEST(suffix_trie_long_texts) {
  SuffixTrie trie(24, 200000);
  SuffixTrie::Scratch scratch;
  SuffixDraft draft;
  SuffixRule rule;
  rule.max_nodes = 8;
  rule.max_depth = 8;
  Text text;
  for (int i = 0; i < 200000; ++i) {
    const TokenId token = i % 3000 < 1500 ? 5 : i % 7;
    text.push_back(token);
    trie.append({&token, 1});
    if (i % 100 != 0) continue;
    trie.speculate(text, rule, scratch, draft);
  }
  CHECK(trie.nodes() <= 400001);
}
