#include "model/cuda_inputs.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "specrt/error.h"

namespace specrt {
namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Sections of a header of so many rows and units, in order.
std::int64_t header_bytes(std::int64_t groups, std::int64_t rows, std::int64_t units, bool states) {
  return 2 * aligned(rows * 4) + aligned(groups * rows * 8) +
         aligned(groups * rows * static_cast<std::int64_t>(sizeof(cuda::AttentionRow))) +
         aligned(units * static_cast<std::int64_t>(sizeof(cuda::AttentionUnit))) +
         (states ? 2 * rows * static_cast<std::int64_t>(sizeof(float*)) : 0);
}

// Entries of all block tables and paths that a pass can have.
std::int64_t pool_entries(const KvLayout& layout, std::int64_t max_batch_size,
                          std::int64_t longest_in_blocks) {
  const std::int64_t tables =
      static_cast<std::int64_t>(layout.groups.size()) * max_batch_size * (longest_in_blocks + 1);
  return tables + layout.scratch_slots * std::min(layout.scratch_slots, CudaInputs::kMostDepth);
}

}  // namespace

std::int64_t CudaInputs::rows_of(std::int64_t rows) {
  if (rows > kMostCaptured) return rows;
  // Steps of a half from 8 on: at most a third of the rows are padding.
  const auto whole = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows)));
  const std::int64_t between = whole / 4 * 3;
  return whole >= 16 && rows <= between ? between : whole;
}

std::int64_t CudaInputs::bytes(const KvLayout& layout, std::int64_t max_rows,
                               std::int64_t max_batch_size, std::int64_t longest_in_blocks,
                               bool states) {
  const std::int64_t rows = rows_of(max_rows);
  return header_bytes(static_cast<std::int64_t>(layout.groups.size()), rows, rows, states) +
         4 * pool_entries(layout, max_batch_size, longest_in_blocks);
}

CudaInputs::CudaInputs(const KvLayout& layout, std::int64_t max_rows, std::int64_t max_batch_size,
                       std::int64_t longest_in_blocks, std::int64_t group_heads, bool states)
    : groups_(static_cast<std::int64_t>(layout.groups.size())),
      unit_rows_(cuda::attention_rows(group_heads)),
      states_(states),
      pool_room_(pool_entries(layout, max_batch_size, longest_in_blocks)) {
  const auto size =
      static_cast<std::size_t>(bytes(layout, max_rows, max_batch_size, longest_in_blocks, states));
  device_ = cuda::DeviceBuffer(size);
  for (cuda::HostBuffer& one : staging_) one = cuda::HostBuffer(size);
  for (const KvGroup& group : layout.groups) windows_.push_back(group.window);
  host_units_.reserve(static_cast<std::size_t>(rows_of(max_rows)));
}

void CudaInputs::lay_out() {
  positions_ = aligned(shape_.rows * 4);
  slots_ = 2 * positions_;
  rows_ = slots_ + aligned(groups_ * shape_.rows * 8);
  units_ = rows_ +
           aligned(groups_ * shape_.rows * static_cast<std::int64_t>(sizeof(cuda::AttentionRow)));
  hidden_ = units_ + aligned(shape_.units * static_cast<std::int64_t>(sizeof(cuda::AttentionUnit)));
  pool_ = header_bytes(groups_, shape_.rows, shape_.units, states_);
}

