// Attention of a pass: every row gives the bits that it gives alone, whichever rows share keys and
// values with it, however the plan cuts the work and however many threads do it.

#include <algorithm>
#include <limits>
#include <memory>

#include "cpu/thread_pool.h"
#include "model/attention_plan.h"
#include "test_kernels_support.h"
#include "tiny_model.h"

using namespace kernel_test;
using specrt::AttentionPlan;
using specrt::KvDType;
using specrt::cpu::AttentionArgs;
using specrt::cpu::AttentionRow;
using specrt::cpu::AttentionUnit;
using specrt::cpu::ThreadPool;

namespace {

constexpr KvDType kKvDTypes[] = {KvDType::f32, KvDType::bf16, KvDType::i8};

struct Setting {
  KvDType dtype = KvDType::bf16;
  std::int64_t kv = 2;
  std::int64_t group = 3;
  std::int64_t dim = 16;
  std::int64_t window = 0;
  float softcap = 0.0f;
  std::int64_t block_size = 16;
};

/// Sequence: positions committed before the pass, rows of text in it, draft nodes behind the last.
struct Sequence {
  std::int64_t before;
  std::int64_t text;
  std::int64_t nodes;
};

/// The rows of a pass, with the memory that they read.
class Pass {
 public:
  Pass(const Kernels& kernels, const Setting& setting, const std::vector<Sequence>& sequences)
      : kernels_(kernels), setting_(setting), random_(11) {
    std::int64_t blocks = 0;
    std::int64_t nodes = 0;
    for (const Sequence& s : sequences) {
      blocks += (s.before + s.text) / setting.block_size + 1;
      nodes += s.nodes;
    }
    scratch_ = blocks * setting.block_size;
    memory_ = std::make_unique<KvMemory>(kernels, setting.dtype, scratch_ + nodes, setting.kv,
                                         setting.dim);
    std::vector<std::int32_t> free(static_cast<std::size_t>(blocks));
    for (std::size_t i = 0; i < free.size(); ++i) free[i] = static_cast<std::int32_t>(i);
    std::shuffle(free.begin(), free.end(), random_);
    std::int32_t next_node = 0;
    tables_.resize(sequences.size());
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      for (std::int64_t b = 0; b <= (s.before + s.text) / setting.block_size; ++b) {
        tables_[i].push_back(free.back());
        free.pop_back();
      }
      for (std::int64_t p = 0; p < s.before + s.text; ++p) fill(slot(i, p));
      forget_before_window(i, s.before + 1);
      for (std::int64_t p = s.before; p < s.before + s.text; ++p) add(i, p + 1, {});
      const std::size_t first = rows_.size();
      for (std::int64_t n = 0; n < s.nodes; ++n) {
        // Mostly a deep chain, with branches.
        std::vector<std::int32_t> path;
        if (n > 0 && random_() % 8 != 0) {
          const std::int64_t back =
              random_() % 4 == 0 ? static_cast<std::int64_t>(random_()) % n : 0;
          path = paths_[first + static_cast<std::size_t>(n - 1 - back)];
        }
        path.push_back(next_node++);
        fill(scratch_ + path.back());
        add(i, s.before + s.text, path);
      }
    }
    const auto width = static_cast<std::size_t>(setting.kv * setting.group * setting.dim);
    q_ = random_floats(rows_.size() * width, 31);
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      rows_[r].table = tables_[owners_[r]].data();
      rows_[r].path = paths_[r].data();
      rows_[r].q = q_.data() + r * width;
    }
  }

  std::size_t size() const { return rows_.size(); }
  std::size_t owner(std::size_t row) const { return owners_[row]; }

  /// The rows named, as a pass of `threads` threads does them: [rows, q heads, dim].
  Floats run(std::size_t first, std::size_t count, int threads) const {
    std::vector<AttentionRow> rows(rows_.begin() + static_cast<std::ptrdiff_t>(first),
                                   rows_.begin() + static_cast<std::ptrdiff_t>(first + count));
    const auto width = static_cast<std::size_t>(setting_.kv * setting_.group * setting_.dim);
    Floats out(count * width, -7.0f);
    std::int64_t longest = 0;
    for (std::size_t r = 0; r < count; ++r) {
      rows[r].out = out.data() + r * width;
      longest = std::max(longest, rows[r].table_positions + rows[r].path_length);
    }
    AttentionPlan::Shape shape;
    shape.q_heads = setting_.kv * setting_.group;
    shape.kv_heads = setting_.kv;
    shape.head_dim = setting_.dim;
    shape.window = setting_.window;
    shape.max_partials = AttentionPlan::most_partials(static_cast<std::int64_t>(count), longest);
    AttentionPlan plan(shape, static_cast<std::int64_t>(count), threads);
    Floats partials(
        static_cast<std::size_t>(shape.max_partials *
                                 specrt::cpu::partial_floats(shape.q_heads, setting_.dim)) +
            1,
        -7.0f);
    AttentionArgs args = complete();
    args.partials = partials.data();
    ThreadPool pool(threads);
    // Twice: a plan is made for every pass anew.
    for (int turn = 0; turn < 2; ++turn) {
      plan.make(rows);
      plan.run(args, kernels_, pool);
    }
    split_ += std::any_of(plan.units().begin(), plan.units().end(),
                          [](const AttentionUnit& unit) { return unit.segment >= 0; });
    CHECK_EQ(partials.back(), -7.0f);
    return out;
  }

  /// Every row by itself, in one task a head.
  Floats alone() const {
    const auto width = static_cast<std::size_t>(setting_.kv * setting_.group * setting_.dim);
    Floats out(rows_.size() * width, -7.0f);
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      AttentionRow row = rows_[r];
      row.out = out.data() + r * width;
      const AttentionUnit unit{0, 1, -1};
      AttentionArgs args = complete();
      args.rows = &row;
      args.units = &unit;
      kernels_.attention(args, 0, setting_.kv);
    }
    return out;
  }

  void check(const Floats& expected, std::size_t first, std::size_t count, int threads) const {
    const auto width = static_cast<std::size_t>(setting_.kv * setting_.group * setting_.dim);
    const Floats got = run(first, count, threads);
    for (std::size_t r = 0; r < count; ++r) {
      if (same_bits(got.data() + r * width, expected.data() + (first + r) * width, width)) continue;
      check::fail(__FILE__, __LINE__,
                  "row " + std::to_string(r) + " of " + std::to_string(count) + " from " +
                      std::to_string(first) + ", threads " + std::to_string(threads));
    }
  }

  /// Spoils the key of a sequence's position.
  void spoil(std::size_t sequence, std::int64_t position) {
    const Floats poison(static_cast<std::size_t>(setting_.kv * setting_.dim),
                        std::numeric_limits<float>::quiet_NaN());
    memory_->set(slot(sequence, position), poison.data(), poison.data());
  }
  bool sees(std::size_t row, std::size_t sequence, std::int64_t position) const {
    return owners_[row] == sequence && position < rows_[row].table_positions;
  }

  int split() const { return split_; }  ///< runs in which rows were split by segment

 private:
  AttentionArgs complete() const {
    AttentionArgs args = memory_->args();
    args.block_size = setting_.block_size;
    args.path_base = scratch_;
    args.q_heads = setting_.kv * setting_.group;
    args.scale = 1.0f / std::sqrt(static_cast<float>(setting_.dim));
    args.softcap = setting_.softcap;
    args.window = setting_.window;
    return args;
  }
  std::int64_t slot(std::size_t sequence, std::int64_t p) const {
    return tables_[sequence][static_cast<std::size_t>(p / setting_.block_size)] *
               setting_.block_size +
           p % setting_.block_size;
  }
  void fill(std::int64_t slot) {
    const auto width = static_cast<std::size_t>(setting_.kv * setting_.dim);
    const auto seed = static_cast<std::uint32_t>(slot);
    Floats key = random_floats(width, 2 * seed + 1000);
    Floats value = random_floats(width, 2 * seed + 1001);
    // Now and then nothing at all.
    if (slot % 13 == 0) std::fill(key.begin(), key.end(), 0.0f);
    if (slot % 17 == 0) std::fill(value.begin(), value.end(), 0.0f);
    memory_->set(slot, key.data(), value.data());
  }
  // As the cache does: blocks that no row's window reaches are gone from the table.
  void forget_before_window(std::size_t sequence, std::int64_t length) {
    if (setting_.window == 0) return;
    const std::int64_t gone = std::max<std::int64_t>(0, length - setting_.window);
    for (std::int64_t b = 0; b < gone / setting_.block_size; ++b) {
      tables_[sequence][static_cast<std::size_t>(b)] = -1;
    }
  }
  void add(std::size_t sequence, std::int64_t in_table, std::vector<std::int32_t> path) {
    AttentionRow row;
    row.table_positions = in_table;
    row.path_length = std::ssize(path);
    rows_.push_back(row);
    owners_.push_back(sequence);
    paths_.push_back(std::move(path));
  }

  const Kernels& kernels_;
  Setting setting_;
  std::mt19937 random_;
  std::int64_t scratch_ = 0;
  std::unique_ptr<KvMemory> memory_;
  std::vector<std::vector<std::int32_t>> tables_;
  std::vector<AttentionRow> rows_;
  std::vector<std::size_t> owners_;
  std::vector<std::vector<std::int32_t>> paths_;
  Floats q_;
  mutable int split_ = 0;
};

}  // namespace

