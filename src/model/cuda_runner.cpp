#include "model/cuda_runner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "model/runner.h"
#include "specrt/cuda.h"
#include "specrt/error.h"

namespace specrt {
namespace {

// Bytes of attention's partial results; more are made in several launches.
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// What stands between a block and the residual stream is nothing but an addition.
bool adds_simply(const ModelConfig& c) {
  return c.norm_placement == NormPlacement::pre && c.residual_scale == 1.0;
}

}  // namespace

std::int64_t cuda_free_memory(int device) {
  cuda::use_device(device);
  return cuda::device_room().free;
}

/// Where everything of the workspace is; the same for the constructor and for workspace_bytes().
struct CudaRunner::Sizes {
  std::int64_t rows, table, local_table, x, normed, qkv, attended, activated, block, partials,
      workspace, head_in, logits, tops, planes, moves, features, embedded, joined, parts, shares,
      found, likeliest;
  std::int64_t stride, most_partials;

  Sizes(const ModelConfig& c, const RunnerOptions& o, const KvLayout& layout) {
    rows = CudaInputs::rows_of(o.max_rows);
    const std::int64_t length = Runner::resolve_max_model_len(c, o.max_model_len);
    table = length * static_cast<std::int64_t>(c.rope_inv_freq.size()) * 4;
    local_table = c.rope_local_inv_freq.empty() ? 0 : table;
    const std::int64_t q_width = c.num_heads * c.head_dim;
    const std::int64_t qkv_width = q_width + 2 * c.num_kv_heads * c.head_dim;
    x = rows * c.hidden_size * 4;
    normed = rows * cuda::padded_columns(c.hidden_size) * 2;
    qkv = rows * qkv_width * 4;
    attended = rows * cuda::padded_columns(q_width) * 2;
    activated = rows * cuda::padded_columns(c.intermediate_size) * 2;
    block = adds_simply(c) ? 0 : x;
    // A graph's segments are filled up to a power of two.
    const auto segments = static_cast<std::int64_t>(std::bit_ceil(
        static_cast<std::uint64_t>((length + cuda::kSegment - 1) / cuda::kSegment + 1)));
    const std::int64_t of_one = c.num_heads * (c.head_dim + 2) * 4;
    const std::int64_t unit = cuda::attention_rows(c.num_heads / c.num_kv_heads);
    most_partials = std::min(rows * segments, std::max(unit * segments, kPartialBytes / of_one));
    partials = most_partials * of_one;
    const auto needed = [&](std::int64_t n, std::int64_t k, std::int64_t count) {
      cuda::DeviceMatrix matrix;
      matrix.n = n;
      matrix.k = k;
      return cuda::workspace_bytes(matrix, count);
    };
    const std::int64_t gated = cuda::gate_row(c.intermediate_size - 1) + 2 * cuda::kGateRows;
    workspace = std::max({needed(qkv_width, c.hidden_size, rows),
                          needed(c.hidden_size, q_width, rows), needed(gated, c.hidden_size, rows),
                          needed(c.hidden_size, c.intermediate_size, rows),
                          needed(c.vocab_size, c.hidden_size, kLogitRows)});
    head_in = kLogitRows * cuda::padded_columns(c.hidden_size) * 2;
    stride = (c.vocab_size + 3) / 4 * 4;
    logits = kLogitRows * stride * 4;
    tops = kLogitRows * cuda::chunks_of(c.vocab_size) *
           static_cast<std::int64_t>(sizeof(cuda::ChunkTop));
    planes = 0;
    for (const KvGroup& group : layout.groups) {
      planes += static_cast<std::int64_t>(group.layers.size()) * 2 *
                static_cast<std::int64_t>(sizeof(void*));
    }
    moves = static_cast<std::int64_t>(kMostMoves);
    features = o.features.count() * x;
    embedded = joined = parts = likeliest = 0;
    const HeadConfig& head = c.head;
    const std::int64_t most = head.kind == HeadKind::none ? o.most_likely : kMostLikely;
    const std::int64_t chunks = most > 0 ? kLogitRows * cuda::chunks_of(c.vocab_size) : 0;
    shares = chunks * static_cast<std::int64_t>(sizeof(cuda::LikelyShare));
    found = chunks * most * static_cast<std::int64_t>(sizeof(cuda::LikelyToken));
    if (head.kind == HeadKind::none) return;
    const std::int64_t read = head.feature_parts * head.feature_size;
    const bool fused = head.kind == HeadKind::fused;
    embedded = fused ? 0 : x;
    joined = rows * cuda::padded_columns(head_inputs(c)) * 2;
    parts = head.input_norm && head.part_norms ? rows * read * 4 : 0;
    workspace =
        std::max({workspace, needed(c.hidden_size, fused ? c.hidden_size + read : read, rows),
                  needed(qkv_width, fused ? c.hidden_size : 2 * c.hidden_size, rows)});
    likeliest = kLogitRows * kMostLikely * static_cast<std::int64_t>(sizeof(cuda::LikelyToken));
  }

