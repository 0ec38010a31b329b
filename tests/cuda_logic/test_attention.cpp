// Tree attention over paged keys and values: against the definition, and to the last bit the same
// however rows, trees and passes are put together.

#include <cmath>
#include <map>

#include "kernels/attention.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

struct Shape {
  int q_heads, kv_heads, dim;
  float softcap = 0.0f;
  int window = 0;
};

struct RowAt {
  int table_positions;
  std::vector<int> path;  // scratch slots
};

// One sequence's cache: committed positions in scattered blocks, scratch slots behind them.
template <typename T>
struct Cache {
  static constexpr int kShift = 3;
  static constexpr int kScratch = 96;

  Cache(const Shape& at, int positions, std::uint32_t seed) : shape(at) {
    blocks = (positions >> kShift) + 1;
    for (int b = 0; b < blocks; ++b) table.push_back(b);
    std::shuffle(table.begin(), table.end(), std::mt19937(seed));
    scratch = blocks << kShift;
    const int slots = scratch + kScratch;
    width = at.kv_heads * at.dim;
    // What holds nothing is NaN, so that reading it shows.
    k.assign(static_cast<std::size_t>(slots) * width, T{0x7FFF});
    v = k;
    for (int p = 0; p < positions; ++p) set(slot_of(p), seed + 1000 + p);
    for (int s = 0; s < kScratch; ++s) set(scratch + s, seed + 9000 + s);
  }
  int slot_of(int position) const {
    return (table[position >> kShift] << kShift) + position % (1 << kShift);
  }
  void set(int slot, std::uint32_t seed) {
    const Floats x = random_floats(2 * width, seed);
    for (int i = 0; i < width; ++i) {
      k[slot * width + i] = from_float<T>(x[i]);
      v[slot * width + i] = from_float<T>(x[width + i]);
    }
  }
  void copy(int from, int to) {
    std::copy_n(k.begin() + from * width, width, k.begin() + to * width);
    std::copy_n(v.begin() + from * width, width, v.begin() + to * width);
  }

  Shape shape;
  int blocks = 0, scratch = 0, width = 0;
  std::vector<std::int32_t> table;
  std::vector<T> k, v;
};

// Output of the rows, whose queries are q [rows, q_heads * dim], in units of at most `most` rows.
template <typename T, int kDim>
std::vector<T> attend(const Cache<T>& cache, const std::vector<RowAt>& rows, const Floats& q,
                      int most, bool all_orders = false) {
  const Shape& at = cache.shape;
  const std::int64_t width = at.q_heads * at.dim;
  std::vector<AttentionRow> device_rows;
  std::vector<std::int32_t> paths;
  std::vector<AttentionUnit> units;
  int segments = 1;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    device_rows.push_back({0, rows[r].table_positions, static_cast<int>(paths.size()),
                           static_cast<int>(rows[r].path.size())});
    paths.insert(paths.end(), rows[r].path.begin(), rows[r].path.end());
    if (r % most == 0) units.push_back({static_cast<int>(r), 0});
    ++units.back().rows;
    const int total = rows[r].table_positions + static_cast<int>(rows[r].path.size());
    segments = std::max(segments, total / kSegment + 1);
  }
  units.push_back({0, 0});  // as a captured graph pads
  std::vector<T> out(rows.size() * width);
  const Floats nans(rows.size() * segments * at.q_heads * (at.dim + 2), NAN);
  Floats partials = nans;
  AttentionArgs args;
  args.q = q.data();
  args.q_stride = width;
  args.out = out.data();
  args.out_stride = width;
  args.k = cache.k.data();
  args.v = cache.v.data();
  args.rows = device_rows.data();
  args.units = units.data();
  args.tables = cache.table.data();
  args.paths = paths.data();
  args.path_base = cache.scratch;
  args.block_shift = Cache<T>::kShift;
  args.q_heads = at.q_heads;
  args.kv_heads = at.kv_heads;
  args.head_dim = at.dim;
  args.scale = 1.0f / std::sqrt(static_cast<float>(at.dim));
  args.softcap = at.softcap;
  args.window = at.window;
  args.segments = segments;
  args.partials = partials.data();
  std::vector<T> first;
  for (const Order order : {Order::forward, Order::backward, Order::shuffled}) {
    std::memset(static_cast<void*>(out.data()), 0xFF, out.size() * sizeof(T));
    partials = nans;
    run_grid<Attention<T, kDim>>({std::ssize(units), at.kv_heads, segments}, args, order);
    run_grid<AttentionCombine<T>>({std::ssize(rows), at.q_heads}, args, order);
    if (first.empty()) first = out;
    CHECK(same_bits(first, out));
    if (!all_orders) break;
  }
  return out;
}

