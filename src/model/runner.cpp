#include "model/runner.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "cpu/dispatch.h"
#include "cpu/thread_team.h"
#include "specrt/error.h"

namespace specrt {

std::int64_t Runner::resolve_max_model_len(const ModelConfig& config, std::int64_t asked) {
  if (asked == 0) return config.max_position_embeddings;
  if (asked < 1 || asked > config.max_position_embeddings) {
    throw InvalidArgument(expected_got(
        "max_model_len", "from 1 to the model's " + std::to_string(config.max_position_embeddings),
        std::to_string(asked)));
  }
  return asked;
}

std::int64_t Runner::longest_in_blocks(const ModelConfig& config, const RunnerOptions& options) {
  const std::int64_t length = resolve_max_model_len(config, options.max_model_len);
  return (length + options.block_size - 1) / options.block_size;
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
  layout.scratch_slots = std::max<std::int64_t>(options.max_rows, options.scratch_slots);
  layout.prefix_reuse = options.prefix_reuse;
  const KvDType kv_dtype = kv_dtype_from_name(options.kv_cache_dtype, dtype);
  const KvPlane plane{config.num_kv_heads, config.head_dim, kv_dtype};
  const KvPlane scales{config.num_kv_heads, 1, KvDType::f32};
  // One group for each different window, the widest (all positions) first.
  std::map<std::int64_t, KvGroup> groups;
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    const std::int64_t window = config.window_of(i);
    KvGroup& group = groups[window == 0 ? INT64_MIN : -window];
    group.window = window;
    group.layers.push_back(i);
    group.planes = {plane, plane};
    if (kv_dtype == KvDType::i8) group.planes = {plane, plane, scales, scales};
  }
  for (auto& [order, group] : groups) layout.groups.push_back(std::move(group));
  if (options.kv_cache_bytes > 0) {
    const std::int64_t longest = longest_in_blocks(config, options);
    // More than every sequence at full length is of use only to keep what may come again.
    std::int64_t most = longest * options.max_batch_size;
    if (layout.prefix_reuse) most += options.kv_cache_bytes / layout.bytes_per_block();
    const auto bytes_with = [&](std::int64_t blocks) {
      layout.set_blocks(blocks, options.max_batch_size, longest);
      return layout.bytes();
    };
    if (bytes_with(1) > options.kv_cache_bytes) {
      throw CapacityError(expected_got(
          "kv_cache_bytes",
          "at least " + std::to_string(bytes_with(1)) + " (scratch slots and one block)",
          std::to_string(options.kv_cache_bytes)));
    }
    std::int64_t fits = 1;
    while (fits < most) {
      const std::int64_t middle = fits + (most - fits + 1) / 2;
      if (bytes_with(middle) <= options.kv_cache_bytes) {
        fits = middle;
      } else {
        most = middle - 1;
      }
    }
    layout.set_blocks(fits, options.max_batch_size, longest);
  }
  return layout;
}

