#include "decode/head_memory.h"

#include "model/cuda_growth.h"
#include "specrt/error.h"

namespace specrt {

HeadSizes::HeadSizes(const ModelConfig& head, const DraftHeadOptions& options) {
  if (head.head.kind == HeadKind::none) {
    throw InvalidArgument("[draft head] expected a head's config, got a model of its own");
  }
  const auto within = [](const char* what, std::int64_t value, std::int64_t most) {
    if (value < 1 || value > most) {
      throw InvalidArgument(
          expected_got(what, "from 1 to " + std::to_string(most), std::to_string(value)));
    }
  };
  within("depth", options.depth, 1024);
  within("top_k", options.top_k,
         std::min({Runner::kMaxCandidates, static_cast<std::int64_t>(options.max_rows),
                   head.vocab_size}));
  if (options.features.count() != head.head.feature_parts || options.features.last_only) {
    throw InvalidArgument(expected_got("features",
                                       std::to_string(head.head.feature_parts) +
                                           " hidden states of every position, as the head reads",
                                       std::to_string(options.features.count())));
  }
  within("modules", options.modules, std::min<std::int64_t>(options.depth, 64));
  runner = shared_runner_options(static_cast<const DraftModelOptions&>(options));
  runner.kv_cache_bytes /= options.modules;
  // A level of all their trees has to fit one pass; up to the last module, with those above it.
  const std::int64_t level = options.top_k * std::max<std::int64_t>(1, options.modules - 1);
  within("top_k", level, options.max_rows);
  sequences = std::clamp<std::int64_t>(options.max_rows / level, 1, options.max_batch_size);
  runner.scratch_slots = sequences * options.top_k * (options.depth - 1);
  feature_width = head.head.feature_parts * head.head.feature_size;
  feature_rows = std::int64_t{options.max_rows} + options.max_batch_size;
  state_rows = sequences * level;
  module_rows = options.modules > 1 ? options.max_rows : 0;
  grows_on_device = cuda_device_of(options.device).has_value() && options.modules == 1 &&
                    CudaGrowth::fits(options.top_k, options.depth);
}

std::int64_t HeadSizes::workspace_bytes(const ModelConfig& head, const DraftHeadOptions& options,
                                        std::int64_t target_vocab_size) const {
  std::int64_t floats = feature_rows * feature_width + 2 * state_rows * head.hidden_size;
  floats += (2 * module_rows + options.max_batch_size * (options.modules - 1)) * head.hidden_size;
  std::int64_t bytes = Runner::workspace_bytes(head, runner) * options.modules + floats * 4;
  if (grows_on_device) {
    bytes += CudaGrowth::device_bytes(sequences, options.top_k, options.depth, head.vocab_size,
                                      options.target_of_draft.empty() ? 0 : target_vocab_size);
  }
  if (cuda_device_of(options.device)) return bytes;  // what the host has is not counted
  return bytes + (options.target_of_draft.empty() ? 0 : target_vocab_size * 4) +
         Chooser::bytes_for(std::max(target_vocab_size, head.vocab_size));
}

MemoryUse memory_of(const ModelConfig& head, Precision precision, const DraftHeadOptions& options,
                    std::int64_t target_vocab_size) {
  const HeadSizes sizes(head, options);
  check_device(head, precision, sizes.runner);
  MemoryUse use;
  if (const std::optional<int> device = cuda_device_of(options.device)) {
    use.weights = cuda_layout(head, precision, cuda::architecture_of(*device)).bytes;
  } else {
    use.weights = weight_bytes(head, precision);
  }
  use.weights *= options.modules;
  use.kv_cache =
      Runner::kv_layout(head, activation_dtype(precision), sizes.runner).bytes() * options.modules;
  use.workspace = sizes.workspace_bytes(head, options, target_vocab_size);
  return use;
}

std::int64_t kv_cache_bytes_for(const ModelConfig& head, Precision precision,
                                const DraftHeadOptions& options, std::int64_t sequences,
                                std::int64_t tokens) {
  RunnerOptions runner = HeadSizes(head, options).runner;
  runner.kv_cache_bytes = 0;
  KvLayout layout = Runner::kv_layout(head, activation_dtype(precision), runner);
  const std::int64_t blocks = (tokens + options.block_size - 1) / options.block_size;
  layout.set_blocks(blocks * sequences, options.max_batch_size,
                    Runner::longest_in_blocks(head, runner));
  return layout.bytes() * options.modules;
}

}  // namespace specrt
