// Attention of one token: against its definition, and the same bits however positions are stored
// and however segments are shared out. Rows among others: test_attention_rows.cpp.

#include <algorithm>
#include <limits>

#include "test_kernels_support.h"
#include "tiny_model.h"

using namespace kernel_test;
using specrt::KvDType;
using specrt::cpu::AttentionArgs;
using specrt::cpu::AttentionRow;
using specrt::cpu::AttentionUnit;

namespace {

constexpr KvDType kKvDTypes[] = {KvDType::f32, KvDType::bf16, KvDType::i8};

struct Heads {
  std::int64_t kv, group, dim;
};

enum class Tasks { one, by_head, by_segment };

/// One token's query and the keys and values of its positions, stored as a test asks.
struct Problem {
  Problem(Heads heads_, std::int64_t length_, KvDType dtype_)
      : heads(heads_), length(length_), dtype(dtype_) {
    const std::int64_t width = heads.kv * heads.dim;
    q = random_floats(static_cast<std::size_t>(width * heads.group), 21);
    keys = random_floats(static_cast<std::size_t>(length * width), 22);
    values = random_floats(static_cast<std::size_t>(length * width), 23);
  }

  /// Positions before `table_positions` through a shuffled block table, the others through slots.
  Floats run(const Kernels& kernels, std::int64_t block_size, std::int64_t table_positions,
             Tasks tasks = Tasks::one) const {
    const std::int64_t width = heads.kv * heads.dim;
    const std::int64_t blocks = (table_positions + block_size - 1) / block_size;
    const std::int64_t slots = blocks * block_size + 2 * (length - table_positions) + 1;
    std::mt19937 engine(7);
    std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
    std::shuffle(table.begin(), table.end(), engine);
    std::vector<std::int32_t> path;
    for (std::int64_t i = 0; i < length - table_positions; ++i) {
      path.push_back(static_cast<std::int32_t>(blocks * block_size + 2 * i + 1));
    }
    std::shuffle(path.begin(), path.end(), engine);

    KvMemory memory(kernels, dtype, slots, heads.kv, heads.dim);
    for (std::int64_t p = 0; p < length; ++p) {
      const std::int64_t slot = p < table_positions
                                    ? table[p / block_size] * block_size + p % block_size
                                    : path[p - table_positions];
      memory.set(slot, keys.data() + p * width, values.data() + p * width);
    }

    const std::int64_t segments =
        (length + specrt::cpu::kAttentionSegment - 1) / specrt::cpu::kAttentionSegment;
    const std::int64_t q_heads = heads.kv * heads.group;
    Floats out(q.size() + 1, -7.0f);
    Floats partials(
        static_cast<std::size_t>(segments * specrt::cpu::partial_floats(q_heads, heads.dim)) + 1,
        -7.0f);
    AttentionRow row;
    row.q = q.data();
    row.out = out.data();
    row.table = table.data();
    row.table_positions = table_positions;
    row.path = path.data();
    row.path_length = length - table_positions;
    row.partial = tasks == Tasks::by_segment ? 0 : -1;
    AttentionUnit unit{0, 1, -1};
    AttentionArgs args = memory.args();
    args.block_size = block_size;
    args.q_heads = q_heads;
    args.scale = scale();
    args.softcap = softcap;
    args.window = window;
    args.rows = &row;
    args.units = &unit;
    args.partials = partials.data();
    if (tasks == Tasks::one) kernels.attention(args, 0, heads.kv);
    if (tasks == Tasks::by_head) {
      for (std::int64_t task = heads.kv - 1; task >= 0; --task) {
        kernels.attention(args, task, task + 1);
      }
    }
    if (tasks == Tasks::by_segment) {
      for (unit.segment = segments - 1; unit.segment >= 0; --unit.segment) {
        kernels.attention(args, 0, heads.kv);
      }
      kernels.attention_combine(args, 0, 1);
    }
    CHECK_EQ(out.back(), -7.0f);
    CHECK_EQ(partials.back(), -7.0f);
    return out;
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(heads.dim)); }

