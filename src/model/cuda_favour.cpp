#include "model/cuda_favour.h"

#include <algorithm>

#include "model/cuda_sampling.h"

namespace specrt {
namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

struct CudaFavour::Sizes {
  std::int64_t states, rows, tops, shares, sums, found, cuts, favoured, map;

  Sizes(const Shape& shape, bool mapped) {
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
    map = of(mapped ? shape.vocab : 0, sizeof(std::int32_t));
  }
  std::int64_t bytes() const {
    return states + rows + tops + shares + sums + found + cuts + favoured + map;
  }
};

bool CudaFavour::ranks(const SamplingParams& params, bool neutral_logits) {
  return neutral_logits && params.follows_target_noise() &&
         params.speculation.policy != Policy::adasd;
}

std::int64_t CudaFavour::device_bytes(const Shape& shape, bool mapped) {
  return Sizes(shape, mapped).bytes();
}

CudaFavour::CudaFavour(const Shape& shape, std::span<const TokenId> target_of_draft,
                       cuda::Stream stream)
    : shape_(shape), stream_(stream) {
  const Sizes sizes(shape, !target_of_draft.empty());
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
  static_assert(sizeof(TokenId) == sizeof(std::int32_t));
  target_of_draft_ = reinterpret_cast<const std::int32_t*>(at);
  cuda::copy_to_device(at, target_of_draft.data(), target_of_draft.size_bytes(), stream);
  cuda::synchronize(stream);
}

void CudaFavour::begin(std::span<const Sequence> sequences) {
  sequences_ = sequences;
  greedy_ = sampled_ = filtered_ = false;
  auto* states = reinterpret_cast<cuda::SamplingState*>(staging_.data());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    states[i] = sampling_state(*sequences[i].params);
    const bool greedy = sequences[i].params->greedy();
    greedy_ = greedy_ || greedy;
    sampled_ = sampled_ || !greedy;
    filtered_ = filtered_ || (!greedy && cuda::filters(states[i], shape_.vocab));
  }
  if (!sampled_) return;
  cuda::copy_to_device(states_, states, sequences.size() * sizeof(cuda::SamplingState), stream_);
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

void CudaFavour::run(const Logits& logits, std::int64_t list, std::int64_t first, std::int64_t rows,
                     std::int64_t count, bool raw, cuda::LikelyToken* out, float* scores) {
  cuda::FavourArgs args;
  args.choose.logits = logits.at;
  args.choose.stride = logits.stride;
  args.choose.vocab = logits.vocab;
  args.choose.chunks = cuda::chunks_of(logits.vocab);
  args.choose.rows = rows_ + list * shape_.rows + first;
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
  cuda::favour(args, rows, filtered_, stream_);
}

}  // namespace specrt
