#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "specrt/drafter.h"
#include "specrt/export.h"

namespace specrt {

struct SPECRT_API MergeOptions {
  std::vector<std::shared_ptr<Drafter>> parts;  ///< 1 to 32; equal drafts count for all of them
  std::int64_t target_bytes = 0;                ///< of the target's weights: what a pass costs
};

/// Drafts of several drafters as one tree: merged by prefix, the nodes most likely to be accepted
/// within the budget. How likely is told by what became of each part's drafts in the same sequence,
/// by depth and by its own confidence. Parts that cost nothing are asked first; one that costs
/// (Drafter::step_cost) only where what it may add to their draft is worth it, and as deep as it
/// is.
///
/// Parts draft for `rejection` and `block` as for greedy requests: a tree of tokens that several
/// drafters picked is itself picked, one of tokens that one sampled and another picked has no law
/// to tell. A part that samples all the same ends the request with an error. With `block`, which
/// takes chains, the likeliest path is drafted.
///
/// Throws InvalidArgument.
SPECRT_API std::shared_ptr<Drafter> make_merge_drafter(const MergeOptions& options);

}  // namespace specrt
