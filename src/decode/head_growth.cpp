#include "decode/head_drafter.h"

// Drafts of a head on a GPU that grow there: the passes of all levels are put on its stream, and
// one copy brings the trees.

namespace specrt {

// Whether nobody in the group asks for what only the host can rank.
bool HeadDrafter::grows_on_device() const {
  if (!growth_.has_value() || active_count_ == 0) return false;
  for (std::size_t i = 0; i < active_count_; ++i) {
    const DraftRequest& request = *active_[i].request;
    if (request.max_nodes > CudaGrowth::kMostNodes || !CudaFavour::ranks(*request.sampling)) {
      return false;
    }
  }
  return true;
}

// What the group asks for goes to the device, where there is room for it.
bool HeadDrafter::begin_growth() {
  drafts_.clear();
  trees_.clear();
  favoured_.clear();
  for (std::size_t i = 0; i < active_count_; ++i) {
    const Active& a = active_[i];
    drafts_.push_back({a.levels, a.request->max_nodes});
    trees_.push_back(a.out);
    favoured_.add(*a.request, growth_->vocab(), growth_->draft_of_target());
    places_[i] = {.first_row = static_cast<std::int64_t>(i)};
  }
  return growth_->begin(drafts_, favoured_.sequences());
}

// Of the sequences whose last position was in the pass just run; level_ has them.
void HeadDrafter::rank_roots() {
  if (level_.empty()) return;
  logit_rows_.clear();
  for (const Row& row : level_) logit_rows_.push_back(row.row);
  growth_->rank(logit_rows_, level_.front().state, 0);
}

void HeadDrafter::grow_on_device() {
  root_level();
  std::int64_t level = 0;
  for (;; ++level) {
    runner_.begin_level();
    for (std::size_t i = 0; i < active_count_; ++i) {
      CudaGrowth::Place& place = places_[i];
      const std::int64_t rows = growth_->rows(i, level + 1);
      if (rows > 0) {
        place.next_row = runner_.add_level(active_[i].request->id, rows, level + 1);
        place.scratch = runner_.scratch_of(place.next_row);
        place.path = runner_.path_begin(place.next_row);
      }
      growth_->set_step(i, level, place);
      place.first_row = place.next_row;
    }
    if (runner_.rows() == 0) break;
    const float* const states = hidden_[now_].row(0);
    now_ = 1 - now_;
    outputs_.clear();
    logit_rows_.clear();
    for (std::int64_t row = 0; row < runner_.rows(); ++row) {
      outputs_.push_back(hidden_[now_].row(row));
      logit_rows_.push_back(row);
    }
    runner_.forward_level(outputs_, growth_->level(level, states));
    growth_->rank(logit_rows_, 0, level + 1);
  }
  growth_->finish(level, trees_);
}

}  // namespace specrt
