// The forward pass gives the same bytes however its rows come together.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "model/runner.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

// The cache's bytes are no part of Runner's interface, and what a row leaves there is half of what
// it does. An explicit instantiation may name a private member.
template <auto Member>
struct Reach {
  friend specrt::KvStorage& storage_of(specrt::Runner& runner) { return runner.*Member; }
};
specrt::KvStorage& storage_of(specrt::Runner& runner);
template struct Reach<&specrt::Runner::storage_>;

}  // namespace

namespace {

using specrt::CpuIsa;
using specrt::DraftTree;
using specrt::Model;
using specrt::Precision;
using specrt::Runner;
using specrt::SequenceId;
using specrt::TokenId;
using tiny::Tokens;

constexpr Precision kDtypes[] = {Precision::f32, Precision::bf16, Precision::int8, Precision::int4,
                                 Precision::w8a8};
/// How runners of the case at hand keep keys and values.
std::string kv_cache_dtype = "auto";

/// What a row gives and leaves: its logits, its keys and values in every layer.
struct Row {
  std::vector<float> logits;
  std::string kv;
  bool operator==(const Row& other) const {
    return kv == other.kv && logits.size() == other.logits.size() &&
           std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0;
  }
};
using Rows = std::vector<Row>;

struct Setup {
  CpuIsa isa = CpuIsa::scalar;
  int block_size = 16;
  int threads = 1;
  int sequences = 1;
  int max_rows = 160;
};

std::unique_ptr<Runner> make_runner(const Model& model, const Setup& setup) {
  specrt::RunnerOptions options;
  options.block_size = setup.block_size;
  options.max_batch_size = setup.sequences;
  options.max_rows = setup.max_rows;
  options.cpu_isa = specrt::name_of(setup.isa);
  options.kv_cache_dtype = kv_cache_dtype;
  options.team = std::make_shared<specrt::ThreadTeam>(setup.threads);
  options.kv_cache_bytes = std::int64_t{1} << 30;  // cut to what can be used
  return std::make_unique<Runner>(model, options);
}

std::string kv_at(Runner& runner, std::int64_t slot) {
  std::string bytes;
  const specrt::KvGroup& group = runner.cache().layout().groups[0];
  for (const std::int64_t layer : group.layers) {
    for (std::size_t p = 0; p < group.planes.size(); ++p) {
      const std::int64_t size = group.planes[p].bytes_per_slot();
      const std::byte* base = storage_of(runner).plane(layer, static_cast<std::int64_t>(p));
      bytes.append(reinterpret_cast<const char*>(base + slot * size),
                   static_cast<std::size_t>(size));
    }
  }
  return bytes;
}

/// One pass of several sequences' next tokens, some with a draft behind.
class Pass {
 public:
  explicit Pass(Runner& runner) : runner_(runner) { runner.begin(); }

  void committed(SequenceId id, std::span<const TokenId> tokens) {
    const std::int64_t start = runner_.cache().length(id);
    const std::int64_t first = runner_.add_committed(id, tokens);
    parts_.push_back({id, std::ssize(tokens)});
    for (std::int64_t i = 0; i < std::ssize(tokens); ++i) {
      rows_.push_back({first + i, runner_.cache().slot(id, 0, start + i)});
    }
  }
  std::int64_t tree(SequenceId id, const DraftTree& draft) {
    const std::int64_t first = runner_.add_tree(id, draft);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(draft.size()); ++i) {
      rows_.push_back({first + i, runner_.cache().scratch_slot(0, runner_.scratch_of(first + i))});
    }
    return first;
  }
  Rows run() {
    const specrt::cpu::FpMode mode;
    runner_.forward();
    Rows out;
    const auto vocab = static_cast<std::size_t>(runner_.config().vocab_size);
    for (std::size_t first = 0; first < rows_.size(); first += Runner::kLogitRows) {
      std::vector<std::int64_t> wanted;
      for (std::size_t i = first; i < std::min(rows_.size(), first + Runner::kLogitRows); ++i) {
        wanted.push_back(rows_[i].row);
      }
      const std::span<const float> logits = runner_.logits(wanted);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto row = logits.subspan(i * vocab, vocab);
        out.push_back({{row.begin(), row.end()}, kv_at(runner_, rows_[first + i].slot)});
      }
    }
    for (const auto& [id, count] : parts_) runner_.advance(id, count);
    return out;
  }

 private:
  struct Place {
    std::int64_t row;
    std::int64_t slot;
  };
  Runner& runner_;
  std::vector<std::pair<SequenceId, std::int64_t>> parts_;
  std::vector<Place> rows_;
};

