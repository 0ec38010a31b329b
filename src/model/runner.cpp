#include "model/runner.h"

#include <algorithm>
#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/thread_team.h"
#include "specrt/error.h"

namespace specrt {

std::int64_t Runner::resolve_max_model_len(const ModelConfig& config, std::int64_t asked) {
  if (asked == 0) return config.max_position_embeddings;
  if (asked < 1 || asked > config.max_position_embeddings) {
    throw InvalidArgument(expected_got(
        "max_model_len",
        "from 1 to the model's " + std::to_string(config.max_position_embeddings),
        std::to_string(asked)));
  }
  return asked;
}

KvLayout Runner::kv_layout(const ModelConfig& config, DType dtype, const RunnerOptions& options) {
  if (options.block_size < 1 || options.block_size > 65536) {
    throw InvalidArgument(
        expected_got("block_size", "from 1 to 65536", std::to_string(options.block_size)));
  }
  if (options.max_batch_size < 1) {
    throw InvalidArgument(
        expected_got("max_batch_size", "at least 1", std::to_string(options.max_batch_size)));
  }
  if (options.max_rows < options.max_batch_size || options.max_rows > 65536) {
    throw InvalidArgument(expected_got(
        "max_rows", "from max_batch_size = " + std::to_string(options.max_batch_size) + " to 65536",
        std::to_string(options.max_rows)));
  }
  KvLayout layout;
  layout.block_size = options.block_size;
  layout.scratch_slots = options.max_rows;
  KvGroup group;
  for (std::int64_t i = 0; i < config.num_layers; ++i) group.layers.push_back(i);
  const KvPlane plane{config.num_kv_heads, config.head_dim, dtype};
  group.planes = {plane, plane};
  layout.groups.push_back(group);
  if (options.kv_cache_bytes > 0) {
    const std::int64_t left = options.kv_cache_bytes - layout.scratch_bytes();
    layout.groups[0].num_blocks = std::max<std::int64_t>(0, left) / layout.bytes_per_block();
    if (layout.groups[0].num_blocks < 1) {
      throw CapacityError(expected_got(
          "kv_cache_bytes",
          "at least " + std::to_string(layout.scratch_bytes() + layout.bytes_per_block()) +
              " (scratch slots and one block)",
          std::to_string(options.kv_cache_bytes)));
    }
    // More than every sequence at full length could never be used.
    const std::int64_t len = resolve_max_model_len(config, options.max_model_len);
    const std::int64_t most =
        (len + options.block_size - 1) / options.block_size * options.max_batch_size;
    layout.groups[0].num_blocks = std::min(layout.groups[0].num_blocks, most);
  }
  return layout;
}

namespace {

// Everything the workspace holds, in floats; the constructor takes the same amounts in order.
struct WorkspaceSizes {
  std::int64_t table, x, normed, qkv, attended, gate_up, activated, head_in, logits;
  WorkspaceSizes(const ModelConfig& c, const RunnerOptions& o) {
    const std::int64_t rows = o.max_rows;
    table = Runner::resolve_max_model_len(c, o.max_model_len) * c.head_dim / 2;
    x = rows * c.hidden_size;
    normed = x;
    qkv = rows * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
    attended = rows * c.num_heads * c.head_dim;
    gate_up = rows * 2 * c.intermediate_size;
    activated = rows * c.intermediate_size;
    head_in = Runner::kLogitRows * c.hidden_size;
    logits = Runner::kLogitRows * c.vocab_size;
  }
};

std::int64_t aligned(std::int64_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

std::int64_t Runner::workspace_bytes(const ModelConfig& config, const RunnerOptions& options) {
  const WorkspaceSizes s(config, options);
  std::int64_t floats = 2 * aligned(s.table);
  for (const std::int64_t size :
       {s.x, s.normed, s.qkv, s.attended, s.gate_up, s.activated, s.head_in, s.logits}) {
    floats += aligned(size);
  }
  return floats * 4;
}

Runner::Runner(const Model& model, const RunnerOptions& options)
    : model_(model),
      max_model_len_(resolve_max_model_len(model.config(), options.max_model_len)),
      max_rows_(options.max_rows),
      team_(options.team != nullptr ? options.team : std::make_shared<ThreadTeam>()),
      pool_(&team_->impl().pool),
      kernels_(&cpu::kernels_of(cpu_isa_from_name(options.cpu_isa))),
      cache_(kv_layout(model.config(), model.dtype(), options)),
      storage_(cache_.layout()),
      buffer_(Buffer::allocate(workspace_bytes(model.config(), options), "workspace")) {
  const ModelConfig& c = model_.config();
  const WorkspaceSizes s(c, options);
  cos_ = work(s.table);
  sin_ = work(s.table);
  x_ = work(s.x);
  normed_ = work(s.normed);
  qkv_ = work(s.qkv);
  attended_ = work(s.attended);
  gate_up_ = work(s.gate_up);
  activated_ = work(s.activated);
  head_in_ = work(s.head_in);
  logits_ = work(s.logits);
  const std::int64_t half = c.head_dim / 2;
  for (std::int64_t position = 0; position < max_model_len_; ++position) {
    for (std::int64_t i = 0; i < half; ++i) {
      // The product in fp32, as the reference implementations have it; the rest in double.
      const float angle =
          static_cast<float>(position) * c.rope_inv_freq[static_cast<std::size_t>(i)];
      cos_[position * half + i] = static_cast<float>(std::cos(double{angle}) * c.rope_scale);
      sin_[position * half + i] = static_cast<float>(std::sin(double{angle}) * c.rope_scale);
    }
  }
  const auto rows = static_cast<std::size_t>(max_rows_);
  tokens_.resize(rows);
  positions_.resize(rows);
  slots_.resize(rows);
  scratch_index_.resize(rows);
  owners_.resize(rows);
  path_begin_.resize(rows);
  path_length_.resize(rows);
  attention_rows_.resize(rows);
  paths_.reserve(rows * 16);
  moves_.reserve(rows);
}

float* Runner::work(std::int64_t floats) {
  float* at = reinterpret_cast<float*>(buffer_.data()) + used_;
  used_ += aligned(floats);
  return at;
}

MemoryUse Runner::memory() const {
  MemoryUse use;
  use.weights = model_.weight_bytes();
  use.kv_cache = cache_.layout().bytes();
  use.workspace = buffer_.size();
  return use;
}

void Runner::begin() {
  rows_ = 0;
  scratch_used_ = 0;
  paths_.clear();
}

std::int64_t Runner::add_committed(SequenceId id, std::span<const TokenId> tokens) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t start = cache_.length(id);
  if (rows_ + count > max_rows_ || start + count > max_model_len_) {
    throw CapacityError(expected_got(
        "pass", "at most " + std::to_string(max_rows_) + " rows and " +
                    std::to_string(max_model_len_) + " positions",
        std::to_string(rows_ + count) + " rows, position " + std::to_string(start + count)));
  }
  moves_.clear();
  cache_.prepare(id, start + count, moves_);
  storage_.apply(moves_);
  const std::int64_t first = rows_;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<std::size_t>(rows_++);
    tokens_[row] = tokens[static_cast<std::size_t>(i)];
    positions_[row] = static_cast<std::int32_t>(start + i);
    slots_[row] = cache_.slot(id, 0, start + i);
    scratch_index_[row] = -1;
    owners_[row] = id;
    path_begin_[row] = 0;
    path_length_[row] = 0;
  }
  return first;
}

std::int64_t Runner::add_tree(SequenceId id, const DraftTree& tree) {
  const auto count = static_cast<std::int64_t>(tree.size());
  const std::int64_t first = rows_;
  if (rows_ == 0 || owners_[static_cast<std::size_t>(rows_ - 1)] != id) {
    throw InternalError("[pass] expected the draft's own sequence before it, got another");
  }
  if (rows_ + count > max_rows_) {
    throw CapacityError(expected_got("pass", "at most " + std::to_string(max_rows_) + " rows",
                                     std::to_string(rows_ + count)));
  }
  const std::int32_t root = positions_[static_cast<std::size_t>(rows_ - 1)];
  for (std::int64_t i = 0; i < count; ++i) {
    const auto node = static_cast<std::size_t>(i);
    const auto row = static_cast<std::size_t>(rows_++);
    tokens_[row] = tree.tokens()[node];
    positions_[row] = root + tree.depths()[node];
    const auto scratch = static_cast<std::int32_t>(scratch_used_++);
    scratch_index_[row] = scratch;
    slots_[row] = cache_.scratch_slot(0, scratch);
    owners_[row] = id;
    // The path is the parent's path and this node.
    const std::int32_t parent = tree.parents()[node];
    const auto begin = static_cast<std::int64_t>(paths_.size());
    if (parent != DraftTree::kRoot) {
      const auto parent_row = static_cast<std::size_t>(first + parent);
      for (std::int64_t j = 0; j < path_length_[parent_row]; ++j) {
        paths_.push_back(paths_[static_cast<std::size_t>(path_begin_[parent_row] + j)]);
      }
    }
    paths_.push_back(slots_[row]);
    path_begin_[row] = begin;
    path_length_[row] = static_cast<std::int64_t>(paths_.size()) - begin;
  }
  return first;
}

void Runner::advance(SequenceId id, std::int64_t count) {
  cache_.advance(id, cache_.length(id) + count);
}

void Runner::commit(SequenceId id, std::span<const std::int32_t> path) {
  moves_.clear();
  cache_.commit(id, path, moves_);
  storage_.apply(moves_);
}

}  // namespace specrt
