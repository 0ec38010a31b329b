#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace specrt {

/// How the attention of a pass is cut into tasks and shared out to threads. No result depends on
/// it: the kernel's order of operations is that of positions.
class AttentionPlan {
 public:
  /// Most results of single segments that a pass may ask for.
  static constexpr std::int64_t kMostPartials = 1024;
  /// As many as passes of so many rows could use.
  static std::int64_t most_partials(std::int64_t max_rows, std::int64_t max_length);

  struct Shape {
    std::int64_t q_heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t window = 0;
    std::int64_t max_partials = 0;
  };

  AttentionPlan() = default;
  AttentionPlan(const Shape& shape, std::int64_t max_rows, int threads);

  /// Lays out the tasks of a pass and says in `rows` which of them have partials.
  void make(std::span<cpu::AttentionRow> rows);
  std::span<const cpu::AttentionUnit> units() const { return units_; }

  /// Sets `out` of all rows. `args` is complete but for rows and units.
  void run(cpu::AttentionArgs args, const cpu::Kernels& kernels, cpu::ThreadPool& pool) const;

 private:
  struct Group {
    std::int64_t first_row = 0;
    std::int64_t rows = 0;
    std::int64_t first_segment = 0;
    std::int64_t end_segment = 0;
    std::int64_t partials = 0;  // that its rows would need
    std::int64_t cost = 0;      // of one kv head
  };
  Group group_at(std::size_t first) const;
  std::int64_t first_position(const cpu::AttentionRow& row) const;
  void split(const Group& group, std::span<cpu::AttentionRow> rows);
  void share_out();

  Shape shape_;
  std::int64_t threads_ = 1;
  std::span<cpu::AttentionRow> rows_;
  std::vector<Group> groups_;
  std::vector<cpu::AttentionUnit> units_;
  std::vector<std::int64_t> costs_;   // a unit each
  std::vector<std::int64_t> shares_;  // the first task of each thread, and the end
  std::int64_t partials_ = 0;
};

}  // namespace specrt
