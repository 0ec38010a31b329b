#include "model/attention_plan.h"

#include <algorithm>

namespace specrt {

using cpu::AttentionRow;
using cpu::AttentionUnit;
using cpu::kAttentionSegment;

namespace {

std::int64_t length_of(const AttentionRow& row) { return row.table_positions + row.path_length; }

std::int64_t segments_of(std::int64_t length) {
  return (length + kAttentionSegment - 1) / kAttentionSegment;
}

}  // namespace

std::int64_t AttentionPlan::most_partials(std::int64_t max_rows, std::int64_t max_length) {
  const std::int64_t segments = segments_of(max_length);
  return segments < 2 ? 0 : std::min(kMostPartials, max_rows * segments);
}

AttentionPlan::AttentionPlan(const Shape& shape, std::int64_t max_rows, int threads)
    : shape_(shape), threads_(threads) {
  groups_.reserve(static_cast<std::size_t>(max_rows));
  // A group that is split needs a partial for each of its units at least.
  units_.reserve(static_cast<std::size_t>(max_rows + shape.max_partials));
  costs_.reserve(units_.capacity());
  shares_.resize(static_cast<std::size_t>(threads) + 1);
}

std::int64_t AttentionPlan::first_position(const AttentionRow& row) const {
  return shape_.window > 0 ? std::max<std::int64_t>(0, length_of(row) - shape_.window) : 0;
}

AttentionPlan::Group AttentionPlan::group_at(std::size_t first) const {
  const std::int64_t most =
      cpu::attention_rows_at_once(shape_.q_heads / shape_.kv_heads, shape_.head_dim);
  Group group;
  group.first_row = static_cast<std::int64_t>(first);
  group.first_segment = INT64_MAX;
  std::int64_t read_from = INT64_MAX;
  std::int64_t read_to = 0;
  for (std::size_t r = first; r < rows_.size() && group.rows < most; ++r) {
    const AttentionRow& row = rows_[r];
    if (row.table != rows_[first].table) break;
    ++group.rows;
    const std::int64_t from = first_position(row);
    const std::int64_t to = length_of(row);
    const std::int64_t begin = from / kAttentionSegment;
    group.first_segment = std::min(group.first_segment, begin);
    group.end_segment = std::max(group.end_segment, segments_of(to));
    group.partials += segments_of(to) - begin;
    group.cost += to - from;
    read_from = std::min(read_from, from);
    read_to = std::max(read_to, to);
  }
  // Bringing a position in costs about as much as one row's work on it.
  group.cost += read_to - read_from;
  return group;
}

void AttentionPlan::split(const Group& group, std::span<AttentionRow> rows) {
  for (AttentionRow& row : rows) {
    row.partial = partials_;
    partials_ += segments_of(length_of(row)) - first_position(row) / kAttentionSegment;
  }
  for (std::int64_t s = group.first_segment; s < group.end_segment; ++s) {
    std::int64_t cost = 0;
    for (const AttentionRow& row : rows) {
      const std::int64_t from = std::max(first_position(row), s * kAttentionSegment);
      const std::int64_t to = std::min(length_of(row), (s + 1) * kAttentionSegment);
      cost += std::max<std::int64_t>(0, to - from);
    }
    units_.push_back({group.first_row, group.rows, s});
    costs_.push_back(cost + std::min(cost, kAttentionSegment));
  }
}

void AttentionPlan::make(std::span<AttentionRow> rows) {
  rows_ = rows;
  groups_.clear();
  units_.clear();
  costs_.clear();
  partials_ = 0;
  std::int64_t all = 0;
  for (std::size_t r = 0; r < rows.size();) {
    groups_.push_back(group_at(r));
    all += groups_.back().cost * shape_.kv_heads;
    r += static_cast<std::size_t>(groups_.back().rows);
  }
  for (const Group& group : groups_) {
    const auto part = rows.subspan(static_cast<std::size_t>(group.first_row),
                                   static_cast<std::size_t>(group.rows));
    for (AttentionRow& row : part) row.partial = -1;
    // Tasks that are small beside a thread's share balance as they are.
    const bool large = group.cost * 4 * threads_ > all;
    if (threads_ > 1 && large && group.end_segment - group.first_segment > 1 &&
        partials_ + group.partials <= shape_.max_partials) {
      split(group, part);
    } else {
      units_.push_back({group.first_row, group.rows, -1});
      costs_.push_back(group.cost);
    }
  }
  share_out();
}

// Contiguous shares of about the same cost.
void AttentionPlan::share_out() {
  std::int64_t all = 0;
  for (const std::int64_t cost : costs_) all += cost * shape_.kv_heads;
  std::int64_t done = 0;
  std::size_t unit = 0;
  shares_[0] = 0;
  for (std::int64_t t = 1; t < threads_; ++t) {
    const std::int64_t goal = all / threads_ * t;
    while (unit < units_.size() && done + costs_[unit] * shape_.kv_heads <= goal) {
      done += costs_[unit++] * shape_.kv_heads;
    }
    std::int64_t task = static_cast<std::int64_t>(unit) * shape_.kv_heads;
    if (unit < units_.size()) {
      const std::int64_t cost = std::max<std::int64_t>(1, costs_[unit]);
      task += (goal - done + cost / 2) / cost;
    }
    shares_[static_cast<std::size_t>(t)] = task;
  }
  shares_[static_cast<std::size_t>(threads_)] =
      static_cast<std::int64_t>(units_.size()) * shape_.kv_heads;
}

void AttentionPlan::run(cpu::AttentionArgs args, const cpu::Kernels& kernels,
                        cpu::ThreadPool& pool) const {
  args.rows = rows_.data();
  args.units = units_.data();
  pool.parallel(threads_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const auto share = static_cast<std::size_t>(t);
      kernels.attention(args, shares_[share], shares_[share + 1]);
    }
  });
  if (partials_ == 0) return;
  const auto rows = static_cast<std::int64_t>(rows_.size());
  // Waking the others costs more than a few results do.
  if (partials_ * args.q_heads * args.head_dim < 65536) {
    kernels.attention_combine(args, 0, rows);
  } else {
    pool.parallel(rows, [&](std::int64_t begin, std::int64_t end) {
      kernels.attention_combine(args, begin, end);
    });
  }
}

}  // namespace specrt
