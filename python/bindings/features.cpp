#include "specrt/features.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt::python {
namespace {

/// The nearest bfloat16, ties to even; NaN stays NaN.
std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Drafts nothing and keeps the hidden states of its sequences, as bfloat16, until they are taken.
/// Those of a sequence that failed or was cancelled are let go.
class FeatureRecorder final : public Drafter {
 public:
  FeatureRecorder(std::vector<std::int64_t> layers, bool normed) {
    features_.layers = std::move(layers);
    features_.normed = normed;
    if (!features_.any()) {
      throw InvalidArgument(expected_got("features", "at least one to record", "none"));
    }
  }

  const std::string& name() const override { return name_; }
  const TargetFeatures& features() const override { return features_; }
  void admit(SequenceId id, std::span<const TokenId>, std::int64_t) override { running_[id]; }
  void propose(std::span<const DraftRequest>, std::span<DraftTree>) override {}
  void observe(SequenceId, std::span<const TokenId>) override {}

  void observe_features(std::span<const ObservedFeatures> batch) override {
    for (const ObservedFeatures& seen : batch) {
      std::vector<std::uint16_t>& kept = running_.at(seen.id);
      const std::int64_t parts = features_.count();
      for (std::int64_t row = 0; row < seen.rows.size(); ++row) {
        for (std::int64_t part = 0; part < parts; ++part) {
          const std::span<const float> values = seen.rows.part(row, part);
          const std::size_t at = kept.size();
          kept.resize(at + values.size());
          for (std::size_t i = 0; i < values.size(); ++i) kept[at + i] = to_bfloat16(values[i]);
        }
      }
      if (seen.rows.size() > 0) width_ = seen.rows.width();
    }
  }

  void finished(SequenceId id, std::span<const TokenId>) override {
    done_[id] = std::move(running_.at(id));
  }
  void release(SequenceId id) override { running_.erase(id); }

  MemoryUse memory() const override {
    MemoryUse use;
    for (const auto* kept : {&running_, &done_}) {
      for (const auto& [id, values] : *kept) {
        use.other += static_cast<std::int64_t>(values.capacity() * sizeof(std::uint16_t));
      }
    }
    return use;
  }

  /// [positions, width] of a sequence that has come to its end.
  std::pair<std::vector<std::uint16_t>, std::int64_t> take(SequenceId id) {
    const auto found = done_.find(id);
    if (found == done_.end()) {
      throw InvalidArgument(
          expected_got("id", "a sequence that has ended and was not taken", std::to_string(id)));
    }
    std::vector<std::uint16_t> values = std::move(found->second);
    done_.erase(found);
    return {std::move(values), width_};
  }

 private:
  std::string name_ = "features";
  TargetFeatures features_;
  std::int64_t width_ = 1;
  std::unordered_map<SequenceId, std::vector<std::uint16_t>> running_, done_;
};

}  // namespace

void bind_features(py::module_& module) {
  py::class_<FeatureRecorder, Drafter, std::shared_ptr<FeatureRecorder>>(
      module, "FeatureRecorder",
      "A drafter that drafts nothing and keeps the target's hidden states of its sequences.")
      .def(py::init<std::vector<std::int64_t>, bool>(), py::kw_only(), py::arg("feature_layers"),
           py::arg("feature_normed"), "Which states, as the decoder's arguments of these names.")
      .def(
          "take",
          [](FeatureRecorder& recorder, SequenceId id) {
            auto taken = recorder.take(id);
            auto* kept = new std::vector<std::uint16_t>(std::move(taken.first));
            const py::capsule owner(kept, [](void* pointer) {
              delete static_cast<std::vector<std::uint16_t>*>(pointer);
            });
            const auto columns = static_cast<py::ssize_t>(taken.second);
            const auto rows = static_cast<py::ssize_t>(kept->size()) / columns;
            return py::array_t<std::uint16_t>({rows, columns}, kept->data(), owner);
          },
          py::arg("id"),
          "Those of a sequence that has ended, bfloat16 bits [positions, states * hidden], once.\n"
          "The last token was not run unless it belongs to the prompt, so it has none.");
}

}  // namespace specrt::python
