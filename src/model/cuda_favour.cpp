#include "model/cuda_favour.h"

#include <algorithm>
#include <cstring>

#include "specrt/error.h"

namespace specrt {
namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

struct CudaFavour::Sizes {
  std::int64_t states, rows, tops, shares, sums, found, cuts, favoured, map, inverse;

  Sizes(const Shape& shape, std::int64_t target_vocab) {
    const auto of = [&](std::int64_t count, std::size_t size) {
      return aligned(count * static_cast<std::int64_t>(size));
    };
    states = of(shape.sequences, sizeof(cuda::SamplingState));
    rows = of(shape.lists * shape.rows, sizeof(cuda::LogitRow));
    const std::int64_t chunks = shape.slice * cuda::chunks_of(shape.vocab);
    tops = of(chunks, sizeof(cuda::ChunkTop));
    shares = of(chunks, sizeof(cuda::ChunkShare));
    sums = of(chunks, sizeof(float));
    found = of(shape.slice * shape.vocab, sizeof(std::int32_t));
    cuts = of(shape.slice, sizeof(cuda::Cut));
    favoured = of(chunks * shape.count, sizeof(cuda::FavouredToken));
    map = of(target_vocab > 0 ? shape.vocab : 0, sizeof(std::int32_t));
    inverse = of(target_vocab, sizeof(std::int32_t));
  }
  std::int64_t bytes() const {
    return states + rows + tops + shares + sums + found + cuts + favoured + map + inverse;
  }
};

bool CudaFavour::ranks(const SamplingParams& params) {
  return !params.draft_changes_text() && params.speculation.policy != Policy::adasd;
}

std::int64_t CudaFavour::device_bytes(const Shape& shape, std::int64_t target_vocab) {
  return Sizes(shape, target_vocab).bytes();
}

CudaFavour::CudaFavour(const Shape& shape, std::span<const TokenId> target_of_draft,
                       std::int64_t target_vocab, cuda::Stream stream)
    : shape_(shape), stream_(stream) {
  const Sizes sizes(shape, target_of_draft.empty() ? 0 : target_vocab);
  buffer_ = cuda::DeviceBuffer(static_cast<std::size_t>(sizes.bytes()));
  std::byte* at = buffer_.data();
  const auto take = [&]<typename T>(T*& out, std::int64_t bytes) {
    out = reinterpret_cast<T*>(at);
    at += bytes;
  };
  take(states_, sizes.states);
  take(rows_, sizes.rows);
  take(tops_, sizes.tops);
  take(shares_, sizes.shares);
  take(sums_, sizes.sums);
  take(found_, sizes.found);
  take(cuts_, sizes.cuts);
  take(favoured_, sizes.favoured);
  staging_ = cuda::HostBuffer(static_cast<std::size_t>(sizes.states + sizes.rows));
  rows_at_ = sizes.states;
  if (target_of_draft.empty()) return;
  draft_of_target_.assign(static_cast<std::size_t>(target_vocab), -1);
  for (std::size_t i = 0; i < target_of_draft.size(); ++i) {
    draft_of_target_[static_cast<std::size_t>(target_of_draft[i])] = static_cast<std::int32_t>(i);
  }
  std::int32_t* map = nullptr;
  std::int32_t* inverse = nullptr;
  take(map, sizes.map);
  take(inverse, sizes.inverse);
  static_assert(sizeof(TokenId) == sizeof(std::int32_t));
  cuda::copy_to_device(map, target_of_draft.data(), target_of_draft.size_bytes(), stream);
  cuda::copy_to_device(inverse, draft_of_target_.data(),
                       draft_of_target_.size() * sizeof(std::int32_t), stream);
  cuda::synchronize(stream);
  target_of_draft_ = map;
  device_draft_of_target_ = inverse;
}

bool CudaFavour::begin(std::span<const Sequence> sequences) {
  sequences_ = sequences;
  kinds_ = {.greedy = false};
  std::int64_t bytes = 0;
  for (const Sequence& one : sequences) {
    const cuda::SamplingState& state = one.lists->state;
    const bool greedy = !(state.temperature > 0.0f);
    kinds_.greedy = kinds_.greedy || greedy;
    kinds_.sampled = kinds_.sampled || !greedy;
    kinds_.filtered = kinds_.filtered || (!greedy && cuda::filters(state, shape_.vocab));
    kinds_.changed = kinds_.changed || !state.neutral;
    if (!state.neutral) bytes += one.lists->bytes();
  }
  if (!kinds_.wanted()) return true;
  if (bytes > list_bytes() && !grow_pool(bytes)) return false;
  auto* states = reinterpret_cast<cuda::SamplingState*>(staging_.data());
  std::size_t used = 0;
  const auto append = [&](const void* from, std::size_t size) {
    std::memcpy(pool_staging_.data() + used, from, size);
    const std::byte* const at = pool_.data() + used;
    used += LogitLists::aligned(size);
    return at;
  };
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const LogitLists& lists = *sequences[i].lists;
    states[i] = lists.state.neutral ? lists.state : lists.packed(append);
  }
  if (used > 0) cuda::copy_to_device(pool_.data(), pool_staging_.data(), used, stream_);
  cuda::copy_to_device(states_, states, sequences.size() * sizeof(cuda::SamplingState), stream_);
  return true;
}

