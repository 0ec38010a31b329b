#include "model/cuda_growth.h"

#include <algorithm>
#include <bit>

#include "specrt/error.h"

namespace specrt {
namespace {

// More candidates than that take a block too long.
constexpr std::int64_t kMostCandidates = 8192;

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Candidates of a draft: the root's children, and those of every level's frontier.
std::int64_t most_candidates(std::int64_t top_k, std::int64_t depth) {
  return top_k + (depth - 1) * top_k * top_k;
}

std::int64_t out_values(std::int64_t nodes) { return 1 + 3 * nodes; }

CudaFavour::Shape rows_of(std::int64_t drafts, std::int64_t top_k, std::int64_t depth,
                          std::int64_t draft_vocab) {
  CudaFavour::Shape shape;
  shape.sequences = drafts;
  shape.lists = depth;
  shape.rows = drafts * top_k;
  shape.slice = std::min(CudaRunner::kLogitRows, shape.rows);
  shape.vocab = draft_vocab;
  shape.count = top_k;
  return shape;
}

}  // namespace

struct CudaGrowth::Sizes {
  std::int64_t likely, scores, candidates, frontiers, steps, sizes, out;

  Sizes(std::int64_t drafts, std::int64_t top_k, std::int64_t depth) {
    const auto of = [&](std::int64_t count, std::size_t size) {
      return aligned(count * static_cast<std::int64_t>(size));
    };
    likely = of(drafts * top_k * top_k, sizeof(cuda::LikelyToken));
    scores = of(drafts * top_k * top_k, sizeof(float));
    candidates = of(drafts * most_candidates(top_k, depth), sizeof(cuda::GrownCandidate));
    frontiers = of(drafts * top_k, sizeof(std::int32_t));
    steps = of(depth * drafts, sizeof(cuda::GrowStep));
    sizes = of(drafts, sizeof(cuda::GrownDraft));
    out = of(drafts * out_values(kMostNodes), sizeof(std::int32_t));
  }
  std::int64_t bytes() const {
    return likely + scores + candidates + frontiers + steps + sizes + out;
  }
};

bool CudaGrowth::fits(std::int64_t top_k, std::int64_t depth) {
  return depth <= CudaInputs::kMostDepth && most_candidates(top_k, depth) <= kMostCandidates;
}

std::int64_t CudaGrowth::device_bytes(std::int64_t drafts, std::int64_t top_k, std::int64_t depth,
                                      std::int64_t draft_vocab, std::int64_t target_vocab) {
  return Sizes(drafts, top_k, depth).bytes() +
         CudaFavour::device_bytes(rows_of(drafts, top_k, depth, draft_vocab), target_vocab);
}

CudaGrowth::CudaGrowth(CudaRunner& runner, Rows rows, std::int64_t drafts, std::int64_t top_k,
                       std::int64_t depth, std::span<const TokenId> target_of_draft,
                       std::int64_t target_vocab)
    : runner_((runner.enter(), runner)),
      kind_(rows),
      most_drafts_(drafts),
      top_k_(top_k),
      depth_(depth),
      target_vocab_(target_vocab),
      vocab_(target_of_draft.empty() ? std::min(runner.vocab(), target_vocab) : runner.vocab()),
      width_(runner.config().hidden_size),
      favour_(rows_of(drafts, top_k, depth, runner.vocab()), target_of_draft, target_vocab,
              runner.stream()) {
  drafts_.reserve(static_cast<std::size_t>(drafts));
  const Sizes sizes(drafts, top_k, depth);
  buffer_ = cuda::DeviceBuffer(static_cast<std::size_t>(sizes.bytes()));
  std::byte* at = buffer_.data();
  const auto take = [&]<typename T>(T*& out, std::int64_t bytes) {
    out = reinterpret_cast<T*>(at);
    at += bytes;
  };
  take(likely_, sizes.likely);
  take(scores_, sizes.scores);
  take(candidates_, sizes.candidates);
  take(frontiers_, sizes.frontiers);
  take(steps_, sizes.steps);
  take(sizes_, sizes.sizes);
  take(out_, sizes.out);
  sizes_at_ = sizes.steps;
  host_steps_ = cuda::HostBuffer(static_cast<std::size_t>(sizes.steps + sizes.sizes));
  host_out_ = cuda::HostBuffer(static_cast<std::size_t>(sizes.out));
}

bool CudaGrowth::begin(std::span<const Draft> drafts,
                       std::span<const CudaFavour::Sequence> sequences) {
  if (unfinished_) runner_.wait();  // for copies out of what is written now
  unfinished_ = true;
  drafts_.assign(drafts.begin(), drafts.end());
  auto* sizes = reinterpret_cast<cuda::GrownDraft*>(host_steps_.data() + sizes_at_);
  for (std::size_t i = 0; i < drafts.size(); ++i) {
    sizes[i] = {static_cast<std::int32_t>(begin_of(i, drafts[i].levels)),
                static_cast<std::int32_t>(drafts[i].nodes)};
  }
  runner_.enter();
  if (!favour_.begin(sequences)) return false;
  if (!favour_.kinds().wanted()) return true;
  for (std::size_t i = 0; i < drafts.size(); ++i) {
    favour_.set_rows(0, static_cast<std::int64_t>(i), 1, i, 0);
  }
  favour_.send(0);
  return true;
}

std::int64_t CudaGrowth::rows(std::size_t draft, std::int64_t level) const {
  const Draft& one = drafts_[draft];
  if (level >= one.levels) return 0;
  // What is not among the best `nodes` of its level is not among those of all.
  return level == 0 ? 1 : std::min(top_k_, one.nodes);
}

// Its first candidate behind `level` passes.
std::int64_t CudaGrowth::begin_of(std::size_t draft, std::int64_t level) const {
  if (level == 0) return 0;
  return top_k_ + (level - 1) * std::min(top_k_, drafts_[draft].nodes) * top_k_;
}

void CudaGrowth::rank(std::span<const std::int64_t> rows, std::int64_t first, std::int64_t level) {
  const CudaFavour::Kinds& kinds = favour_.kinds();
  while (!rows.empty()) {
    const auto some =
        rows.first(std::min(rows.size(), static_cast<std::size_t>(CudaRunner::kLogitRows)));
    const std::int64_t count = std::ssize(some);
    cuda::LikelyToken* const likely = likely_ + first * top_k_;
    const CudaFavour::Rows which = {
        runner_.device_logits(), runner_.logits_stride(), vocab_, level, first, count};
    runner_.make_logits(some);
    if (kinds.changed) {
      favour_.process(which, cuda::trees_of(candidates_, most_candidates(top_k_, depth_)));
    }
    // Where logits are changed, no more of them than are.
    const std::int64_t vocab = kinds.changed ? vocab_ : runner_.vocab();
    if (kinds.greedy) runner_.find_likely(count, vocab, top_k_, likely);
    if (kinds.sampled) {
      favour_.favour(which, top_k_, kind_ == Rows::positions, likely, scores_ + first * top_k_);
    }
    first += count;
    rows = rows.subspan(some.size());
  }
}

void CudaGrowth::set_step(std::size_t draft, std::int64_t level, const Place& place) {
  auto* steps = reinterpret_cast<cuda::GrowStep*>(host_steps_.data()) + level * most_drafts_;
  const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  cuda::GrowStep& step = steps[draft];
  step.rows = small(rows(draft, level));
  step.first_row = small(place.first_row);
  step.begin = small(begin_of(draft, level));
  step.next_rows = small(rows(draft, level + 1));
  step.next_row = small(place.next_row);
  step.scratch = small(place.scratch);
  step.path = small(place.path);
  step.path_length = kind_ == Rows::nodes ? small(level + 1) : 0;
  if (favour_.kinds().wanted() && step.next_rows > 0) {
    favour_.set_rows(level + 1, place.next_row, step.next_rows, draft, level + 1);
  }
}

LevelGrowth CudaGrowth::level(std::int64_t level, const float* states) {
  runner_.enter();
  const std::int64_t first = level * most_drafts_;
  cuda::copy_to_device(steps_ + first,
                       reinterpret_cast<cuda::GrowStep*>(host_steps_.data()) + first,
                       drafts_.size() * sizeof(cuda::GrowStep), runner_.stream());
  const CudaFavour::Kinds& kinds = favour_.kinds();
  const bool more = kinds.wanted() && level + 1 < depth_;
  if (more) favour_.send(level + 1);
  LevelGrowth out;
  out.drafts = std::ssize(drafts_);
  out.args.steps = steps_ + first;
  out.args.likely = likely_;
  out.args.scores = kinds.sampled ? scores_ : nullptr;
  out.args.logit_rows = more && kinds.changed ? favour_.rows(level + 1) : nullptr;
  out.args.count = static_cast<std::int32_t>(top_k_);
  out.args.target_of_draft = favour_.target_of_draft();
  out.args.target_vocab = target_vocab_;
  out.args.candidates = candidates_;
  out.args.most_candidates = most_candidates(top_k_, depth_);
  out.args.frontiers = frontiers_;
  out.args.states = states;
  out.args.state_width = width_;
  return out;
}

void CudaGrowth::finish(std::int64_t last, std::span<DraftTree* const> out) {
  const LevelGrowth growth = level(last, nullptr);
  const cuda::Stream stream = runner_.stream();
  cuda::grow_level(growth.args, growth.drafts, stream);
  cuda::copy_to_device(sizes_, host_steps_.data() + sizes_at_,
                       drafts_.size() * sizeof(cuda::GrownDraft), stream);
  cuda::FinishDraftArgs args;
  args.drafts = sizes_;
  args.candidates = candidates_;
  args.most_candidates = growth.args.most_candidates;
  args.out = out_;
  for (const Draft& one : drafts_) args.most_nodes = std::max(args.most_nodes, one.nodes);
  cuda::finish_draft(args, growth.drafts, stream);
  const std::int64_t values = out_values(args.most_nodes);
  cuda::copy_to_host(host_out_.data(), out_,
                     static_cast<std::size_t>(growth.drafts * values) * sizeof(std::int32_t),
                     stream);
  runner_.wait();
  unfinished_ = false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto* found = reinterpret_cast<const std::int32_t*>(host_out_.data()) +
                        static_cast<std::int64_t>(i) * values;
    for (std::int32_t node = 0; node < found[0]; ++node) {
      const std::int32_t* one = found + out_values(node);
      (void)out[i]->add(one[0], one[1] < 0 ? DraftTree::kRoot : one[1],
                        std::bit_cast<float>(one[2]));
    }
  }
}

}  // namespace specrt
