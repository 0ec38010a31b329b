#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/choose.h"
#include "decode/runner_options.h"
#include "specrt/drafter.h"
#include "specrt/model.h"

namespace specrt {

/// The sizes that follow from a draft head's options; constructor and plan take them from here.
struct HeadSizes {
  HeadSizes(const ModelConfig& head, const DraftHeadOptions& options);

  std::int64_t sequences = 0;      ///< drafted for at once
  std::int64_t feature_width = 0;  ///< floats a position
  std::int64_t feature_rows = 0;   ///< positions whose features wait for a pass
  std::int64_t state_rows = 0;     ///< of the head's own hidden states, twice
  std::int64_t module_rows = 0;    ///< whose states go to the next module; 0 where there is one
  bool grows_on_device = false;    ///< a GPU grows the trees
  RunnerOptions runner;            ///< of each module, without a team

  std::int64_t workspace_bytes(const ModelConfig& head, const DraftHeadOptions& options,
                               std::int64_t target_vocab_size) const;
};

}  // namespace specrt
