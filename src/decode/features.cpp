#include <algorithm>

#include "decode/decoder_impl.h"

// The target's hidden states on their way to the drafters that read them.

namespace specrt {

void Decoder::Impl::find_features(Sequence& s) const {
  if (s.drafter == nullptr || !s.drafter->features().any()) return;
  const TargetFeatures& wanted = s.drafter->features();
  if (!options.features.cover(wanted)) {
    throw InvalidArgument("[drafter " + s.drafter->name() +
                          "] expected a decoder made with the features that it reads, got one "
                          "without (DecoderOptions::features)");
  }
  for (const std::int64_t layer : wanted.layers) s.features.push_back(runner.captured(layer));
  if (wanted.normed) s.features.push_back(runner.captured_normed());
}

// Rows that may turn out to be committed, and only those of drafters that read them.
void Decoder::Impl::capture(Sequence& s) {
  s.captured = !s.features.empty() && s.drafter->wants_features(s.id);
  if (!s.captured) return;
  const std::int64_t last = s.tree_row + static_cast<std::int64_t>(s.draft.size());
  const std::int64_t first =
      s.drafter->features().last_only ? s.root_row : s.root_row - s.planned + 1;
  runner.capture(first, last - first);
}

// Which rows were committed; before anything else of the round is entered.
void Decoder::Impl::note_features(Sequence& s) {
  if (!s.captured) return;
  const std::int64_t start = s.prefilling() ? s.processed : s.length() - 1;
  for (std::int64_t i = 0; i < s.planned; ++i) {
    s.feature_rows.push_back(s.root_row - s.planned + 1 + i);
  }
  if (s.wants_choice) {
    // The last token chosen has not been run.
    const std::size_t run = s.walk.emitted().size() - 1;
    for (std::size_t i = 0; i < run; ++i) {
      s.feature_rows.push_back(s.tree_row + s.walk.path()[i]);
    }
  }
  s.first_feature = start;
  if (s.drafter->features().last_only) {
    s.first_feature += static_cast<std::int64_t>(s.feature_rows.size()) - 1;
    s.feature_rows.erase(s.feature_rows.begin(), s.feature_rows.end() - 1);
  }
}

void Decoder::Impl::hand_over_features() {
  drafting.clear();
  for (const auto& s : live) {
    if (!s->feature_rows.empty() && s->finish != Finish::error) drafting.push_back(s.get());
  }
  std::stable_sort(drafting.begin(), drafting.end(), [](const Sequence* a, const Sequence* b) {
    return std::less<>()(a->drafter.get(), b->drafter.get());
  });
  for (std::size_t first = 0; first < drafting.size();) {
    Drafter* drafter = drafting[first]->drafter.get();
    std::size_t last = first;
    observed.clear();
    for (; last < drafting.size() && drafting[last]->drafter.get() == drafter; ++last) {
      Sequence& s = *drafting[last];
      observed.push_back(
          {s.id,
           s.first_feature,
           {s.features, s.feature_rows, runner.config().hidden_size, runner.device_features()},
           s.tokens});
    }
    try {
      drafter->observe_features(observed);
    } catch (const std::exception& caught) {
      for (std::size_t i = first; i < last; ++i) {
        // Whoever has just ended has its output already.
        if (drafting[i]->finish != Finish::none) continue;
        fail(*drafting[i], "[drafter " + drafter->name() + "] " + caught.what());
      }
    }
    first = last;
  }
}

}  // namespace specrt