  /// Calls take(bytes) for each part, in order.
  template <typename Take>
  void each(const Take& take) const {
    for (const std::int64_t bytes :
         {table,    table,     local_table,   local_table,     x,         normed,   qkv,
          attended, activated, block,         partials,        workspace, head_in,  logits,
          tops,     planes,    2 * moves * 8, (moves + 1) * 4, features,  embedded, joined,
          parts,    shares,    found,         likeliest}) {
      take(aligned(bytes));
    }
    take(aligned(kLogitRows * 4));
    take(aligned(kLogitRows * static_cast<std::int64_t>(sizeof(cuda::LogitRow))));
    take(aligned(static_cast<std::int64_t>(sizeof(cuda::SamplingState))));
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    each([&](std::int64_t part) { sum += part; });
    return sum;
  }
};

std::int64_t CudaRunner::workspace_bytes(const ModelConfig& config, const RunnerOptions& options,
                                         const KvLayout& layout) {
  return Sizes(config, options, layout).bytes() +
         CudaInputs::bytes(layout, options.max_rows, options.max_batch_size,
                           Runner::longest_in_blocks(config, options),
                           config.head.kind != HeadKind::none) +
         StateCopies::device_bytes();
}

namespace {

// Those of the target that a draft head shares.
std::shared_ptr<const CudaWeights> shared_weights(const Model& model, const Model& target,
                                                  int device) {
  const HeadConfig& head = model.config().head;
  const Precision precision = model.precision();
  const bool own = head.kind == HeadKind::none || (head.own_embedding && head.own_lm_head);
  // What it shares, its own kernels read.
  if (!own && cuda_type_of(precision) != cuda_type_of(target.precision())) {
    throw UnsupportedError(expected_got(
        "dtype", "a draft head and its target both in float16 or neither, with device 'cuda'",
        std::string(name_of(precision)) + " with a target in " + name_of(target.precision())));
  }
  return own ? nullptr : CudaWeights::of(target, device);
}

}  // namespace

CudaRunner::CudaRunner(const Model& model, const RunnerOptions& options, const KvLayout& layout,
                       int device, const Model& target)
    : config_(model.config()),
      device_((cuda::use_device(device), device)),
      type_(cuda_type_of(model.precision())),
      layout_(layout),
      max_model_len_(Runner::resolve_max_model_len(config_, options.max_model_len)),
      max_rows_(CudaInputs::rows_of(options.max_rows)),
      wanted_(options.features),
      weights_(CudaWeights::of(model, device)),
      target_weights_(shared_weights(model, target, device)),
      embedding_of_(config_.head.kind != HeadKind::none && !config_.head.own_embedding
                        ? target_weights_.get()
                        : weights_.get()),
      lm_head_(config_.head.kind != HeadKind::none && !config_.head.own_lm_head
                   ? target_weights_->head()
                   : weights_->head()),
      stream_(options.stream != nullptr ? options.stream : std::make_shared<cuda::OwnStream>()),
      cache_(static_cast<std::size_t>(layout.bytes())),
      inputs_(layout, options.max_rows, options.max_batch_size,
              Runner::longest_in_blocks(config_, options), config_.num_heads / config_.num_kv_heads,
              config_.head.kind != HeadKind::none),
      copies_(device) {
  const ModelConfig& c = config_;
  wanted_.check(c.num_layers);
  const Sizes sizes(c, options, layout);
  buffer_ = cuda::DeviceBuffer(static_cast<std::size_t>(sizes.bytes()));
  std::vector<std::byte*> parts;
  std::byte* at = buffer_.data();
  sizes.each([&](std::int64_t bytes) {
    parts.push_back(at);
    at += bytes;
  });
  auto part = parts.begin();
  const auto take = [&]<typename T>(T*& out) { out = reinterpret_cast<T*>(*part++); };
  const auto take_any = [&](void*& out) { out = *part++; };
  take(cos_);
  take(sin_);
  take(local_cos_);
  take(local_sin_);
  take(x_);
  take_any(normed_);
  take(qkv_);
  take_any(attended_);
  take_any(activated_);
  take(block_);
  take(partials_);
  take(workspace_);
  take_any(head_in_);
  take(logits_);
  take(tops_);
  device_planes_ = reinterpret_cast<std::byte**>(*part++);
  take(moves_at_);
  take(identity_);
  take(features_);
  take(embedded_);
  take_any(joined_);
  take(parts_);
  take(shares_);
  take(found_);
  take(likeliest_);
  take(logit_rows_);
  take(plain_rows_);
  take(plain_state_);
  most_partials_ = sizes.most_partials;
  logits_stride_ = sizes.stride;

  // The planes, and a list of them for the kernel that moves slots.
  planes_.resize(static_cast<std::size_t>(2 * c.num_layers));
  group_of_.resize(static_cast<std::size_t>(c.num_layers));
  std::vector<std::byte*> listed;
  at = cache_.data();
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    plane_begin_.push_back(std::ssize(listed));
    const std::int64_t slots = group.num_blocks * layout_.block_size + layout_.scratch_slots;
    for (const std::int64_t layer : group.layers) {
      group_of_[static_cast<std::size_t>(layer)] = static_cast<std::int64_t>(g);
      for (std::size_t p = 0; p < 2; ++p) {
        planes_[static_cast<std::size_t>(2 * layer) + p] = at;
        listed.push_back(at);
        at += slots * group.planes[p].bytes_per_slot();
      }
    }
  }

