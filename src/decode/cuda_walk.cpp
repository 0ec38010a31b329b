#include "decode/cuda_walk.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "decode/fill_lists.h"
#include "specrt/error.h"

namespace specrt {
namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }
std::int64_t up(std::int64_t n) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
}
template <typename T>
std::int64_t size_of_all(std::int64_t count) {
  return aligned(count * static_cast<std::int64_t>(sizeof(T)));
}

// The most that a sequence's lists take.
std::int64_t pool_bytes(const Sequence& s, std::int64_t vocab) {
  const SamplingParams& p = s.params;
  std::int64_t words = 0;
  std::size_t longest = 0;
  for (const auto& word : p.bad_words) {
    words += std::ssize(word);
    longest = std::max(longest, word.size());
  }
  return size_of_all<cuda::SeenToken>(s.state.penalties() ? std::min(vocab, s.max_length) : 0) +
         size_of_all<cuda::TokenBias>(std::ssize(p.logit_bias)) +
         size_of_all<std::uint32_t>(std::ssize(s.state.allowed())) +
         size_of_all<cuda::BadWord>(std::ssize(p.bad_words)) + size_of_all<std::int32_t>(words) +
         size_of_all<std::int32_t>(static_cast<std::int64_t>(longest)) +
         size_of_all<std::int32_t>(std::ssize(p.stop_token_ids));
}

}  // namespace

CudaWalk::Places::Places(const Shape& shape)
    : rows(size_of_all<cuda::SamplingState>(shape.sequences)),
      pass_rows(rows + size_of_all<cuda::LogitRow>(shape.rows)),
      tokens(pass_rows + size_of_all<std::int32_t>(shape.rows)),
      parents(tokens + size_of_all<std::int32_t>(shape.sequences * shape.nodes)),
      pool(parents + size_of_all<std::int32_t>(shape.sequences * shape.nodes)) {}

CudaWalk::Shape CudaWalk::largest(std::int64_t max_batch_size, std::int64_t max_rows) {
  return {up(max_batch_size), CudaInputs::rows_of(max_rows), up(max_rows)};
}

/// Of the buffer that kernels alone use, part by part.
struct CudaWalk::Sizes {
  std::vector<std::int64_t> parts;
  Sizes(std::int64_t vocab, const Shape& largest) {
    constexpr std::int64_t kRows = CudaRunner::kLogitRows;
    const std::int64_t stride = (vocab + 3) / 4 * 4;
    const std::int64_t chunks = cuda::chunks_of(vocab);
    parts = {size_of_all<float>(kRows * stride),
             size_of_all<std::int32_t>(kRows * vocab),
             size_of_all<cuda::ChunkTop>(kRows * chunks),
             size_of_all<cuda::ChunkShare>(kRows * chunks),
             size_of_all<std::int32_t>(largest.rows),
             size_of_all<float>(largest.rows),
             size_of_all<std::int32_t>(largest.sequences * cuda::Verdict::size(largest.nodes)),
             size_of_all<std::int32_t>(largest.sequences * largest.nodes),
             size_of_all<std::int32_t>(largest.sequences)};
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const std::int64_t part : parts) sum += part;
    return sum;
  }
};

std::int64_t CudaWalk::bytes(std::int64_t vocab, std::int64_t max_batch_size,
                             std::int64_t max_rows) {
  const Shape most = largest(max_batch_size, max_rows);
  return Places(most).pool + Sizes(vocab, most).bytes();
}

std::int64_t CudaWalk::device_bytes() const {
  return static_cast<std::int64_t>(inputs_.size() + buffer_.size());
}