TEST(attention_row_alone_or_among_up_to_70) {
  on_every_isa([](const Kernels& kernels) {
    for (const KvDType dtype : kKvDTypes) {
      Setting setting;
      setting.dtype = dtype;
      // A chunk of text across a segment's end and a draft behind it.
      const Pass pass(kernels, setting, {{490, 30, 40}});
      const Floats alone = pass.alone();
      for (std::size_t rows = 1; rows <= 70; ++rows) {
        if (tiny::kThinned && rows % 9 != 1) continue;
        pass.check(alone, 0, rows, 1 + static_cast<int>(rows % 4));
        pass.check(alone, 70 - rows, rows, 1);
      }
    }
  });
}

TEST(attention_rows_by_shape_and_thread) {
  on_every_isa([](const Kernels& kernels) {
    int number = 0;
    for (const KvDType dtype : kKvDTypes) {
      for (std::int64_t group = 1; group <= 8; ++group) {
        if (tiny::kThinned && group % 3 != 0) continue;
        Setting setting;
        setting.dtype = dtype;
        setting.group = group;
        const std::int64_t dims[] = {16, 33, 6, 40, 64, 80};
        setting.dim = dims[++number % 6];
        const std::int64_t windows[] = {0, 70, 3, 0, 600};
        setting.window = windows[number % 5];
        setting.softcap = number % 3 == 0 ? 2.0f : 0.0f;
        setting.block_size = number % 2 == 0 ? 16 : 5;
        setting.kv = 1 + number % 3;
        const Pass pass(kernels, setting,
                        {{0, 45, 0}, {1100, 1, 9}, {31, 1, 70}, {500, 20, 3}, {0, 1, 0}});
        const Floats alone = pass.alone();
        for (int threads = 1; threads <= 4; ++threads) pass.check(alone, 0, pass.size(), threads);
      }
    }
  });
}