Rows feed(Runner& runner, SequenceId id, std::span<const TokenId> tokens) {
  Pass pass(runner);
  pass.committed(id, tokens);
  return pass.run();
}

/// Every token by itself.
Rows one_by_one(Runner& runner, SequenceId id, std::span<const TokenId> tokens) {
  Rows rows;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    rows.push_back(std::move(feed(runner, id, tokens.subspan(i, 1))[0]));
  }
  return rows;
}

Rows one_by_one(const Model& model, const Setup& setup, std::span<const TokenId> tokens) {
  const auto runner = make_runner(model, setup);
  runner->cache().add(0, std::ssize(tokens));
  return one_by_one(*runner, 0, tokens);
}

void check_same(const Rows& got, std::span<const Row> expected, const std::string& what) {
  CHECK_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    const bool kv = got[i].kv != expected[i].kv;
    check::fail(__FILE__, __LINE__,
                what + ": row " + std::to_string(i) + (kv ? " leaves other K/V" : " differs"));
  }
}

template <typename Body>
void for_each_level(Body&& body) {
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    for (const Precision dtype : kDtypes) {
      for (const char* const kv : {"auto", "int8"}) {
        kv_cache_dtype = kv;
        try {
          body(isa, dtype);
        } catch (const std::exception& error) {
          check::fail(__FILE__, __LINE__,
                      std::string(specrt::name_of(isa)) + " " + specrt::name_of(dtype) + " kv " +
                          kv + ": " + error.what());
        }
      }
    }
  }
}

DraftTree random_tree(std::mt19937_64& random, int size, std::int64_t vocab, bool deep) {
  DraftTree tree;
  while (static_cast<int>(tree.size()) < size) {
    auto parent = static_cast<std::int32_t>(tree.size()) - 1;
    if (!deep || random() % 4 == 0) {
      parent = static_cast<std::int32_t>(random() % (tree.size() + 1)) - 1;
    }
    const auto token = static_cast<TokenId>(random() % static_cast<std::uint64_t>(vocab));
    if (tree.child(parent, token) < 0) tree.add(token, parent);
  }
  return tree;
}

std::vector<std::int32_t> path_to(const DraftTree& tree, std::int32_t node) {
  std::vector<std::int32_t> path;
  for (; node != DraftTree::kRoot; node = tree.parents()[static_cast<std::size_t>(node)]) {
    path.insert(path.begin(), node);
  }
  return path;
}

}  // namespace

TEST(forward_row_alone_or_among_up_to_70) {
  for_each_level([](CpuIsa isa, Precision dtype) {
    tiny::Spec spec = tiny::small_spec(dtype);
    spec.qkv_bias = true;
    const Model model = tiny::random_model(spec);
    const Tokens tokens = tiny::random_tokens(1, 72, spec.vocab);
    const Setup setup{isa};
    const Rows alone = one_by_one(model, setup, tokens);
    const auto runner = make_runner(model, setup);
    for (int m = 1; m <= 70; ++m) {
      if (tiny::kThinned && m > 5 && m % 8 != 1) continue;
      runner->cache().add(m, 72);
      const std::span<const TokenId> all = tokens;
      check_same(feed(*runner, m, all.first(static_cast<std::size_t>(m))),
                 std::span(alone).first(static_cast<std::size_t>(m)), "M = " + std::to_string(m));
      // And what they left is what the next row reads.
      check_same(feed(*runner, m, all.subspan(static_cast<std::size_t>(m), 1)),
                 std::span(alone).subspan(static_cast<std::size_t>(m), 1),
                 "after M = " + std::to_string(m));
      runner->cache().remove(m);
    }
  });
}

