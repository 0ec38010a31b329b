// Attention: against its definition, and the same bits however positions are stored.

#include <algorithm>
#include <limits>

#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::cpu::AttentionArgs;
using specrt::cpu::AttentionRow;

namespace {

struct Heads {
  std::int64_t kv, group, dim;
};

/// One token's query and the keys and values of its positions, stored as a test asks.
struct Problem {
  Problem(Heads heads_, std::int64_t length_, DType dtype_)
      : heads(heads_), length(length_), dtype(dtype_) {
    const std::int64_t width = heads.kv * heads.dim;
    q = random_floats(static_cast<std::size_t>(width * heads.group), 21);
    keys = random_floats(static_cast<std::size_t>(length * width), 22);
    values = random_floats(static_cast<std::size_t>(length * width), 23);
    if (dtype == DType::bf16) {
      keys = rounded_to_bf16(keys);
      values = rounded_to_bf16(values);
    }
  }

  /// Positions before `table_positions` through a shuffled block table, the others through slots.
  Floats run(const Kernels& kernels, std::int64_t block_size, std::int64_t table_positions,
             bool by_task = false) const {
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

    const std::size_t bytes = specrt::size_of(dtype);
    const Floats poison(static_cast<std::size_t>(slots * width),
                        std::numeric_limits<float>::quiet_NaN());
    std::vector<std::byte> k(poison.size() * bytes), v(poison.size() * bytes);
    kernels.store(poison.data(), slots * width, dtype, k.data());
    kernels.store(poison.data(), slots * width, dtype, v.data());
    for (std::int64_t p = 0; p < length; ++p) {
      const std::int64_t slot = p < table_positions
                                    ? table[p / block_size] * block_size + p % block_size
                                    : path[p - table_positions];
      const std::size_t at = static_cast<std::size_t>(slot * width) * bytes;
      kernels.store(keys.data() + p * width, width, dtype, k.data() + at);
      kernels.store(values.data() + p * width, width, dtype, v.data() + at);
    }

    Floats out(q.size() + 1, -7.0f);
    AttentionRow row;
    row.q = q.data();
    row.out = out.data();
    row.table = table.data();
    row.table_positions = table_positions;
    row.path = path.data();
    row.path_length = length - table_positions;
    AttentionArgs args;
    args.k = k.data();
    args.v = v.data();
    args.kv_dtype = dtype;
    args.block_size = block_size;
    args.q_heads = heads.kv * heads.group;
    args.kv_heads = heads.kv;
    args.head_dim = heads.dim;
    args.scale = scale();
    args.rows = &row;
    if (by_task) {
      for (std::int64_t task = heads.kv - 1; task >= 0; --task) {
        kernels.attention(args, task, task + 1);
      }
    } else {
      kernels.attention(args, 0, heads.kv);
    }
    CHECK_EQ(out.back(), -7.0f);
    return out;
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(heads.dim)); }

  Heads heads;
  std::int64_t length;
  DType dtype;
  Floats q, keys, values;
};

specrt::reference::Vector slice(const Floats& x, std::int64_t at, std::int64_t n) {
  return {x.begin() + at, x.begin() + at + n};
}

void check_against_reference(const Problem& problem, const Floats& out, double tolerance) {
  const Heads& heads = problem.heads;
  const std::int64_t width = heads.kv * heads.dim;
  for (std::int64_t h = 0; h < heads.kv * heads.group; ++h) {
    std::vector<specrt::reference::Vector> keys, values;
    for (std::int64_t p = 0; p < problem.length; ++p) {
      const std::int64_t at = p * width + h / heads.group * heads.dim;
      keys.push_back(slice(problem.keys, at, heads.dim));
      values.push_back(slice(problem.values, at, heads.dim));
    }
    const auto expected = specrt::reference::attention(slice(problem.q, h * heads.dim, heads.dim),
                                                       keys, values, problem.scale());
    for (std::int64_t d = 0; d < heads.dim; ++d) {
      CHECK_NEAR(out[h * heads.dim + d], expected[d], tolerance);
    }
  }
}

const std::int64_t kLengths[] = {1, 31, 32, 33, 64, 65, 100, 1000};

void check_representations(const Kernels& kernels, const Problem& problem) {
  const std::int64_t length = problem.length;
  const Floats expected = problem.run(kernels, 16, length);
  check_against_reference(problem, expected, 4e-6);
  for (const std::int64_t block_size : {1, 4, 16, 32}) {
    CHECK(problem.run(kernels, block_size, length) == expected);
    for (const std::int64_t in_table : {std::int64_t{0}, length / 2, length - 1, length - 33}) {
      if (in_table < 0) continue;
      CHECK(problem.run(kernels, block_size, in_table) == expected);
    }
  }
  CHECK(problem.run(kernels, 16, length, true) == expected);
}

}  // namespace

TEST(kernels_attention_by_length) {
  on_every_isa([](const Kernels& kernels) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::int64_t length : kLengths) {
        check_representations(kernels, Problem({2, 3, 64}, length, dtype));
      }
    }
  });
}

TEST(kernels_attention_by_shape) {
  on_every_isa([](const Kernels& kernels) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::int64_t dim : {16, 64, 80, 128}) {
        for (const std::int64_t group : {1, 2, 3, 8}) {
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
    }
  });
}

TEST(kernels_attention_large_scores_and_rounding) {
  on_every_isa([](const Kernels& kernels) {
    Problem problem({1, 2, 64}, 100, DType::f32);
    for (float& value : problem.q) value *= 100.0f;
    check_against_reference(problem, problem.run(kernels, 16, 50), 1e-3);
    // A NaN among the keys is not lost.
    problem.keys[70 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    const Floats out = problem.run(kernels, 16, 50);
    for (std::size_t i = 0; i + 1 < out.size(); ++i) CHECK(std::isnan(out[i]));
  });
}
