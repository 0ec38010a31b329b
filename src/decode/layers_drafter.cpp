#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "cpu/dispatch.h"
#include "decode/chain_draft.h"
#include "model/runner.h"
#include "model/weights.h"
#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt {
namespace {

/// Runs the target's first layers in the decoder's own Runner. They wrote the K/V of every
/// committed token when it passed through the target, bit for bit what they would write again; so a
/// draft starts at the last token, whose K/V are not in the cache yet, and puts its own into
/// scratch slots, which the pass that checks it uses anew.
class LayersDrafter final : public Drafter {
 public:
  LayersDrafter(const Model& target, std::int64_t layers, const std::string& cpu_isa)
      : target_(target),
        layers_(layers),
        chooser_(cpu::kernels_of(cpu_isa_from_name(cpu_isa)), target.config().vocab_size) {}

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId>, std::int64_t) override {
    if (!sequences_.insert(id).second) {
      throw InvalidArgument(expected_got(name_, "a new sequence", std::to_string(id)));
    }
  }
  void observe(SequenceId, std::span<const TokenId>) override {}
  void release(SequenceId id) override {
    if (sequences_.erase(id) == 0) {
      throw InvalidArgument(expected_got(name_, "an admitted sequence", std::to_string(id)));
    }
  }
  MemoryUse memory() const override { return memory_of_layers_drafter(target_.config()); }
  double step_cost(std::int64_t target_bytes) const override {
    return static_cast<double>(target_.data().bytes_read(layers_)) /
           static_cast<double>(target_bytes);
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    if (requests.empty()) return;
    Runner* const runner = requests.front().target;
    if (runner == nullptr || &runner->model().data() != &target_.data()) {
      throw InvalidArgument(
          expected_got(name_, "a decoder of the model that it was made for", "another"));
    }
    const cpu::FpMode mode;
    active_.clear();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      out[i].clear();
      out[i].set_source(name_);
      const std::int64_t steps = std::min(requests[i].max_nodes, requests[i].max_depth);
      if (steps > 0) active_.push_back({{&requests[i], &out[i], steps}});
    }
    runner->begin();
    while (!active_.empty()) step(*runner);
  }

  bool tells_laws() const override { return true; }

 private:
  struct Active {
    ChainDraft draft;
    std::int64_t row = 0;
    std::int32_t node = -1;  // the scratch index of the last one
  };

  // One more token for every active sequence.
  void step(Runner& runner) {
    runner.begin_level();
    for (Active& a : active_) {
      const DraftTree& tree = *a.draft.tree;
      const TokenId token = tree.empty() ? a.draft.request->tokens.back() : tree.tokens().back();
      a.row = runner.add_node(a.draft.request->id, token, a.node);
      a.node = runner.scratch_of(a.row);
    }
    runner.forward(layers_);
    const auto vocab = static_cast<std::size_t>(target_.config().vocab_size);
    for (std::size_t first = 0; first < active_.size();) {
      const std::size_t last =
          std::min(active_.size(), first + static_cast<std::size_t>(Runner::kLogitRows));
      rows_.clear();
      for (std::size_t i = first; i < last; ++i) rows_.push_back(active_[i].row);
      const std::span<const float> logits = runner.logits(rows_);
      for (std::size_t i = first; i < last; ++i) {
        active_[i].draft.draw(chooser_, logits.subspan((i - first) * vocab, vocab));
      }
      first = last;
    }
    const auto over = [](const Active& a) {
      return static_cast<std::int64_t>(a.draft.tree->size()) >= a.draft.steps;
    };
    for (const Active& a : active_) {
      if (over(a)) a.draft.forget_guesses();
    }
    std::erase_if(active_, over);
  }

  const std::string name_ = "layers";
  Model target_;
  std::int64_t layers_ = 0;
  Chooser chooser_;
  std::unordered_set<SequenceId> sequences_;
  std::vector<Active> active_;
  std::vector<std::int64_t> rows_;
};

}  // namespace

MemoryUse memory_of_layers_drafter(const ModelConfig& target) {
  MemoryUse use;
  use.workspace = Chooser::bytes_for(target.vocab_size);
  return use;
}

std::shared_ptr<Drafter> make_layers_drafter(const Model& target, std::int64_t layers,
                                             const std::string& cpu_isa) {
  if (!target.valid()) {
    throw InvalidArgument("[layers drafter] expected a loaded model, got an empty one");
  }
  if (layers < 1 || layers >= target.config().num_layers) {
    throw InvalidArgument(
        expected_got("layers", "from 1 to " + std::to_string(target.config().num_layers - 1),
                     std::to_string(layers)));
  }
  return std::make_shared<LayersDrafter>(target, layers, cpu_isa);
}

}  // namespace specrt
