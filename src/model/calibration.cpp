#include "specrt/calibration.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/quantise.h"
#include "model/parallel_rows.h"
#include "model/runner.h"
#include "specrt/error.h"

namespace specrt {

LayerTrace trace_layer(const Model& layer, std::span<const float> stream,
                       const std::shared_ptr<ThreadTeam>& team, const std::string& cpu_isa) {
  if (!layer.valid() || layer.config().num_layers != 1) {
    throw InvalidArgument(expected_got("layer", "a model of one layer", "another"));
  }
  const std::int64_t hidden = layer.config().hidden_size;
  const std::int64_t rows = std::ssize(stream) / hidden;
  if (rows < 1 || rows * hidden != std::ssize(stream) ||
      rows > std::min<std::int64_t>(layer.config().max_position_embeddings, 65536)) {
    throw InvalidArgument(expected_got(
        "stream", "[positions, " + std::to_string(hidden) + "], 1 position to the model's limit",
        std::to_string(stream.size()) + " values"));
  }
  const cpu::FpMode mode;
  RunnerOptions options;
  options.max_model_len = rows;
  options.max_rows = static_cast<int>(rows);
  options.team = team;
  options.cpu_isa = cpu_isa;
  KvLayout layout = Runner::kv_layout(layer.config(), activation_dtype(layer.precision()), options);
  const std::int64_t longest = Runner::longest_in_blocks(layer.config(), options);
  layout.set_blocks(longest, options.max_batch_size, longest);
  options.kv_cache_bytes = layout.bytes();
  Runner runner(layer, options);
  LayerTrace trace;
  runner.cache().add(0, rows);
  runner.begin();
  runner.add_committed(0, std::vector<TokenId>(static_cast<std::size_t>(rows), 0));
  runner.forward_traced(stream, trace);
  return trace;
}

CompensatedGroup quantise_compensated(std::span<const float> weights,
                                      std::span<const float> factor) {
  const auto width = static_cast<std::int64_t>(std::lround(std::sqrt(factor.size())));
  if (width < 1 || width > cpu::kGroup || width * width != std::ssize(factor) ||
      std::ssize(weights) % width != 0) {
    throw InvalidArgument(expected_got(
        "group", "[n, width] weights and a [width, width] factor",
        std::to_string(weights.size()) + " and " + std::to_string(factor.size()) + " values"));
  }
  for (std::int64_t c = 0; c < width; ++c) {
    const float diagonal = factor[static_cast<std::size_t>(c * width + c)];
    if (!(diagonal > 0.0f) || !std::isfinite(diagonal)) {
      throw InvalidArgument(
          expected_got("factor", "a positive diagonal", std::to_string(diagonal)));
    }
  }
  const std::int64_t n = std::ssize(weights) / width;
  CompensatedGroup out;
  out.codes.resize(weights.size());
  out.errors.resize(weights.size());
  out.scales.resize(static_cast<std::size_t>(n));
  out.minima.resize(static_cast<std::size_t>(n));
  std::atomic<bool> fits{true};
  parallel_rows(n, n * width * 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (!cpu::quantise_compensated(weights.data() + r * width, width, factor.data(),
                                     out.codes.data() + r * width, out.scales[r], out.minima[r],
                                     out.errors.data() + r * width)) {
        fits = false;
      }
    }
  });
  if (!fits) {
    throw InvalidArgument(expected_got("weights", "finite values, below 30000", "others"));
  }
  return out;
}

}  // namespace specrt