template <typename T>
void check_reference(const Cache<T>& cache, const std::vector<RowAt>& rows, const Floats& q,
                     const std::vector<T>& out) {
  const Shape& at = cache.shape;
  const int group = at.q_heads / at.kv_heads;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::vector<int> slots;
    for (int p = 0; p < rows[r].table_positions; ++p) slots.push_back(cache.slot_of(p));
    for (const int s : rows[r].path) slots.push_back(cache.scratch + s);
    for (int head = 0; head < at.q_heads; ++head) {
      Vector query;
      for (int d = 0; d < at.dim; ++d) {
        query.push_back(to_float(from_float<T>(q[(r * at.q_heads + head) * at.dim + d])));
      }
      std::vector<Vector> keys, values;
      for (const int slot : slots) {
        const std::size_t from =
            static_cast<std::size_t>(slot) * cache.width + head / group * at.dim;
        Vector key, value;
        for (int d = 0; d < at.dim; ++d) {
          key.push_back(to_float(cache.k[from + d]));
          value.push_back(to_float(cache.v[from + d]));
        }
        keys.push_back(key);
        values.push_back(value);
      }
      const Vector want = specrt::reference::attention(
          query, keys, values, 1.0 / std::sqrt(static_cast<double>(at.dim)), at.softcap, at.window);
      for (int d = 0; d < at.dim; ++d) {
        const double got = to_float(out[(r * at.q_heads + head) * at.dim + d]);
        CHECK_NEAR(got, want[d], tolerance<T>(want[d], 3));
      }
    }
  }
}

template <typename T>
std::vector<T> row_of(const std::vector<T>& out, std::size_t row, std::size_t width) {
  return {out.begin() + row * width, out.begin() + (row + 1) * width};
}

// A root, a bushy tree whose deepest path crosses a chunk's end, and the bits of each row alone.
template <typename T, int kDim>
void check_tree(const Shape& at, int positions, bool all_orders) {
  Cache<T> cache(at, positions, 7);
  const std::vector<int> parents = {-1, 0, 0, 1, 3, 2, 4};
  std::vector<RowAt> rows = {{positions, {}}};
  for (std::size_t node = 0; node < parents.size(); ++node) {
    RowAt row{positions, {}};
    for (int n = static_cast<int>(node); n >= 0; n = parents[n])
      row.path.insert(row.path.begin(), 11 + 3 * n);
    rows.push_back(row);
  }
  const std::size_t width = at.q_heads * at.dim;
  const Floats q = random_floats(rows.size() * width, 3);
  const int most = static_cast<int>(attention_rows(at.q_heads / at.kv_heads));
  CHECK(most > 0);
  const std::vector<T> out = attend<T, kDim>(cache, rows, q, most, all_orders);
  check_reference(cache, rows, q, out);
  for (std::size_t r = 0; r < rows.size(); r += 3) {
    const Floats own(q.begin() + r * width, q.begin() + (r + 1) * width);
    CHECK(same_bits(attend<T, kDim>(cache, {rows[r]}, own, 1), row_of(out, r, width)));
  }
  // The deepest path as committed positions, and with a part of it committed.
  const RowAt& deepest = rows.back();
  const Floats own(q.end() - width, q.end());
  Cache<T> longer(at, positions + static_cast<int>(deepest.path.size()), 7);
  for (int p = 0; p < positions; ++p) longer.set(longer.slot_of(p), 7 + 1000 + p);
  for (std::size_t i = 0; i < deepest.path.size(); ++i) {
    longer.copy(longer.scratch + deepest.path[i], longer.slot_of(positions + static_cast<int>(i)));
  }
  for (std::size_t taken : {deepest.path.size(), deepest.path.size() - 1, std::size_t{1}}) {
    RowAt row{positions + static_cast<int>(taken),
              {deepest.path.begin() + static_cast<int>(taken), deepest.path.end()}};
    CHECK(same_bits(attend<T, kDim>(longer, {row}, own, 1), row_of(out, rows.size() - 1, width)));
  }
}