  moves_.reserve(kMostMoves);
  moves_staging_ = cuda::HostBuffer(2 * kMostMoves * sizeof(std::int64_t));
  host_rows_ = cuda::HostBuffer(kLogitRows * sizeof(std::int32_t));
  host_logits_ =
      cuda::HostBuffer(static_cast<std::size_t>(std::max(sizes.logits, sizes.likeliest)));

  // What never changes.
  const auto send = [&](void* to, const void* from, std::int64_t bytes) {
    cuda::copy_to_device(to, from, static_cast<std::size_t>(bytes), stream());
    wait();
  };
  send(device_planes_, listed.data(),
       std::ssize(listed) * static_cast<std::int64_t>(sizeof(void*)));
  std::vector<std::int32_t> identity(kMostMoves + 1);
  for (std::size_t i = 0; i <= kMostMoves; ++i) identity[i] = static_cast<std::int32_t>(i);
  send(identity_, identity.data(), std::ssize(identity) * 4);
  const std::vector<cuda::LogitRow> plain(static_cast<std::size_t>(kLogitRows), {0, -1, 0, -1});
  send(plain_rows_, plain.data(),
       std::ssize(plain) * static_cast<std::int64_t>(sizeof(cuda::LogitRow)));
  const cuda::SamplingState neutral;
  send(plain_state_, &neutral, static_cast<std::int64_t>(sizeof neutral));
  fill_tables(c.rope_inv_freq, c.rope_scale, cos_, sin_);
  if (c.rope_local_inv_freq.empty()) {
    local_cos_ = cos_;
    local_sin_ = sin_;
  } else {
    fill_tables(c.rope_local_inv_freq, 1.0, local_cos_, local_sin_);
  }
}

void CudaRunner::fill_tables(const std::vector<float>& factors, double scale, float* cos,
                             float* sin) {
  const auto pairs = static_cast<std::int64_t>(factors.size());
  std::vector<float> values(static_cast<std::size_t>(2 * max_model_len_ * pairs));
  float* const sines = values.data() + max_model_len_ * pairs;
  rope_tables(factors, scale, max_model_len_, values.data(), sines);
  const auto bytes = static_cast<std::size_t>(max_model_len_ * pairs * 4);
  cuda::copy_to_device(cos, values.data(), bytes, stream());
  cuda::copy_to_device(sin, sines, bytes, stream());
  wait();
}