CudaWalk::CudaWalk(CudaRunner& runner, std::int64_t max_batch_size, std::int64_t max_rows)
    : runner_(runner), largest_(largest(max_batch_size, max_rows)) {
  const Sizes sizes(runner.vocab(), largest_);
  const auto room = static_cast<std::size_t>(Places(largest_).pool);
  runner_.enter();
  inputs_ = cuda::DeviceBuffer(room);
  staging_ = cuda::HostBuffer(room);
  buffer_ = cuda::DeviceBuffer(static_cast<std::size_t>(sizes.bytes()));
  verdicts_ = cuda::HostBuffer(static_cast<std::size_t>(sizes.parts[6]));
  graphs_ = std::make_unique<CudaGraphs<Shape>>();
  std::byte* at = buffer_.data();
  std::size_t part = 0;
  const auto take = [&]<typename T>(T*& out) {
    out = reinterpret_cast<T*>(at);
    at += sizes.parts[part++];
  };
  take(processed_);
  take(found_);
  take(tops_);
  take(shares_);
  take(choices_);
  take(logprobs_);
  take(device_verdicts_);
  take(path_);
  take(path_length_);
  const auto sequences = static_cast<std::size_t>(max_batch_size);
  sequences_.reserve(sequences);
  states_.reserve(sequences);
  rows_.reserve(static_cast<std::size_t>(largest_.rows));
  pass_rows_.reserve(static_cast<std::size_t>(largest_.rows));
}

void CudaWalk::make_room(Sequences live, Sequences preempted, const Sequence& added) {
  std::int64_t wanted = 0;
  const auto count = [&](const Sequence& s) {
    if (s.decides_on_device()) wanted += pool_bytes(s, runner_.vocab());
  };
  count(added);
  for (const auto& s : live) count(*s);
  for (const auto& s : preempted) count(*s);
  if (wanted <= pool_room_) return;
  wanted = std::max(wanted, 2 * pool_room_);
  runner_.enter();
  const auto room = static_cast<std::size_t>(Places(largest_).pool + wanted);
  cuda::DeviceBuffer inputs(room);
  cuda::HostBuffer staging(room);
  // Graphs read from where the old ones are.
  graphs_ = std::make_unique<CudaGraphs<Shape>>();
  inputs_ = std::move(inputs);
  staging_ = std::move(staging);
  pool_room_ = wanted;
}

void CudaWalk::begin() {
  sequences_.clear();
  states_.clear();
  rows_.clear();
  pass_rows_.clear();
  shape_ = {};
}

void CudaWalk::add(const Sequence& s) {
  const auto index = static_cast<std::int32_t>(sequences_.size());
  const auto nodes = static_cast<std::int32_t>(s.draft.size());
  const auto first = static_cast<std::int32_t>(rows_.size());
  sequences_.push_back(&s);
  const auto position = static_cast<std::int32_t>(s.length());
  rows_.push_back({index, -1, position, -1});
  pass_rows_.push_back(static_cast<std::int32_t>(s.root_row));
  for (std::int32_t node = 0; node < nodes; ++node) {
    const std::int32_t depth = s.draft.depths()[static_cast<std::size_t>(node)];
    rows_.push_back({index, node, position + depth, -1});
    pass_rows_.push_back(static_cast<std::int32_t>(s.tree_row + node));
  }
  cuda::SamplingState state;  // the rest is in its lists
  state.limit = static_cast<std::int32_t>(std::min<std::int64_t>(s.tokens_left(), INT32_MAX));
  state.root_row = first;
  state.nodes = nodes;
  states_.push_back(state);
  shape_.nodes = std::max(shape_.nodes, std::int64_t{nodes});
}

// Puts a list into the pool; where it will be on the device.
std::byte* CudaWalk::append(const void* from, std::size_t bytes) {
  const std::int64_t at = Places(shape_).pool + pool_used_;
  const std::int64_t end = pool_used_ + aligned(static_cast<std::int64_t>(bytes));
  if (end > pool_room_) {
    throw InternalError(expected_got(
        "sampling", "at most " + std::to_string(pool_room_) + " bytes of penalties and masks",
        std::to_string(end)));
  }
  if (bytes > 0) std::memcpy(staging_.data() + at, from, bytes);
  pool_used_ = end;
  return inputs_.data() + at;
}