TEST(cuda_attention_of_trees) {
  check_tree<Bf16, 64>({4, 2, 64}, 126, true);   // across a chunk's end
  check_tree<Half, 64>({9, 3, 40}, 61, false);   // groups of 3, of which a tile holds 5
  check_tree<Bf16, 128>({5, 1, 72}, 3, false);   // hardly any context
  check_tree<Bf16, 64>({20, 1, 64}, 64, false);  // a row takes two tiles
  check_tree<Half, 64>({2, 2, 8, 5.0f}, 63, false);
}

TEST(cuda_attention_across_segments) {
  check_tree<Bf16, 64>({2, 1, 24}, 510, true);
  check_tree<Half, 64>({2, 1, 64}, 1101, false);
}

TEST(cuda_attention_with_windows) {
  check_tree<Bf16, 64>({2, 1, 32, 0.0f, 5}, 62, true);
  check_tree<Bf16, 64>({2, 1, 32, 0.0f, 100}, 560, false);
}

// A target and a draft model of twice its query heads: units hold as many rows as either's heads
// leave room for.
TEST(cuda_attention_of_other_head_counts) {
  check_tree<Bf16, 64>({4, 2, 16}, 30, false);
  check_tree<Bf16, 64>({8, 2, 16}, 30, false);
}

TEST(cuda_attention_of_wide_heads) { check_tree<Bf16, 256>({2, 1, 256}, 70, false); }

// Prompt rows see what came before them, in whatever chunks the prompt comes.
TEST(cuda_attention_of_prompts) {
  const Shape at{4, 2, 64};
  constexpr int kPositions = 75;
  const Cache<Bf16> cache(at, kPositions, 5);
  std::vector<RowAt> rows;
  for (int p = 40; p < kPositions; ++p) rows.push_back({p + 1, {}});
  const std::size_t width = at.q_heads * at.dim;
  const Floats q = random_floats(rows.size() * width, 3);
  const auto out = attend<Bf16, 64>(cache, rows, q, 32);
  check_reference(cache, rows, q, out);
  CHECK(same_bits(out, attend<Bf16, 64>(cache, rows, q, 7)));
}

// Blocks that a window has left behind may be gone from the table.
TEST(cuda_attention_does_not_read_before_the_window) {
  const Shape at{2, 1, 32, 0.0f, 20};
  Cache<Bf16> cache(at, 90, 5);
  const Floats q = random_floats(64, 3);
  const std::vector<RowAt> rows = {{90, {}}};
  const auto out = attend<Bf16, 64>(cache, rows, q, 1);
  for (int block = 0; block < 70 / 8; ++block) {
    std::fill_n(cache.k.begin() + cache.slot_of(8 * block) * cache.width, 8 * cache.width,
                Bf16{0x7FC0});
    std::fill_n(cache.v.begin() + cache.slot_of(8 * block) * cache.width, 8 * cache.width,
                Bf16{0x7FC0});
    cache.table[block] = -1000000;
  }
  CHECK(same_bits(out, attend<Bf16, 64>(cache, rows, q, 1)));
}

// A rejected branch with NaN in it harms nobody else.
TEST(cuda_attention_keeps_branches_apart) {
  const Shape at{4, 1, 64};
  Cache<Bf16> cache(at, 60, 5);
  const std::vector<RowAt> rows = {{60, {}}, {60, {1}}, {60, {2}}, {60, {2, 3}}};
  const std::size_t width = at.q_heads * at.dim;
  const Floats q = random_floats(rows.size() * width, 3);
  const auto out = attend<Bf16, 64>(cache, rows, q, 16);
  for (int i = 0; i < cache.width; ++i) {
    cache.k[(cache.scratch + 1) * cache.width + i] = Bf16{0x7FC0};
    cache.v[(cache.scratch + 1) * cache.width + i] = Bf16{0x7FC0};
  }
  const auto after = attend<Bf16, 64>(cache, rows, q, 16);
  for (const std::size_t r : {0, 2, 3})
    CHECK(same_bits(row_of(out, r, width), row_of(after, r, width)));
  CHECK(std::isnan(to_float(after[width])));
}

}  // namespace
