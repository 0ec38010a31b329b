#pragma once

// Draft trees that grow where the drafter runs (EAGLE-2, Li et al. 2406.16858), as
// decode/candidate_tree.h has them on the host: a level's candidates come out of its rows' likely
// tokens, the best of them are the rows of the next pass, and the best of all are the draft. Equal
// scores go to the candidate that came first.

#include "kernels/likely.h"

namespace specrt::cuda {

struct GrownCandidate {
  std::int32_t token = -1;  ///< -1: there is none
  std::int32_t parent = -1;
  float score = 0.0f;  ///< log-probabilities along the path, or shares
  float log_prob = 0.0f;
  std::int32_t scratch = -1;  ///< once it is a row
};

/// Candidates as the trees that ProcessLogits reads.
SPECRT_KERNEL DraftTrees trees_of(const GrownCandidate* candidates, std::int64_t most) {
  static_assert(sizeof(GrownCandidate) % sizeof(std::int32_t) == 0);
  return {&candidates->token, &candidates->parent, most,
          static_cast<std::int64_t>(sizeof(GrownCandidate) / sizeof(std::int32_t))};
}

/// What a level is to a draft. Of a level before the last, the next pass is laid out by now.
struct GrowStep {
  std::int32_t rows = 0;       ///< that were run: its frontier; 1 at the root, 0: it has ended
  std::int32_t first_row = 0;  ///< in GrowArgs::likely
  std::int32_t begin = 0;      ///< where this level's candidates begin; 0: they are the root's
  std::int32_t next_rows = 0;  ///< of the next pass; 0: there is none
  std::int32_t next_row = 0;
  std::int32_t scratch = 0;      ///< the first one's
  std::int32_t path = 0;         ///< the first one's, in GrowArgs::paths
  std::int32_t path_length = 0;  ///< of each; 0: they are no nodes, but positions of a chain
};

struct GrowArgs {
  const GrowStep* steps = nullptr;      ///< [drafts]
  const LikelyToken* likely = nullptr;  ///< [rows, count]
  /// [rows, count]: what they add to the score; null: their log-probabilities.
  const float* scores = nullptr;
  std::int32_t count = 1;
  const std::int32_t* target_of_draft = nullptr;  ///< null: ids are the target's
  std::int64_t target_vocab = 0;
  GrownCandidate* candidates = nullptr;  ///< [drafts, most_candidates]
  std::int64_t most_candidates = 0;
  std::int32_t* frontiers = nullptr;  ///< [drafts, count]: candidates
  const float* states = nullptr;      ///< [rows, state_width]: what the rows gave out
  std::int64_t state_width = 0;
  // The next pass's inputs; a row that there is no candidate for has no token and no state.
  std::int32_t* tokens = nullptr;
  LogitRow* logit_rows = nullptr;  ///< null: nobody's logits depend on what is before them
  const float** hidden = nullptr;  ///< null: a model's rows, which begin with their tokens
  std::int32_t* paths = nullptr;   ///< scratch indices
};

/// The best candidate behind `last`, of [begin, end), in every thread.
template <int kThreads, class Block>
SPECRT_KERNEL LikelyToken next_best(const Block& block, const GrownCandidate* candidates,
                                    std::int64_t begin, std::int64_t end, const LikelyToken& last,
                                    LikelyToken* warps) {
  LikelyToken best = no_token();
  for (std::int64_t i = begin + block.thread(); i < end; i += kThreads) {
    const LikelyToken one{static_cast<std::int32_t>(i), candidates[i].score};
    if (candidates[i].token >= 0 && likelier(last, one) && likelier(one, best)) best = one;
  }
  return best_of_block<kThreads>(block, best, warps);
}

/// Grid: drafts.
struct GrowLevel {
  static constexpr int kThreads = 128;
  using Args = GrowArgs;
  struct Shared {
    LikelyToken warps[2][kThreads / simt::kWarp];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const GrowStep step = args.steps[block.x()];
    if (step.rows == 0) return;
    GrownCandidate* candidates = args.candidates + block.x() * args.most_candidates;
    std::int32_t* frontier = args.frontiers + block.x() * args.count;
    const std::int32_t children = step.rows * args.count;
    for (std::int32_t i = block.thread(); i < children; i += kThreads) {
      const std::int32_t row = i / args.count;
      const std::int64_t at = std::int64_t{step.first_row} * args.count + i;
      const LikelyToken one = args.likely[at];
      GrownCandidate child;
      child.parent = step.begin == 0 ? -1 : frontier[row];
      child.score = child.log_prob = one.value;
      if (one.id >= 0 && one.value > -infinity() && one.value < infinity()) {
        child.token = args.target_of_draft == nullptr ? one.id : args.target_of_draft[one.id];
        if (child.token >= args.target_vocab) child.token = -1;
        const float score = args.scores == nullptr ? one.value : args.scores[at];
        // Rounding of a log-softmax can leave a trace above 0.
        child.score = score < 0.0f ? score : 0.0f;
      }
      if (step.begin != 0) {
        if (child.parent < 0) {
          child.token = -1;  // its row was none
        } else {
          child.score = candidates[child.parent].score + child.score;
        }
      }
      candidates[step.begin + i] = child;
    }
    block.sync();