namespace {

// Everything the workspace holds, in floats; the constructor takes the same amounts in order.
struct WorkspaceSizes {
  std::int64_t table, local_table, x, normed, embedded, qkv, attended, partials, activated,
      block_out, prepared, head_in, logits;
  WorkspaceSizes(const ModelConfig& c, const RunnerOptions& o) {
    const std::int64_t rows = o.max_rows;
    table = Runner::resolve_max_model_len(c, o.max_model_len) *
            static_cast<std::int64_t>(c.rope_inv_freq.size());
    local_table = c.rope_local_inv_freq.empty() ? 0 : table;
    x = rows * c.hidden_size;
    normed = rows * std::max(c.hidden_size, head_inputs(c));
    embedded = c.head.kind == HeadKind::beside ? x : 0;
    qkv = rows * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
    attended = rows * c.num_heads * c.head_dim;
    partials = most_partials(c, o) * cpu::partial_floats(c.num_heads, c.head_dim);
    activated = rows * c.intermediate_size;
    const bool simple = c.norm_placement == NormPlacement::pre && c.residual_scale == 1.0;
    block_out = simple ? 0 : x;
    const std::int64_t widest =
        std::max({c.hidden_size, c.num_heads * c.head_dim, c.intermediate_size, head_inputs(c)});
    prepared = cpu::prepared_bytes(std::max<std::int64_t>(rows, Runner::kLogitRows), widest) / 4;
    head_in = Runner::kLogitRows * c.hidden_size;
    logits = Runner::kLogitRows * ((c.vocab_size + cpu::kPanel - 1) / cpu::kPanel * cpu::kPanel);
  }
  static std::int64_t most_partials(const ModelConfig& c, const RunnerOptions& o) {
    return AttentionPlan::most_partials(o.max_rows,
                                        Runner::resolve_max_model_len(c, o.max_model_len));
  }
};

std::int64_t aligned(std::int64_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

std::int64_t Runner::workspace_bytes(const ModelConfig& config, const RunnerOptions& options) {
  if (cuda_device_of(options.device)) {
    return CudaRunner::workspace_bytes(config, options, kv_layout(config, DType::bf16, options));
  }
  const WorkspaceSizes s(config, options);
  options.features.check(config.num_layers);
  std::int64_t floats = 2 * aligned(s.table) + 2 * aligned(s.local_table);
  floats += options.features.count() * aligned(s.x);
  for (const std::int64_t size : {s.x, s.normed, s.embedded, s.qkv, s.attended, s.partials,
                                  s.activated, s.block_out, s.prepared, s.head_in, s.logits}) {
    floats += aligned(size);
  }
  return floats * 4;
}

Runner::Runner(const Model& model, const RunnerOptions& options, const Model& target)
    : model_(model),
      target_(target),
      max_model_len_(resolve_max_model_len(model.config(), options.max_model_len)),
      max_rows_(options.max_rows),
      wanted_(options.features),
      poison_(options.poison),
      team_(options.team != nullptr ? options.team : std::make_shared<ThreadTeam>()),
      pool_(&team_->impl().pool),
      kernels_(&cpu::kernels_of(cpu_isa_from_name(options.cpu_isa))),
      kv_dtype_(kv_dtype_from_name(options.kv_cache_dtype, activation_dtype(model.precision()))),
      cache_(kv_layout(model.config(), activation_dtype(model.precision()), options)),
      storage_(cuda_device_of(options.device) ? KvLayout{} : cache_.layout()) {
  const ModelConfig& c = model_.config();
  find_shared();
  const auto rows = static_cast<std::size_t>(max_rows_);
  tokens_.resize(rows);
  positions_.resize(rows);
  scratch_index_.resize(rows);
  const auto nodes = static_cast<std::size_t>(cache_.layout().scratch_slots);
  node_path_begin_.resize(nodes);
  node_path_length_.resize(nodes);
  owners_.resize(rows);
  path_begin_.resize(rows);
  path_length_.resize(rows);
  slots_.assign(cache_.layout().groups.size(), std::vector<std::int32_t>(rows));
  paths_.reserve(nodes * 16);
  moves_.reserve(rows);
  const auto threads = static_cast<std::size_t>(pool_->size());
  best_.resize((threads + 1) * kLogitRows);
  candidates_.resize((threads + 1) * kLogitRows * kMaxCandidates);
  check_device(c, model.precision(), options);
  if (const std::optional<int> device = cuda_device_of(options.device)) {
    cuda_ = std::make_unique<CudaRunner>(model, options, cache_.layout(), *device, target);
    if (c.head.kind != HeadKind::none) found_.resize(kLogitRows * kMaxCandidates);
    if (wanted_.any()) captured_rows_.reserve(rows);
    return;
  }
  buffer_ = Buffer::allocate(workspace_bytes(c, options), "workspace");
  const WorkspaceSizes s(c, options);
  cos_ = work(s.table);
  sin_ = work(s.table);
  local_cos_ = work(s.local_table);
  local_sin_ = work(s.local_table);
  x_ = work(s.x);
  normed_ = work(s.normed);
  embedded_ = work(s.embedded);
  qkv_ = work(s.qkv);
  attended_ = work(s.attended);
  partials_ = work(s.partials);
  activated_ = work(s.activated);
  block_out_ = work(s.block_out);
  prepared_ = work(s.prepared);
  head_in_ = work(s.head_in);
  logits_ = work(s.logits);
  for (std::size_t i = 0; i < wanted_.layers.size(); ++i) features_.push_back(work(s.x));
  if (wanted_.normed) normed_features_ = work(s.x);
  rope_tables(c.rope_inv_freq, c.rope_scale, max_model_len_, cos_, sin_);
  if (c.rope_local_inv_freq.empty()) {
    local_cos_ = cos_;
    local_sin_ = sin_;
  } else {
    rope_tables(c.rope_local_inv_freq, 1.0, max_model_len_, local_cos_, local_sin_);
  }
  const auto& groups = cache_.layout().groups;
  attention_rows_.assign(groups.size(), std::vector<cpu::AttentionRow>(rows));
  group_of_.resize(static_cast<std::size_t>(c.num_layers));
  AttentionPlan::Shape shape;
  shape.q_heads = c.num_heads;
  shape.kv_heads = c.num_kv_heads;
  shape.head_dim = c.head_dim;
  shape.max_partials = WorkspaceSizes::most_partials(c, options);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    shape.window = groups[g].window;
    attention_plans_.emplace_back(shape, max_rows_, pool_->size());
    for (const std::int64_t layer : groups[g].layers) {
      group_of_[static_cast<std::size_t>(layer)] = static_cast<std::int64_t>(g);
    }
  }
  if (wanted_.any()) captured_rows_.reserve(rows);
}

void Runner::require_cpu(const char* what) const {
  if (cuda_ == nullptr) return;
  throw UnsupportedError(expected_got("device", std::string("'cpu' for ") + what, "'cuda'"));
}

void Runner::apply_moves() {
  if (cuda_ != nullptr) {
    cuda_->move(moves_);
  } else {
    storage_.apply(moves_);
  }
}

void rope_tables(const std::vector<float>& factors, double scale, std::int64_t positions,
                 float* cos, float* sin) {
  const auto pairs = static_cast<std::int64_t>(factors.size());
  for (std::int64_t position = 0; position < positions; ++position) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      // The product in fp32, as the reference implementations have it; the rest in double.
      const float angle = static_cast<float>(position) * factors[static_cast<std::size_t>(i)];
      cos[position * pairs + i] = static_cast<float>(std::cos(double{angle}) * scale);
      sin[position * pairs + i] = static_cast<float>(std::sin(double{angle}) * scale);
    }
  }
}

