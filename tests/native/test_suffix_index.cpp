#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "core/suffix_index.h"
#include "specrt/error.h"

namespace {

using specrt::SuffixIndex;
using specrt::TokenId;
using Text = std::vector<TokenId>;

// The definition, one token at a time: common[e] is the length of the longest common suffix of
// the text and its first e tokens.
class Reference {
 public:
  void append(TokenId token) {
    text_.push_back(token);
    common_.push_back(0);
    for (std::size_t e = text_.size() - 1; e > 0; --e) {
      common_[e] = text_[e - 1] == token ? common_[e - 1] + 1 : 0;
    }
  }

  SuffixIndex::Match match(std::int64_t max_match, bool most_recent) const {
    SuffixIndex::Match best;
    for (const std::int64_t length : common_) best.length = std::max(best.length, length);
    best.length = std::min(best.length, max_match);
    if (best.length == 0) return best;
    for (std::size_t e = 0; e < common_.size(); ++e) {
      if (common_[e] < best.length) continue;
      best.next = static_cast<std::int64_t>(e);
      if (!most_recent) break;
    }
    return best;
  }

 private:
  Text text_;
  std::vector<std::int64_t> common_;
};

void compare(const Text& text, const std::vector<std::int64_t>& caps) {
  Reference reference;
  std::vector<SuffixIndex> indexes;
  for (const std::int64_t cap : caps) {
    for (const bool most_recent : {false, true}) {
      indexes.emplace_back(cap, most_recent, std::ssize(text));
    }
  }
  for (const TokenId token : text) {
    reference.append(token);
    for (std::size_t i = 0; i < indexes.size(); ++i) {
      indexes[i].append(token);
      const SuffixIndex::Match got = indexes[i].match();
      const SuffixIndex::Match expected = reference.match(caps[i / 2], i % 2 == 1);
      CHECK_EQ(got.length, expected.length);
      CHECK_EQ(got.next, expected.next);
    }
  }
  for (const SuffixIndex& index : indexes) {
    CHECK(std::equal(text.begin(), text.end(), index.text().begin(), index.text().end()));
    CHECK(index.bytes() <= SuffixIndex::bytes_for(std::ssize(text)));
  }
}

std::vector<std::int64_t> all_caps(std::size_t size) {
  std::vector<std::int64_t> caps;
  for (std::size_t cap = 1; cap <= size + 1; ++cap) caps.push_back(static_cast<std::int64_t>(cap));
  return caps;
}

Text random_text(std::mt19937& random, std::size_t size, std::size_t letters) {
  Text text(size);
  for (TokenId& token : text) token = static_cast<TokenId>(random() % letters);
  return text;
}

// Copies pieces of itself, as generated text does, with a fresh letter now and then.
Text copying_text(std::mt19937& random, std::size_t size, std::size_t letters) {
  Text text{0};
  while (text.size() < size) {
    std::size_t from = random() % text.size();
    for (std::size_t left = random() % 12; left > 0 && text.size() < size; --left) {
      text.push_back(text[from++]);
    }
    if (random() % 3 == 0) text.push_back(static_cast<TokenId>(random() % letters));
  }
  text.resize(size);
  return text;
}

Text fibonacci_word(std::size_t size) {
  Text before{1};
  Text word{0};
  while (word.size() < size) {
    Text longer = word;
    longer.insert(longer.end(), before.begin(), before.end());
    before = std::move(word);
    word = std::move(longer);
  }
  word.resize(size);
  return word;
}

Text periodic(std::size_t size, std::size_t period) {
  Text text(size);
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<TokenId>(i % period);
  return text;
}

Text twice(Text text) {
  const std::size_t size = text.size();
  text.reserve(2 * size);
  for (std::size_t i = 0; i < size; ++i) text.push_back(text[i]);
  return text;
}

// a^k b a^(k+1) b ...: long runs that never quite repeat.
Text staircase(std::size_t size) {
  Text text;
  for (std::size_t run = 1; text.size() < size; ++run) {
    text.insert(text.end(), run, 0);
    text.push_back(1);
  }
  text.resize(size);
  return text;
}

std::int64_t steps(const Text& text, std::int64_t max_match, bool most_recent = true) {
  SuffixIndex index(max_match, most_recent, std::ssize(text));
  index.append(text);
  CHECK(index.bytes() <= SuffixIndex::bytes_for(std::ssize(text)));
  return index.steps();
}

struct Named {
  const char* name;
  Text text;
};

std::vector<Named> hard_texts(std::size_t size) {
  std::mt19937 random(11);
  return {{"one letter", Text(size, 0)},
          {"fibonacci", fibonacci_word(size)},
          {"period 2", periodic(size, 2)},
          {"period 97", periodic(size, 97)},
          {"twice", twice(random_text(random, size / 2, 50000))},
          {"two letters", random_text(random, size, 2)},
          {"two letters twice", twice(random_text(random, size / 2, 2))},
          {"staircase", staircase(size)},
          {"copying", copying_text(random, size, 1000)},
          {"all different", periodic(size, size)},
          {"vocabulary", random_text(random, size, 128000)}};
}

}  // namespace