    LikelyToken last{-1, infinity()};
    for (std::int32_t n = 0; n < step.next_rows; ++n) {
      last = next_best<kThreads>(block, candidates, step.begin, step.begin + children, last,
                                 shared.warps[n % 2]);
      if (block.thread() == 0) frontier[n] = last.id == INT32_MAX ? -1 : last.id;
    }
    block.sync();

    for (std::int32_t n = block.thread(); n < step.next_rows; n += kThreads) {
      const std::int32_t chosen = frontier[n];
      const std::int64_t row = std::int64_t{step.next_row} + n;
      std::int32_t* path = args.paths + step.path + std::int64_t{n} * step.path_length;
      args.tokens[row] = chosen < 0 ? -1 : candidates[chosen].token;
      if (args.logit_rows != nullptr) args.logit_rows[row].node = chosen;
      if (args.hidden != nullptr) {
        const std::int64_t state = step.first_row + (chosen - step.begin) / args.count;
        args.hidden[row] = chosen < 0 ? nullptr : args.states + state * args.state_width;
      }
      if (chosen >= 0) candidates[chosen].scratch = step.scratch + n;
      std::int32_t above = chosen < 0 ? -1 : candidates[chosen].parent;
      for (std::int32_t depth = step.path_length - 1; depth >= 0; --depth) {
        if (depth == step.path_length - 1 || above < 0) {
          path[depth] = step.scratch + n;
        } else {
          path[depth] = candidates[above].scratch;
          above = candidates[above].parent;
        }
      }
    }
  }
};

/// A draft's candidates, and how many nodes it may have.
struct GrownDraft {
  std::int32_t candidates = 0;
  std::int32_t nodes = 0;
};

struct FinishDraftArgs {
  const GrownDraft* drafts = nullptr;
  const GrownCandidate* candidates = nullptr;  ///< [drafts, most_candidates]
  std::int64_t most_candidates = 0;
  /// [drafts, 1 + 3 * most_nodes]: how many nodes, then each one's token, parent (-1: the root) and
  /// log-probability (float).
  std::int32_t* out = nullptr;
  std::int64_t most_nodes = 0;  ///< at most FinishDraft::kMostNodes
};

/// The best of all candidates, in the order in which they came. Grid: drafts.
struct FinishDraft {
  static constexpr int kThreads = 128;
  static constexpr std::int64_t kMostNodes = 256;
  using Args = FinishDraftArgs;
  struct Shared {
    LikelyToken warps[2][kThreads / simt::kWarp];
    std::int32_t chosen[kMostNodes];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const GrownDraft draft = args.drafts[block.x()];
    const GrownCandidate* candidates = args.candidates + block.x() * args.most_candidates;
    std::int32_t* out = args.out + block.x() * (1 + 3 * args.most_nodes);
    std::int32_t count = 0;
    LikelyToken last{-1, infinity()};
    for (; count < draft.nodes; ++count) {
      last = next_best<kThreads>(block, candidates, 0, draft.candidates, last,
                                 shared.warps[count % 2]);
      if (last.id == INT32_MAX) break;
      if (block.thread() == 0) shared.chosen[count] = last.id;
    }
    block.sync();
    if (block.thread() == 0) out[0] = count;
    for (std::int32_t n = block.thread(); n < count; n += kThreads) {
      const GrownCandidate& one = candidates[shared.chosen[n]];
      // Its score is not above its parent's, which came earlier: the parent was chosen too.
      std::int32_t place = 0;
      std::int32_t parent = 0;
      for (std::int32_t i = 0; i < count; ++i) {
        place += shared.chosen[i] < shared.chosen[n] ? 1 : 0;
        parent += shared.chosen[i] < one.parent ? 1 : 0;
      }
      std::int32_t* node = out + 1 + 3 * std::int64_t{place};
      node[0] = one.token;
      node[1] = one.parent < 0 ? -1 : parent;
      node[2] = static_cast<std::int32_t>(simt::bits_of(one.log_prob));
    }
  }
};

}  // namespace specrt::cuda