CudaRunner::~CudaRunner() {
  try {
    enter();
    wait();        // for copies out of what is freed now
  } catch (...) {  // a device that is lost has nothing under way
  }
}

MemoryUse CudaRunner::memory() const {
  MemoryUse use;
  use.weights = weights_->bytes();
  use.kv_cache = layout_.bytes();
  use.workspace = static_cast<std::int64_t>(buffer_.size()) + inputs_.device_bytes() +
                  StateCopies::device_bytes();
  return use;
}

void CudaRunner::move(std::span<const KvCache::Move> moves) {
  for (const KvCache::Move& one : moves) {
    const KvGroup& group = layout_.groups[static_cast<std::size_t>(one.group)];
    const bool scratch = one.from >= group.num_blocks * layout_.block_size;
    for (std::int64_t i = 0; i < one.count; ++i) {
      if (moves_.size() == kMostMoves) flush_moves();
      moves_.push_back({one.group, one.from + i, one.to + i, scratch});
    }
  }
}

// In runs that may be made at once: out of drafts' slots into blocks, which never meet; or one
// block's copy, behind which its source may be written.
void CudaRunner::flush_moves() {
  for (std::size_t first = 0; first < moves_.size();) {
    const Moving& a = moves_[first];
    std::size_t last = first + 1;
    while (last < moves_.size() && moves_[last].group == a.group &&
           moves_[last].scratch == a.scratch &&
           (a.scratch || (moves_[last].from - a.from == moves_[last].to - a.to &&
                          moves_[last].from / layout_.block_size == a.from / layout_.block_size))) {
      ++last;
    }
    copy_slots(first, last - first);
    first = last;
  }
  moves_.clear();
}

void CudaRunner::copy_slots(std::size_t first, std::size_t count) {
  enter();
  moves_sent_.wait();
  auto* staged = reinterpret_cast<std::int64_t*>(moves_staging_.data());
  for (std::size_t i = 0; i < count; ++i) {
    staged[i] = moves_[first + i].from;
    staged[count + i] = moves_[first + i].to;
  }
  cuda::copy_to_device(moves_at_, staged, 2 * count * sizeof(std::int64_t), stream());
  moves_sent_.record(stream());
  const auto group = static_cast<std::size_t>(moves_[first].group);
  cuda::CommitArgs args;
  args.planes = reinterpret_cast<void* const*>(device_planes_) + plane_begin_[group];
  args.path = identity_;
  args.path_length = identity_ + kMostMoves;  // no fewer than there are
  args.node_slots = moves_at_;
  args.next_slots = moves_at_ + count;
  args.most_nodes = static_cast<std::int64_t>(count);
  args.bytes_of_slot = layout_.groups[group].planes[0].bytes_per_slot();
  cuda::commit(args, 1, std::ssize(layout_.groups[group].layers) * 2, stream());
}

void CudaRunner::poison(const KvCache& cache) {
  enter();
  flush_moves();
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const std::vector<bool> filled = cache.filled_slots(static_cast<std::int64_t>(g));
    const KvGroup& group = layout_.groups[g];
    for (std::size_t begin = 0; begin < filled.size(); ++begin) {
      if (filled[begin]) continue;
      std::size_t end = begin;
      while (end < filled.size() && !filled[end]) ++end;
      for (const std::int64_t layer : group.layers) {
        for (std::int64_t p = 0; p < 2; ++p) {
          const auto bytes =
              static_cast<std::size_t>(group.planes[static_cast<std::size_t>(p)].bytes_per_slot());
          cuda::fill(plane(layer, p) + begin * bytes, 0xFF, (end - begin) * bytes, stream());
        }
      }
      begin = end;
    }
  }
}