// M sequences that are at different places, one row each.
TEST(forward_rows_of_up_to_70_sequences) {
  for_each_level([](CpuIsa isa, Precision dtype) {
    const tiny::Spec spec = tiny::small_spec(dtype);
    const Model model = tiny::random_model(spec);
    Setup setup{isa};
    setup.sequences = 70;
    setup.block_size = 4;
    std::vector<Tokens> texts;
    Rows alone;
    for (int i = 0; i < 70; ++i) {
      texts.push_back(
          tiny::random_tokens(static_cast<std::uint64_t>(i), 1 + (i * 7) % 40, spec.vocab));
      alone.push_back(one_by_one(model, {isa}, texts.back()).back());
    }
    for (const int m : {2, 3, 15, 16, 17, 33, 70}) {
      const auto runner = make_runner(model, setup);
      for (int i = 0; i < m; ++i) {
        const std::span<const TokenId> text = texts[static_cast<std::size_t>(i)];
        runner->cache().add(i, std::ssize(text));
        if (text.size() > 1) (void)feed(*runner, i, text.first(text.size() - 1));
      }
      Pass pass(*runner);
      for (int i = 0; i < m; ++i) {
        pass.committed(i, std::span(texts[static_cast<std::size_t>(i)]).last(1));
      }
      check_same(pass.run(), std::span(alone).first(static_cast<std::size_t>(m)),
                 "M = " + std::to_string(m));
    }
  });
}

TEST(forward_chunked_prefill_at_any_split) {
  for_each_level([](CpuIsa isa, Precision dtype) {
    const tiny::Spec spec = tiny::small_spec(dtype, 2);
    const Model model = tiny::random_model(spec);
    const Tokens tokens = tiny::random_tokens(2, 110, spec.vocab);
    const std::span<const TokenId> all = tokens;
    std::mt19937_64 random(5);
    Rows whole;
    for (const int block_size : {16, 4, 1}) {
      const Setup setup{isa, block_size};
      const auto runner = make_runner(model, setup);
      runner->cache().add(0, 110);
      const Rows now = feed(*runner, 0, tokens);
      if (whole.empty()) whole = now;
      check_same(now, whole, "block size " + std::to_string(block_size));
      runner->cache().remove(0);
      // Every place for one split, and many random ones.
      for (std::size_t split = 1; split < 110; split += tiny::kThinned ? 23 : 5) {
        runner->cache().add(0, 110);
        Rows parts = feed(*runner, 0, all.first(split));
        const Rows rest = feed(*runner, 0, all.subspan(split));
        parts.insert(parts.end(), rest.begin(), rest.end());
        check_same(parts, whole, "split at " + std::to_string(split));
        runner->cache().remove(0);
      }
      for (int round = 0; round < (tiny::kThinned ? 2 : 12); ++round) {
        runner->cache().add(0, 110);
        Rows parts;
        for (std::size_t at = 0; at < 110;) {
          const std::size_t size = std::min<std::size_t>(1 + random() % 37, 110 - at);
          const Rows part = feed(*runner, 0, all.subspan(at, size));
          parts.insert(parts.end(), part.begin(), part.end());
          at += size;
        }
        check_same(parts, whole, "random split " + std::to_string(round));
        runner->cache().remove(0);
      }
    }
  });
}