float* Runner::work(std::int64_t floats) {
  float* at = reinterpret_cast<float*>(buffer_.data()) + used_;
  used_ += aligned(floats);
  return at;
}

MemoryUse Runner::memory() const {
  if (cuda_ != nullptr) return cuda_->memory();
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
  captured_rows_.clear();
  if (!poison_) return;
  if (cuda_ != nullptr) {
    cuda_->poison(cache_);
  } else {
    storage_.poison(cache_);
  }
}

std::int64_t Runner::add_committed(SequenceId id, std::span<const TokenId> tokens) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t start = cache_.length(id);
  if (rows_ + count > max_rows_ || start + count > max_model_len_) {
    throw CapacityError(expected_got(
        "pass",
        "at most " + std::to_string(max_rows_) + " rows and " + std::to_string(max_model_len_) +
            " positions",
        std::to_string(rows_ + count) + " rows, position " + std::to_string(start + count)));
  }
  moves_.clear();
  cache_.prepare(id, start + count, moves_);
  apply_moves();
  const std::int64_t first = rows_;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<std::size_t>(rows_++);
    tokens_[row] = tokens[static_cast<std::size_t>(i)];
    positions_[row] = static_cast<std::int32_t>(start + i);
    for (std::size_t g = 0; g < slots_.size(); ++g) {
      slots_[g][row] = cache_.slot(id, static_cast<std::int64_t>(g), start + i);
    }
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
  const std::int64_t root = positions_[static_cast<std::size_t>(rows_ - 1)];
  const auto scratch = static_cast<std::int32_t>(scratch_used_);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const std::int32_t parent = tree.parents()[node];
    place_node(id, tree.tokens()[node], root + tree.depths()[node],
               parent == DraftTree::kRoot ? -1 : scratch + parent);
  }
  return first;
}