void CudaRunner::make_logits(const std::int32_t* rows, std::int64_t count) {
  const ModelConfig& c = config_;
  cuda::RmsNormArgs norm;
  norm.x = x_;
  norm.rows = rows;
  norm.weight = weights_->norm();
  norm.out = head_in_;
  norm.x_stride = c.hidden_size;
  norm.out_stride = cuda::padded_columns(c.hidden_size);
  norm.width = c.hidden_size;
  norm.eps = static_cast<float>(c.norm_eps);
  cuda::rms_norm(type_, norm, count, stream());
  product(lm_head_, nullptr, head_in_, count, logits_, logits_stride_, cuda::After::store);
  if (c.logits_scale == 1.0 && c.final_softcap <= 0.0) return;
  cuda::finish_logits({logits_, logits_stride_, c.vocab_size, static_cast<float>(c.logits_scale),
                       static_cast<float>(c.final_softcap)},
                      count, stream());
}

namespace {

void check_rows(std::size_t count) {
  if (count > static_cast<std::size_t>(CudaRunner::kLogitRows)) {
    throw InternalError(expected_got("logits",
                                     "at most " + std::to_string(CudaRunner::kLogitRows) + " rows",
                                     std::to_string(count)));
  }
}

}  // namespace

void CudaRunner::make_logits(std::span<const std::int64_t> rows) {
  enter();
  check_rows(rows.size());
  make_logits(send_rows(rows), std::ssize(rows));
}

std::span<const float> CudaRunner::logits(std::span<const std::int64_t> rows) {
  make_logits(rows);
  return bring_logits(std::ssize(rows));
}

const std::int32_t* CudaRunner::send_rows(std::span<const std::int64_t> rows) {
  const std::int64_t first = rows.empty() ? 0 : rows.front();
  bool follow = first + std::ssize(rows) <= static_cast<std::int64_t>(kMostMoves);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    follow = follow && rows[i] == first + static_cast<std::int64_t>(i);
  }
  if (follow) return identity_ + first;
  rows_sent_.wait();
  auto* staged = reinterpret_cast<std::int32_t*>(host_rows_.data());
  std::transform(rows.begin(), rows.end(), staged,
                 [](std::int64_t row) { return static_cast<std::int32_t>(row); });
  cuda::copy_to_device(logit_rows_, staged, rows.size() * 4, stream());
  rows_sent_.record(stream());
  return logit_rows_;
}

// Rows follow each other without a gap.
std::span<const float> CudaRunner::bring_logits(std::int64_t count) {
  cuda::copy_to_host(host_logits_.data(), logits_,
                     static_cast<std::size_t>(count * logits_stride_ * 4), stream());
  wait();
  auto* out = reinterpret_cast<float*>(host_logits_.data());
  for (std::int64_t row = 1; row < count && logits_stride_ != vocab(); ++row) {
    std::memmove(out + row * vocab(), out + row * logits_stride_,
                 static_cast<std::size_t>(vocab()) * 4);
  }
  return {out, static_cast<std::size_t>(count * vocab())};
}

void CudaRunner::best(std::span<const std::int64_t> rows, std::span<cpu::ArgMax> out) {
  enter();
  check_rows(rows.size());
  const std::int64_t count = std::ssize(rows);
  make_logits(send_rows(rows), count);
  cuda::ChooseArgs args;
  args.logits = logits_;
  args.stride = logits_stride_;
  args.vocab = vocab();
  args.chunks = cuda::chunks_of(vocab());
  args.rows = plain_rows_;
  args.states = plain_state_;
  args.tops = tops_;
  cuda::find_tops(args, count, stream());
  cuda::copy_to_host(host_logits_.data(), tops_,
                     static_cast<std::size_t>(count * args.chunks) * sizeof(cuda::ChunkTop),
                     stream());
  wait();
  const auto* tops = reinterpret_cast<const cuda::ChunkTop*>(host_logits_.data());
  for (std::int64_t row = 0; row < count; ++row) {
    cuda::ChunkTop top = tops[row * args.chunks];
    for (std::int64_t i = 1; i < args.chunks; ++i) {
      cuda::FindTops::take(top, tops[row * args.chunks + i]);
    }
    const bool finite = top.bad == 0 && std::isfinite(top.top);
    out[static_cast<std::size_t>(row)] = {top.id, top.top, finite};
  }
}

}  // namespace specrt