  Heads heads;
  std::int64_t length;
  KvDType dtype;
  float softcap = 0.0f;
  std::int64_t window = 0;
  Floats q, keys, values;
};

void check_against_reference(const Kernels& kernels, const Problem& problem, const Floats& out,
                             double tolerance) {
  // The tile unit takes queries and weights as bf16: the latter are off by 2^-9 each.
  const bool tiles = std::string(kernels.name) == "amx" && problem.dtype == KvDType::bf16;
  if (tiles) tolerance = 1e-2;
  const Heads& heads = problem.heads;
  const std::int64_t width = heads.kv * heads.dim;
  const auto stored = [&](const Floats& x, std::int64_t at) {
    return as_stored(kernels, problem.dtype, x.data() + at, heads.dim);
  };
  for (std::int64_t h = 0; h < heads.kv * heads.group; ++h) {
    std::vector<specrt::reference::Vector> keys, values;
    for (std::int64_t p = 0; p < problem.length; ++p) {
      const std::int64_t at = p * width + h / heads.group * heads.dim;
      keys.push_back(stored(problem.keys, at));
      values.push_back(stored(problem.values, at));
    }
    const float* q = problem.q.data() + h * heads.dim;
    const auto query = tiles ? as_stored(kernels, KvDType::bf16, q, heads.dim)
                             : specrt::reference::Vector(q, q + heads.dim);
    const auto expected = specrt::reference::attention(query, keys, values, problem.scale(),
                                                       problem.softcap, problem.window);
    for (std::int64_t d = 0; d < heads.dim; ++d) {
      CHECK_NEAR(out[h * heads.dim + d], expected[d], tolerance);
    }
  }
}

const std::int64_t kLengths[] = {1, 31, 32, 33, 64, 65, 100, 511, 512, 513, 1000, 1700};

void check_representations(const Kernels& kernels, const Problem& problem) {
  const std::int64_t length = problem.length;
  const Floats expected = problem.run(kernels, 16, length);
  check_against_reference(kernels, problem, expected, 4e-6);
  for (const std::int64_t block_size : {1, 4, 16, 32}) {
    if (tiny::kThinned && block_size != 4) continue;
    CHECK(problem.run(kernels, block_size, length) == expected);
    for (const std::int64_t in_table : {std::int64_t{0}, length / 2, length - 1, length - 33}) {
      if (in_table < 0) continue;
      CHECK(problem.run(kernels, block_size, in_table) == expected);
    }
  }
  CHECK(problem.run(kernels, 16, length, Tasks::by_head) == expected);
  for (const std::int64_t in_table : {length, length / 2, std::int64_t{0}}) {
    CHECK(problem.run(kernels, 16, in_table, Tasks::by_segment) == expected);
  }
}

}  // namespace

TEST(kernels_attention_by_length) {
  on_every_isa([](const Kernels& kernels) {
    for (const KvDType dtype : kKvDTypes) {
      for (const std::int64_t length : kLengths) {
        check_representations(kernels, Problem({2, 3, 64}, length, dtype));
      }
    }
  });
}

TEST(kernels_attention_by_shape) {
  on_every_isa([](const Kernels& kernels) {
    for (const KvDType dtype : kKvDTypes) {
      for (const std::int64_t dim : {16, 64, 80, 128}) {
        for (const std::int64_t group : {1, 2, 3, 8}) {
          if (tiny::kThinned && (group + dim) % 3 != 0) continue;
          for (const std::int64_t length : {33, 100}) {
            check_representations(kernels, Problem({2, group, dim}, length, dtype));
          }
        }
      }
      // Odd and extreme shapes.
      for (const Heads heads : {Heads{1, 4, 6}, Heads{1, 5, 72}, Heads{3, 7, 20}, Heads{1, 11, 33},
                                Heads{1, 64, 16}, Heads{1, 2, 512}}) {
        check_representations(kernels, Problem(heads, 70, dtype));
      }
      check_representations(kernels, Problem({1, 64, 512}, 520, dtype));
    }
  });
}