void CudaInputs::send(const PassRows& pass, const KvCache& cache, cuda::Stream stream) {
  const auto row_of = [](std::int64_t row) { return static_cast<std::size_t>(row); };
  // Units: rows of one sequence beside each other, as many as a block takes.
  host_units_.clear();
  for (std::int64_t row = 0; row < pass.rows;) {
    std::int64_t end = row + 1;
    while (end < pass.rows && end - row < unit_rows_ &&
           pass.owners[row_of(end)] == pass.owners[row_of(row)]) {
      ++end;
    }
    host_units_.push_back({static_cast<std::int32_t>(row), static_cast<std::int32_t>(end - row)});
    row = end;
  }
  // The most segments that a unit of any group spans.
  std::int64_t segments = 1;
  for (const cuda::AttentionUnit& unit : host_units_) {
    for (const std::int64_t window : windows_) {
      std::int64_t first = INT64_MAX;
      std::int64_t end = 0;
      for (std::int64_t row = unit.first_row; row < unit.first_row + unit.rows; ++row) {
        const std::int64_t total = pass.positions[row_of(row)] + 1;
        const std::int64_t gone = window > 0 && total > window ? total - window : 0;
        first = std::min(first, gone / cuda::kSegment);
        end = std::max(end, (total + cuda::kSegment - 1) / cuda::kSegment);
      }
      segments = std::max(segments, end - first);
    }
  }
  shape_.rows = rows_of(pass.rows);
  const bool captured = shape_.rows <= kMostCaptured;
  const auto up = [](std::int64_t n) {
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
  };
  const auto units = static_cast<std::int64_t>(host_units_.size());
  shape_.units = captured ? std::min(up(units), shape_.rows) : units;
  shape_.segments = captured ? up(segments) : segments;
  lay_out();

  turn_ = 1 - turn_;
  sent_[turn_].wait();
  std::byte* to = staging_[turn_].data();
  const auto section = [&]<typename T>(std::int64_t offset, std::int64_t count, T rest) {
    T* first = reinterpret_cast<T*>(to + offset);
    std::fill(first, first + count, rest);
    return first;
  };
  // Padding: no token, no slot to write to, nothing to attend to.
  std::int32_t* tokens = section(0, shape_.rows, std::int32_t{-1});
  std::copy_n(pass.tokens.begin(), pass.rows, tokens);
  std::int32_t* positions = section(positions_, shape_.rows, std::int32_t{0});
  std::copy_n(pass.positions.begin(), pass.rows, positions);
  std::int64_t* slots = section(slots_, groups_ * shape_.rows, std::int64_t{-1});
  cuda::AttentionRow* rows = section(rows_, groups_ * shape_.rows, cuda::AttentionRow{});
  cuda::AttentionUnit* unit_list = section(units_, shape_.units, cuda::AttentionUnit{});
  std::copy(host_units_.begin(), host_units_.end(), unit_list);
  if (states_) {
    const float** hidden = section(hidden_, 2 * shape_.rows, static_cast<const float*>(nullptr));
    std::copy(pass.hidden.begin(), pass.hidden.end(), hidden);
    std::copy(pass.outputs.begin(), pass.outputs.end(), hidden + shape_.rows);
  }

  auto* pool = reinterpret_cast<std::int32_t*>(to + pool_);
  std::int64_t used = 0;
  const auto append = [&](std::span<const std::int32_t> values) {
    if (used + std::ssize(values) > pool_room_) {
      throw CapacityError(expected_got(
          "pass", "at most " + std::to_string(pool_room_) + " blocks and ancestors of draft nodes",
          "more"));
    }
    std::copy(values.begin(), values.end(), pool + used);
    used += std::ssize(values);
    return static_cast<std::int32_t>(used - std::ssize(values));
  };
  const std::int32_t paths = append(pass.paths);  // at the pool's beginning: see grow()
  for (std::int64_t g = 0; g < groups_; ++g) {
    std::int32_t table = 0;
    for (std::int64_t row = 0; row < pass.rows; ++row) {
      const std::size_t r = row_of(row);
      slots[g * shape_.rows + row] = pass.slots[static_cast<std::size_t>(g)][r];
      if (row == 0 || pass.owners[r] != pass.owners[r - 1]) {
        table = append(cache.table(pass.owners[r], g));
      }
      rows[g * shape_.rows + row] = {
          table, static_cast<std::int32_t>(pass.positions[r] + 1 - pass.path_length[r]),
          static_cast<std::int32_t>(paths + pass.path_begin[r]),
          static_cast<std::int32_t>(pass.path_length[r])};
    }
  }
  cuda::copy_to_device(device_.data(), to, static_cast<std::size_t>(pool_ + used * 4), stream);
  sent_[turn_].record(stream);
}

void CudaInputs::grow(const LevelGrowth& growth, cuda::Stream stream) const {
  cuda::GrowArgs args = growth.args;
  args.tokens = reinterpret_cast<std::int32_t*>(device_.data());
  if (states_) args.hidden = reinterpret_cast<const float**>(device_.data() + hidden_);
  args.paths = reinterpret_cast<std::int32_t*>(device_.data() + pool_);
  cuda::grow_level(args, growth.drafts, stream);
}

}  // namespace specrt
