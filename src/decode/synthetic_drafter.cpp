#include <algorithm>

#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt {
namespace {

class SyntheticDrafter final : public Drafter {
 public:
  const std::string& name() const override { return name_; }
  void admit(SequenceId, std::span<const TokenId>, std::int64_t) override {}

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    if (out.size() != requests.size()) {
      throw InvalidArgument(expected_got("out", std::to_string(requests.size()) + " trees",
                                         std::to_string(out.size())));
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const DraftRequest& request = requests[i];
      out[i].clear();
      out[i].set_source(name_);
      const std::int64_t nodes = std::min(request.max_nodes, request.max_depth);
      for (std::int64_t node = 0; node < nodes; ++node) {
        out[i].add(request.tokens.back(), static_cast<std::int32_t>(node) - 1);
      }
    }
  }

  void observe(SequenceId, std::span<const TokenId>) override {}
  void release(SequenceId) override {}
  MemoryUse memory() const override { return {}; }

 private:
  std::string name_ = "synthetic";
};

}  // namespace

std::shared_ptr<Drafter> make_synthetic_drafter() { return std::make_shared<SyntheticDrafter>(); }

}  // namespace specrt