void CudaWalk::launch() {
  runner_.enter();
  shape_.sequences = up(std::ssize(states_));
  shape_.rows = CudaInputs::rows_of(std::ssize(rows_));
  shape_.nodes = up(shape_.nodes);
  const Places places(shape_);
  std::byte* to = staging_.data();
  pool_used_ = 0;

  auto* rows = reinterpret_cast<cuda::LogitRow*>(to + places.rows);
  std::fill_n(rows, shape_.rows, cuda::LogitRow{});
  std::copy(rows_.begin(), rows_.end(), rows);
  auto* pass_rows = reinterpret_cast<std::int32_t*>(to + places.pass_rows);
  std::fill_n(pass_rows, shape_.rows, -1);
  std::copy(pass_rows_.begin(), pass_rows_.end(), pass_rows);
  auto* tokens = reinterpret_cast<std::int32_t*>(to + places.tokens);
  auto* parents = reinterpret_cast<std::int32_t*>(to + places.parents);
  for (std::size_t i = 0; i < sequences_.size(); ++i) {
    const Sequence& s = *sequences_[i];
    const auto first = static_cast<std::int64_t>(i) * shape_.nodes;
    std::copy(s.draft.tokens().begin(), s.draft.tokens().end(), tokens + first);
    std::copy(s.draft.parents().begin(), s.draft.parents().end(), parents + first);
    fill_lists(s.params, s.state, runner_.vocab(), {}, lists_);
    cuda::SamplingState state =
        lists_.packed([this](const void* from, std::size_t bytes) { return append(from, bytes); });
    state.limit = states_[i].limit;
    state.root_row = states_[i].root_row;
    state.nodes = states_[i].nodes;
    states_[i] = state;
  }
  auto* states = reinterpret_cast<cuda::SamplingState*>(to);
  std::fill_n(states, shape_.sequences, cuda::SamplingState{});
  std::copy(states_.begin(), states_.end(), states);

  const cuda::Stream stream = runner_.stream();
  cuda::copy_to_device(inputs_.data(), to, static_cast<std::size_t>(places.pool + pool_used_),
                       stream);
  if (shape_.rows > CudaInputs::kMostCaptured) {
    run(shape_);
  } else {
    graphs_->run(shape_, stream, [&](cuda::Stream) { run(shape_); });
  }
  const auto bytes =
      static_cast<std::size_t>(std::ssize(states_) * cuda::Verdict::size(shape_.nodes) * 4);
  cuda::copy_to_host(verdicts_.data(), device_verdicts_, bytes, stream);
}

void CudaWalk::run(const Shape& shape) {
  const Places places(shape);
  const std::byte* at = inputs_.data();
  const auto* states = reinterpret_cast<const cuda::SamplingState*>(at);
  const auto* rows = reinterpret_cast<const cuda::LogitRow*>(at + places.rows);
  const auto* pass_rows = reinterpret_cast<const std::int32_t*>(at + places.pass_rows);
  const cuda::DraftTrees trees = {reinterpret_cast<const std::int32_t*>(at + places.tokens),
                                  reinterpret_cast<const std::int32_t*>(at + places.parents),
                                  shape.nodes};
  cuda::ProcessArgs process;
  process.logits = runner_.device_logits();
  process.processed = processed_;
  process.stride = runner_.logits_stride();
  process.vocab = runner_.vocab();
  process.states = states;
  process.trees = trees;
  cuda::ChooseArgs choose;
  choose.logits = process.logits;
  choose.processed = processed_;
  choose.stride = process.stride;
  choose.vocab = process.vocab;
  choose.chunks = cuda::chunks_of(process.vocab);
  choose.states = states;
  choose.tops = tops_;
  choose.shares = shares_;
  choose.found = found_;
  for (std::int64_t first = 0; first < shape.rows; first += CudaRunner::kLogitRows) {
    const std::int64_t count = std::min(CudaRunner::kLogitRows, shape.rows - first);
    runner_.make_logits(pass_rows + first, count);
    process.rows = choose.rows = rows + first;
    choose.choices = choices_ + first;
    choose.logprobs = logprobs_ + first;
    cuda::choose(process, choose, count, runner_.stream());
  }
  cuda::verify({states, trees, choices_, logprobs_, device_verdicts_, path_, path_length_},
               shape.sequences, runner_.stream());
}

CudaWalk::Verdict CudaWalk::verdict(std::size_t index) const {
  const auto* at = reinterpret_cast<const std::int32_t*>(verdicts_.data()) +
                   static_cast<std::int64_t>(index) * cuda::Verdict::size(shape_.nodes);
  Verdict out;
  out.end = static_cast<cuda::Walked>(at[0]);
  out.tokens = {at + cuda::Verdict::tokens(), static_cast<std::size_t>(at[1])};
  out.path = {at + cuda::Verdict::path(shape_.nodes), static_cast<std::size_t>(at[2])};
  return out;
}

}  // namespace specrt