TEST(kernels_attention_windows_and_softcap) {
  on_every_isa([](const Kernels& kernels) {
    for (const KvDType dtype : kKvDTypes) {
      for (const std::int64_t window : {1, 5, 32, 40, 512, 600, 2000}) {
        if (tiny::kThinned && window % 5 == 0 && window != 40) continue;
        for (const std::int64_t length : {7, 100, 1100}) {
          Problem problem({2, 3, 20}, length, dtype);
          problem.window = window;
          problem.softcap = window % 2 == 0 ? 3.0f : 0.0f;
          // tanh is within a few roundings of 1, not of its value.
          const Floats expected = problem.run(kernels, 4, length);
          check_against_reference(kernels, problem, expected, 1e-5);
          CHECK(problem.run(kernels, 16, length / 2) == expected);
          CHECK(problem.run(kernels, 16, length, Tasks::by_segment) == expected);
        }
      }
    }
  });
}

TEST(kernels_attention_large_scores_and_rounding) {
  on_every_isa([](const Kernels& kernels) {
    Problem problem({1, 2, 64}, 700, KvDType::f32);
    for (float& value : problem.q) value *= 100.0f;
    check_against_reference(kernels, problem, problem.run(kernels, 16, 50), 1e-3);
    // A NaN among the keys is not lost, in whichever segment and precision.
    for (const KvDType dtype : kKvDTypes) {
      for (const std::int64_t position : {70, 600}) {
        Problem spoilt({1, 2, 64}, 700, dtype);
        spoilt.keys[static_cast<std::size_t>(position * 64 + 3)] =
            std::numeric_limits<float>::quiet_NaN();
        for (const Tasks tasks : {Tasks::one, Tasks::by_segment}) {
          const Floats out = spoilt.run(kernels, 16, 50, tasks);
          for (std::size_t i = 0; i + 1 < out.size(); ++i) CHECK(std::isnan(out[i]));
        }
      }
    }
  });
}

// What is stored as int8 is the nearest such vector, a function of its values alone.
TEST(kernels_kv_int8_vectors) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::int64_t dim : {1, 6, 16, 33, 64, 80, 512}) {
      for (const float size : {1e-35f, 1e-3f, 1.0f, 1e30f}) {
        const std::int64_t heads = 3;
        Floats x = random_floats(static_cast<std::size_t>(heads * dim), 5, size);
        std::fill(x.begin() + dim, x.begin() + 2 * dim, 0.0f);
        std::vector<std::int8_t> q(x.size() + 1, 99);
        Floats scales(heads + 1, -7.0f);
        kernels.store_kv(x.data(), heads, dim, KvDType::i8, q.data(), scales.data());
        CHECK_EQ(q.back(), 99);
        CHECK_EQ(scales.back(), -7.0f);
        for (std::int64_t h = 0; h < heads; ++h) {
          const auto alone = as_stored(kernels, KvDType::i8, x.data() + h * dim, dim);
          const auto expected =
              specrt::reference::quantised({x.begin() + h * dim, x.begin() + (h + 1) * dim});
          double most = 0.0;
          for (std::int64_t d = 0; d < dim; ++d) {
            most = std::max(most, std::abs(static_cast<double>(x[h * dim + d])));
          }
          for (std::int64_t d = 0; d < dim; ++d) {
            const double got = static_cast<double>(scales[h]) * q[h * dim + d];
            CHECK_EQ(got, alone[d]);
            // A tie may fall to either side; below 2^-100 everything is zero.
            const double tolerance = size < 1e-30f ? most : most / 127.0 * 1e-4;
            const double tie = std::abs(std::abs(got - x[h * dim + d]) - most / 254.0);
            if (tie > most * 1e-5) CHECK_NEAR(got, expected[d], tolerance);
          }
        }
        CHECK_EQ(scales[1], 0.0f);
      }
    }
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Floats x = random_floats(40, 6);
      x[17] = bad;
      for (const double value : as_stored(kernels, KvDType::i8, x.data(), 40)) {
        CHECK(std::isnan(value));
      }
    }
  });
}
