#include "decode/rank.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/philox.h"

namespace specrt {

Ranker::Ranker(const cpu::Kernels& kernels, std::int64_t vocab_size)
    : kernels_(&kernels),
      ids_(static_cast<std::size_t>(vocab_size)),
      parts_(static_cast<std::size_t>((vocab_size + kPart - 1) / kPart)) {
  std::iota(ids_.begin(), ids_.end(), 0);
}

std::int64_t Ranker::bytes_for(std::int64_t vocab_size) {
  return vocab_size * 4 +
         (vocab_size + kPart - 1) / kPart * static_cast<std::int64_t>(sizeof(cpu::Race));
}

void Ranker::as_the_target(Chooser& chooser, std::span<const float> logits,
                           const SamplingParams& params, std::int64_t position, std::int64_t count,
                           Ranked& out) {
  if (params.greedy()) {
    chooser.most_likely(logits, count, out);
    return;
  }
  // One race over all, part by part; whoever wins leaves its part, which is run again without it.
  const std::span<float> law = chooser.distribution(logits, params);
  const auto size = std::ssize(law);
  const cpu::NoiseKey key = noise_key(params, position, purpose_word(Purpose::target_choice));
  const std::int64_t parts = (size + kPart - 1) / kPart;
  const auto run = [&](std::int64_t part) {
    const std::int64_t first = part * kPart;
    parts_[static_cast<std::size_t>(part)] =
        kernels_->race(law.data() + first, ids_.data() + first, std::min(kPart, size - first), key);
  };
  for (std::int64_t part = 0; part < parts; ++part) run(part);
  out.clear();
  while (std::ssize(out) < count) {
    std::int64_t best = -1;
    for (std::int64_t part = 0; part < parts; ++part) {
      const cpu::Race& here = parts_[static_cast<std::size_t>(part)];
      if (here.token < 0) continue;
      if (best < 0 || here.key < parts_[static_cast<std::size_t>(best)].key) best = part;
    }
    if (best < 0) return;
    const auto token = static_cast<TokenId>(parts_[static_cast<std::size_t>(best)].token);
    out.emplace_back(token, std::log(law[static_cast<std::size_t>(token)]));
    law[static_cast<std::size_t>(token)] = 0.0f;
    run(best);
  }
}

}  // namespace specrt