void Runner::capture(std::int64_t first, std::int64_t count) {
  for (std::int64_t row = first; row < first + count; ++row) captured_rows_.push_back(row);
}

const float* Runner::captured(std::int64_t layer) const {
  const auto found = std::find(wanted_.layers.begin(), wanted_.layers.end(), layer);
  if (found == wanted_.layers.end()) {
    throw InternalError(expected_got("features", "a layer of the options", std::to_string(layer)));
  }
  if (cuda_ != nullptr) return cuda_->features(found - wanted_.layers.begin());
  return features_[static_cast<std::size_t>(found - wanted_.layers.begin())];
}

const float* Runner::captured_normed() const {
  return cuda_ != nullptr ? cuda_->features(std::ssize(wanted_.layers)) : normed_features_;
}

void Runner::check_nodes(std::int64_t count, std::int64_t position) const {
  if (rows_ + count > max_rows_ || scratch_used_ + count > cache_.layout().scratch_slots ||
      position >= max_model_len_) {
    throw CapacityError(expected_got("pass",
                                     "at most " + std::to_string(max_rows_) + " rows, " +
                                         std::to_string(cache_.layout().scratch_slots) +
                                         " nodes and " + std::to_string(max_model_len_) +
                                         " positions",
                                     std::to_string(count) + " more"));
  }
}

std::int64_t Runner::add_node(SequenceId id, TokenId token, std::int32_t parent) {
  const std::int64_t position =
      cache_.length(id) + (parent < 0 ? 0 : node_path_length_[static_cast<std::size_t>(parent)]);
  check_nodes(1, position);
  return place_node(id, token, position, parent);
}

std::int64_t Runner::add_level(SequenceId id, std::int64_t count, std::int64_t depth) {
  const std::int64_t position = cache_.length(id) + depth - 1;
  check_nodes(count, position);
  const std::int64_t first = rows_;
  for (std::int64_t i = 0; i < count; ++i) {
    // Who is above a node is not known: until then it stands for all of them.
    paths_.insert(paths_.end(), static_cast<std::size_t>(depth),
                  static_cast<std::int32_t>(scratch_used_));
    (void)place_row(id, -1, position, depth);
  }
  return first;
}

// A node's path is its parent's and itself.
std::int64_t Runner::place_node(SequenceId id, TokenId token, std::int64_t position,
                                std::int32_t parent) {
  std::int64_t path = 1;
  if (parent >= 0) {
    const auto above = static_cast<std::size_t>(parent);
    for (std::int64_t i = 0; i < node_path_length_[above]; ++i, ++path) {
      paths_.push_back(paths_[static_cast<std::size_t>(node_path_begin_[above] + i)]);
    }
  }
  paths_.push_back(static_cast<std::int32_t>(scratch_used_));
  return place_row(id, token, position, path);
}

std::int64_t Runner::place_row(SequenceId id, TokenId token, std::int64_t position,
                               std::int64_t path) {
  const auto row = static_cast<std::size_t>(rows_++);
  const auto scratch = static_cast<std::int32_t>(scratch_used_++);
  const auto node = static_cast<std::size_t>(scratch);
  node_path_begin_[node] = path_begin_[row] = std::ssize(paths_) - path;
  node_path_length_[node] = path_length_[row] = path;
  tokens_[row] = token;
  positions_[row] = static_cast<std::int32_t>(position);
  scratch_index_[row] = scratch;
  owners_[row] = id;
  for (std::size_t g = 0; g < slots_.size(); ++g) {
    slots_[g][row] = cache_.scratch_slot(static_cast<std::int64_t>(g), scratch);
  }
  return static_cast<std::int64_t>(row);
}

void Runner::advance(SequenceId id, std::int64_t count, std::span<const TokenId> tokens) {
  const std::int64_t length = cache_.length(id) + count;
  cache_.advance(id, length, length, tokens);
}

void Runner::advance_keeping(SequenceId id, std::int64_t count, std::int64_t held) {
  cache_.advance(id, cache_.length(id) + count, held);
}

void Runner::commit(SequenceId id, std::span<const std::int32_t> path,
                    std::span<const TokenId> tokens) {
  moves_.clear();
  cache_.commit(id, path, moves_, tokens);
  apply_moves();
}

}  // namespace specrt