// A node's row is the row of its path fed as text, wherever the path crosses blocks and chunks;
// and once committed, the path's keys and values are the text's.
TEST(forward_tree_rows_equal_committed_rows) {
  for_each_level([](CpuIsa isa, Precision dtype) {
    const tiny::Spec spec = tiny::small_spec(dtype, 3);
    const Model model = tiny::random_model(spec);
    std::mt19937_64 random(7);
    int number = 0;
    for (const int prefix : {1, 15, 16, 17, 30, 31, 32, 33, 63, 64, 90}) {
      ++number;
      if (tiny::kThinned && number % 4 != 0) continue;
      const int block_size = number % 3 == 0 ? 1 : number % 3 == 1 ? 4 : 16;
      const Setup setup{isa, block_size};
      const Tokens text =
          tiny::random_tokens(random(), static_cast<std::size_t>(prefix), spec.vocab);
      const DraftTree tree = number % 4 == 0
                                 ? DraftTree::chain(tiny::random_tokens(random(), 64, spec.vocab))
                                 : random_tree(random, 24, spec.vocab, number % 2 == 0);
      const auto runner = make_runner(model, setup);
      runner->cache().add(0, 200);
      Pass pass(*runner);
      pass.committed(0, text);
      const std::int64_t first = pass.tree(0, tree);
      const Rows got = pass.run();

      const auto other = make_runner(model, setup);
      other->cache().add(0, 200);
      (void)feed(*other, 0, text);
      const std::int32_t last = static_cast<std::int32_t>(tree.size()) - 1;
      for (std::int32_t node = last; node >= 0; node -= number % 4 == 0 ? 64 : 1) {
        const std::vector<std::int32_t> path = path_to(tree, node);
        Tokens tokens;
        Rows along;
        for (const std::int32_t step : path) {
          tokens.push_back(tree.tokens()[static_cast<std::size_t>(step)]);
          along.push_back(got[static_cast<std::size_t>(prefix + step)]);
        }
        check_same(along, feed(*other, 0, tokens), "node " + std::to_string(node));
        other->cache().truncate(0, prefix);
      }
      // The last node's path is not the first child's: commit it and go on behind it.
      std::vector<std::int32_t> scratch;
      Tokens tokens = text;
      for (const std::int32_t step : path_to(tree, last)) {
        scratch.push_back(runner->scratch_of(first + step));
        tokens.push_back(tree.tokens()[static_cast<std::size_t>(step)]);
      }
      runner->commit(0, scratch);
      CHECK_EQ(runner->cache().length(0), std::ssize(tokens));
      runner->cache().check_invariants();
      tokens.push_back(1);
      const Rows alone = one_by_one(model, {isa}, tokens);
      for (std::int64_t p = 0; p + 1 < std::ssize(tokens); ++p) {
        if (kv_at(*runner, runner->cache().slot(0, 0, p)) !=
            alone[static_cast<std::size_t>(p)].kv) {
          check::fail(__FILE__, __LINE__, "committed K/V at " + std::to_string(p));
        }
      }
      check_same(feed(*runner, 0, std::span(tokens).last(1)), std::span(alone).last(1),
                 "after the commit");
    }
  });
}

TEST(forward_batch_composition) {
  for_each_level([](CpuIsa isa, Precision dtype) {
    const tiny::Spec spec = tiny::small_spec(dtype, 4);
    const Model model = tiny::random_model(spec);
    Setup setup{isa, 4};
    setup.sequences = 5;
    std::mt19937_64 random(9);
    struct Member {
      Tokens before;
      Tokens now;
      DraftTree tree;
      Rows alone;
    };
    std::vector<Member> members;
    for (int i = 0; i < 5; ++i) {
      Member m;
      m.before = tiny::random_tokens(random(), random() % 40, spec.vocab);
      m.now = tiny::random_tokens(random(), i == 2 ? 30 : 1, spec.vocab);
      if (i != 1) m.tree = random_tree(random, 3 + i * 4, spec.vocab, i % 2 == 0);
      const auto runner = make_runner(model, {isa});
      runner->cache().add(0, 120);
      if (!m.before.empty()) (void)feed(*runner, 0, m.before);
      Pass pass(*runner);
      pass.committed(0, m.now);
      (void)pass.tree(0, m.tree);
      m.alone = pass.run();
      members.push_back(std::move(m));
    }
    std::vector<int> order{0, 1, 2, 3, 4};
    for (int round = 0; round < (tiny::kThinned ? 2 : 8); ++round) {
      std::shuffle(order.begin(), order.end(), random);
      const std::size_t size = 1 + random() % order.size();
      const auto runner = make_runner(model, setup);
      Rows expected;
      for (std::size_t k = 0; k < size; ++k) {
        const Member& m = members[static_cast<std::size_t>(order[k])];
        runner->cache().add(order[k], 120);
        if (!m.before.empty()) (void)feed(*runner, order[k], m.before);
      }
      Pass pass(*runner);
      for (std::size_t k = 0; k < size; ++k) {
        const Member& m = members[static_cast<std::size_t>(order[k])];
        pass.committed(order[k], m.now);
        (void)pass.tree(order[k], m.tree);
        expected.insert(expected.end(), m.alone.begin(), m.alone.end());
      }
      check_same(pass.run(), expected, "round " + std::to_string(round));
    }
  });
}