// One row and a few, far into a context: the plan splits them, and nothing changes.
TEST(attention_long_contexts_over_threads) {
  on_every_isa([](const Kernels& kernels) {
    for (const KvDType dtype : kKvDTypes) {
      for (const std::int64_t window : {0, 900}) {
        Setting setting;
        setting.dtype = dtype;
        setting.window = window;
        for (const Sequence& sequence : {Sequence{2047, 1, 0}, {2048, 1, 0}, {1530, 1, 12}}) {
          const Pass pass(kernels, setting, {sequence, {40, 1, 2}});
          const Floats alone = pass.alone();
          for (int threads = 1; threads <= 4; ++threads) {
            if (tiny::kThinned && threads != 3) continue;
            pass.check(alone, 0, pass.size(), threads);
            pass.check(alone, 0, 1, threads);
          }
          CHECK(pass.split() >= (tiny::kThinned ? 1 : 6));
        }
      }
    }
  });
}

TEST(attention_rows_keep_nan_to_themselves) {
  on_every_isa([](const Kernels& kernels) {
    for (const KvDType dtype : kKvDTypes) {
      Setting setting;
      setting.dtype = dtype;
      Pass pass(kernels, setting, {{500, 30, 5}, {700, 1, 6}});
      const Floats whole = pass.alone();
      pass.spoil(0, 515);  // some rows of the text come before it
      const auto width = static_cast<std::size_t>(setting.kv * setting.group * setting.dim);
      for (const int threads : {1, 2}) {
        const Floats got = pass.run(0, pass.size(), threads);
        for (std::size_t r = 0; r < pass.size(); ++r) {
          const float* row = got.data() + r * width;
          if (pass.sees(r, 0, 515)) {
            CHECK(std::all_of(row, row + width, [](float x) { return std::isnan(x); }));
          } else {
            CHECK(same_bits(row, whole.data() + r * width, width));
          }
        }
      }
    }
  });
}

// The plan keeps within its bound, covers every segment of every row once, and gives up splitting
// where there is no room for partials.
TEST(attention_plan_bounds) {
  CHECK_EQ(AttentionPlan::most_partials(64, 512), 0);
  CHECK_EQ(AttentionPlan::most_partials(3, 513), 6);
  CHECK_EQ(AttentionPlan::most_partials(512, 1 << 20), AttentionPlan::kMostPartials);
  std::vector<std::int32_t> tables(64);
  for (const std::int64_t most : {0, 5, 6, 7, 1024}) {
    AttentionPlan::Shape shape{6, 2, 16, 0, most};
    AttentionPlan plan(shape, 64, 3);
    std::vector<AttentionRow> rows(2);
    for (std::size_t r = 0; r < 2; ++r) {
      rows[r].table = &tables[r];
      rows[r].table_positions = 1500;
    }
    plan.make(rows);
    std::int64_t partials = 0;
    for (std::size_t r = 0; r < 2; ++r) {
      std::vector<int> seen(3);
      for (const AttentionUnit& unit : plan.units()) {
        if (unit.first_row != static_cast<std::int64_t>(r)) continue;
        CHECK_EQ(unit.rows, 1);
        CHECK_EQ(unit.segment >= 0, rows[r].partial >= 0);
        for (std::int64_t s = 0; s < 3; ++s) {
          seen[static_cast<std::size_t>(s)] += unit.segment < 0 || unit.segment == s;
        }
      }
      for (const int count : seen) CHECK_EQ(count, 1);
      if (rows[r].partial >= 0) partials = std::max(partials, rows[r].partial + 3);
    }
    CHECK_EQ(partials, most < 3 ? 0 : most < 6 ? 3 : 6);
  }
}