TEST(suffix_index_small_cases) {
  SuffixIndex index(3, true, 8);
  CHECK_EQ(index.match().length, 0);
  CHECK(index.text().empty());
  index.append(5);
  CHECK_EQ(index.match().length, 0);
  index.append(5);
  CHECK_EQ(index.match().length, 1);
  CHECK_EQ(index.match().next, 1);
  index.append(5);  // the two occurrences of "5 5" overlap
  CHECK_EQ(index.match().length, 2);
  CHECK_EQ(index.match().next, 2);
  index.append(6);
  CHECK_EQ(index.match().length, 0);
  CHECK_EQ(index.match().next, 0);
}

TEST(suffix_index_against_brute_force) {
  std::mt19937 random(1);
  for (int round = 0; round < 2400; ++round) {
    const std::size_t size = 1 + random() % 32;
    const std::size_t letters = 1 + random() % 4;
    const Text text = random() % 3 == 0 ? copying_text(random, size, letters)
                                        : random_text(random, size, letters);
    compare(text, all_caps(size));
  }
}

TEST(suffix_index_against_brute_force_longer) {
  std::mt19937 random(2);
  const std::vector<std::int64_t> caps{1, 2, 3, 4, 7, 16, 64, 1000};
  for (int round = 0; round < 12; ++round) {
    compare(random_text(random, 700, 2 + random() % 3), caps);
    compare(copying_text(random, 700, 2 + random() % 40), caps);
    compare(twice(random_text(random, 300, 2 + random() % 40)), caps);
  }
  for (const Named& hard : hard_texts(900)) compare(hard.text, caps);
}

// Appending in one call or in pieces is the same.
TEST(suffix_index_append_in_pieces) {
  std::mt19937 random(4);
  const Text text = copying_text(random, 500, 5);
  SuffixIndex whole(6, true, 500);
  whole.append(text);
  SuffixIndex pieces(6, true, 500);
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t size = std::min<std::size_t>(random() % 9, text.size() - i);
    pieces.append(std::span(text).subspan(i, size));
    i += size;
  }
  CHECK_EQ(whole.match().length, pieces.match().length);
  CHECK_EQ(whole.match().next, pieces.match().next);
  CHECK_EQ(whole.steps(), pieces.steps());
}

TEST(suffix_index_limits) {
  CHECK_THROWS(SuffixIndex(0, true, 4), specrt::InvalidArgument, "[max_match]");
  CHECK_THROWS(SuffixIndex(1, true, -1), specrt::InvalidArgument, "[capacity]");
  CHECK_THROWS(SuffixIndex(1, true, std::int64_t{1} << 40), specrt::InvalidArgument, "[capacity]");
  SuffixIndex index(2, true, 3);
  index.append(Text{1, 2});
  CHECK_THROWS(index.append(Text{1, 2}), specrt::CapacityError, "at most 3 tokens, got 4");
  CHECK_THROWS(index.append(-1), specrt::InvalidArgument, "[token]");
  CHECK_EQ(index.text().size(), 2u);
  index.append(1);
  CHECK_EQ(index.match().length, 1);
  CHECK_THROWS(index.append(1), specrt::CapacityError, "got 4");
  SuffixIndex moved = std::move(index);
  CHECK_EQ(moved.match().next, 1);
  SuffixIndex none(2, true, 0);
  CHECK_THROWS(none.append(1), specrt::CapacityError, "at most 0");
}

// Memory follows the text, not the capacity, and stays under the bound at every size.
TEST(suffix_index_memory) {
  SuffixIndex large(4, true, 1 << 20);
  CHECK(large.bytes() < 16384);
  for (const Named& hard : hard_texts(3000)) {
    SuffixIndex exact(4, true, std::ssize(hard.text));
    SuffixIndex roomy(4, true, 1 << 20);
    for (std::int64_t size = 1; size <= std::ssize(hard.text); ++size) {
      exact.append(hard.text[size - 1]);
      roomy.append(hard.text[size - 1]);
      CHECK(roomy.bytes() <= 2 * SuffixIndex::bytes_for(size) + 16384);
    }
    CHECK(exact.bytes() <= SuffixIndex::bytes_for(std::ssize(hard.text)));
  }
}

// The cost of a token depends neither on how long the text is nor on what it looks like.
TEST(suffix_index_steps_stay_flat) {
  for (const Named& hard : hard_texts(50000)) {
    const Text half(hard.text.begin(), hard.text.begin() + 25000);
    for (const std::int64_t max_match : {1, 4, 64, 50000}) {
      const std::int64_t all = steps(hard.text, max_match);
      if (all > 50000 * 80) check::fail(__FILE__, __LINE__, hard.name);
      if (all > steps(half, max_match) * 5 / 2) check::fail(__FILE__, __LINE__, hard.name);
      if (steps(hard.text, max_match, false) > 50000 * 30) {
        check::fail(__FILE__, __LINE__, hard.name);
      }
    }
  }
}

TEST(suffix_index_steps_do_not_depend_on_max_match) {
  std::mt19937 random(5);
  for (const std::size_t letters : {2, 30, 50000}) {
    const Text text = random_text(random, 50000, letters);
    CHECK(2 * steps(text, 64) <= 3 * steps(text, 4));
  }
  for (const Named& hard : hard_texts(50000)) {
    if (2 * steps(hard.text, 64) > 3 * steps(hard.text, 4)) {
      check::fail(__FILE__, __LINE__, hard.name);
    }
  }
}