bool CudaFavour::grow_pool(std::int64_t bytes) {
  if (bytes >= refused_bytes_) return false;
  for (const std::int64_t room : {std::max(bytes, 2 * list_bytes()), bytes}) {
    try {
      cuda::DeviceBuffer pool(static_cast<std::size_t>(room));
      pool_staging_ = cuda::HostBuffer(static_cast<std::size_t>(room));
      pool_ = std::move(pool);
      return true;
    } catch (const CapacityError&) {  // less may do
    }
  }
  refused_bytes_ = bytes;
  return false;
}

cuda::LogitRow* CudaFavour::host_row(std::int64_t list, std::int64_t row) {
  return reinterpret_cast<cuda::LogitRow*>(staging_.data() + rows_at_) + list * shape_.rows + row;
}

void CudaFavour::set_rows(std::int64_t list, std::int64_t first, std::int64_t count,
                          std::size_t sequence, std::int64_t depth) {
  cuda::LogitRow row;
  row.sequence = static_cast<std::int32_t>(sequence);
  row.position = static_cast<std::int32_t>(sequences_[sequence].position + depth);
  std::fill_n(host_row(list, first), count, row);
}

void CudaFavour::set_padding(std::int64_t list, std::int64_t first, std::int64_t count) {
  std::fill_n(host_row(list, first), count, cuda::LogitRow{});
}

void CudaFavour::send(std::int64_t list, std::int64_t lists) {
  cuda::copy_to_device(rows_ + list * shape_.rows, host_row(list, 0),
                       static_cast<std::size_t>(lists * shape_.rows) * sizeof(cuda::LogitRow),
                       stream_);
}

void CudaFavour::process(const Rows& rows, const cuda::DraftTrees& trees) {
  cuda::ProcessArgs args;
  args.logits = args.processed = rows.logits;
  args.stride = rows.stride;
  args.vocab = rows.vocab;
  args.rows = this->rows(rows.list) + rows.first;
  args.states = states_;
  args.trees = trees;
  args.draft_of_target = device_draft_of_target_;
  cuda::process_logits(args, rows.count, stream_);
}

void CudaFavour::favour(const Rows& rows, std::int64_t count, bool raw, cuda::LikelyToken* out,
                        float* scores) {
  cuda::FavourArgs args;
  args.choose.logits = args.choose.processed = rows.logits;
  args.choose.stride = rows.stride;
  args.choose.vocab = rows.vocab;
  args.choose.chunks = cuda::chunks_of(rows.vocab);
  args.choose.rows = this->rows(rows.list) + rows.first;
  args.choose.states = states_;
  args.choose.tops = tops_;
  args.choose.shares = shares_;
  args.choose.found = found_;
  args.target_of_draft = target_of_draft_;
  args.count = static_cast<std::int32_t>(count);
  args.raw = raw;
  args.cuts = cuts_;
  args.found = favoured_;
  args.sums = sums_;
  args.out = out;
  args.scores = scores;
  cuda::favour(args, rows.count, kinds_.filtered, stream_);
}

}  // namespace specrt