TEST(forward_thread_counts) {
  for_each_level([](CpuIsa isa, Precision dtype) {
    const tiny::Spec spec = tiny::small_spec(dtype, 5);
    const Model model = tiny::random_model(spec);
    const Tokens tokens = tiny::random_tokens(11, 47, spec.vocab);
    std::mt19937_64 random(3);
    const DraftTree tree = random_tree(random, 20, spec.vocab, true);
    Rows expected;
    for (const int threads : {1, 2, 3}) {
      Setup setup{isa};
      setup.threads = threads;
      const auto runner = make_runner(model, setup);
      CHECK_EQ(runner->threads(), threads);
      runner->cache().add(0, 60);
      Pass pass(*runner);
      pass.committed(0, tokens);
      (void)pass.tree(0, tree);
      const Rows rows = pass.run();
      if (expected.empty()) expected = rows;
      check_same(rows, expected, std::to_string(threads) + " threads");
    }
  });
}

// What one sequence leaves behind in blocks and scratch slots is never seen by the next.
TEST(forward_reused_slots) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 6);
  tiny::Tensors tensors = tiny::random_tensors(spec);
  // Token 7 poisons every key and value behind it.
  for (std::int64_t k = 0; k < spec.hidden; ++k) {
    tensors.at("embedding")[static_cast<std::size_t>(7 * spec.hidden + k)] = NAN;
  }
  const Model model = tiny::build(tiny::config_of(spec), spec.dtype, tensors);
  Tokens clean = tiny::random_tokens(1, 50, spec.vocab);
  std::ranges::replace(clean, 7, 8);
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    const Rows expected = one_by_one(model, {isa}, clean);
    const auto runner = make_runner(model, {isa, 4});
    runner->cache().add(0, 256);
    Pass poison(*runner);
    poison.committed(0, Tokens(90, 7));
    (void)poison.tree(0, DraftTree::chain(Tokens(60, 7)));
    (void)poison.run();
    runner->cache().remove(0);
    runner->cache().add(1, 60);
    check_same(feed(*runner, 1, std::span(clean).first(49)), std::span(expected).first(49), "text");
    Pass pass(*runner);
    pass.committed(1, std::span(clean).last(1));
    (void)pass.tree(1, DraftTree({3, 4, 5}, {-1, -1, 1}));
    const Rows rows = pass.run();
    check_same({rows[0]}, std::span(expected).last(1), "row before a tree");
    for (const Row& row : rows) {
      for (const float value : row.logits) CHECK(std::isfinite(value));
    }
  }
}

TEST(forward_pass_limits) {
  const Model model = tiny::random_model(tiny::small_spec());
  Setup setup;
  setup.max_rows = 8;
  setup.sequences = 2;
  const auto runner = make_runner(model, setup);
  runner->cache().add(0, 256);
  runner->cache().add(1, 10);
  runner->begin();
  CHECK_THROWS(runner->add_tree(0, DraftTree({1}, {-1})), specrt::InternalError, "own sequence");
  CHECK_THROWS(runner->add_committed(0, Tokens(9, 1)), specrt::CapacityError, "at most 8 rows");
  CHECK_EQ(runner->rows(), 0);
  CHECK_EQ(runner->add_committed(0, Tokens(3, 1)), 0);
  CHECK_THROWS(runner->add_tree(1, DraftTree({1}, {-1})), specrt::InternalError, "own sequence");
  CHECK_THROWS(runner->add_tree(0, DraftTree::chain(Tokens(6, 1))), specrt::CapacityError,
               "at most 8 rows, got 9");
  CHECK_EQ(runner->rows(), 3);
  CHECK_EQ(runner->add_tree(0, DraftTree::chain(Tokens(5, 1))), 3);
  CHECK_THROWS(runner->add_committed(1, Tokens(1, 1)), specrt::CapacityError, "at most 8 rows");
}
