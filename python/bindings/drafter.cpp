#include "specrt/drafter.h"

#include <pybind11/stl.h>

#include <cmath>

#include "bindings.h"
#include "cache_options.h"
#include "specrt/error.h"
#include "specrt/model.h"

namespace specrt::python {
namespace {

/// A drafter written in Python: an object with propose(tokens, budget) and, if it likes,
/// observe(committed) and a number step_cost.
class PythonDrafter final : public Drafter {
 public:
  explicit PythonDrafter(py::object object)
      : object_(std::move(object)), name_(py::str(py::type::of(object_).attr("__name__"))) {
    const py::object cost = py::getattr(object_, "step_cost", py::float_(0.0));
    const bool is_number =
        PyFloat_Check(cost.ptr()) || (PyLong_Check(cost.ptr()) && !PyBool_Check(cost.ptr()));
    step_cost_ = is_number ? PyFloat_AsDouble(cost.ptr()) : -1.0;
    if (PyErr_Occurred() != nullptr) PyErr_Clear();  // too large an int is -1
    if (!std::isfinite(step_cost_) || step_cost_ < 0.0) {
      throw InvalidArgument(
          expected_got("step_cost", "a number >= 0", py::repr(cost).cast<std::string>()));
    }
  }

  ~PythonDrafter() override {
    const py::gil_scoped_acquire held;
    object_ = py::object();
  }

  const std::string& name() const override { return name_; }
  void admit(SequenceId, std::span<const TokenId>, std::int64_t) override {}
  void release(SequenceId) override {}
  MemoryUse memory() const override { return {}; }
  double step_cost(std::int64_t) const override { return step_cost_; }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    call_python("", [&] {
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const std::vector<TokenId> tokens(requests[i].tokens.begin(), requests[i].tokens.end());
        const py::object tree = object_.attr("propose")(tokens, requests[i].max_nodes);
        if (tree.is_none()) continue;
        if (!py::isinstance<DraftTree>(tree)) {
          throw InvalidArgument(expected_got("propose", "a DraftTree or None",
                                             py::str(py::type::of(tree)).cast<std::string>()));
        }
        out[i] = tree.cast<DraftTree>();
        if (out[i].source().empty()) out[i].set_source(name_);
      }
    });
  }

  void observe(SequenceId, std::span<const TokenId> committed) override {
    call_python("", [&] {
      object_.attr("observe")(std::vector<TokenId>(committed.begin(), committed.end()));
    });
  }

 private:
  py::object object_;
  std::string name_;
  double step_cost_ = 0.0;
};

/// Another drafter, and a function that is told every draft: (tokens so far, tree).
class WatchedDrafter final : public Drafter {
 public:
  WatchedDrafter(std::shared_ptr<Drafter> inner, py::object told)
      : inner_(std::move(inner)), told_(std::move(told)) {}
  ~WatchedDrafter() override {
    const py::gil_scoped_acquire held;
    told_ = py::object();
  }

  const std::string& name() const override { return inner_->name(); }
  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    inner_->admit(id, prompt, max_length);
  }
  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    inner_->propose(requests, out);
    call_python("", [&] {
      for (std::size_t i = 0; i < requests.size(); ++i) {
        told_(std::vector<TokenId>(requests[i].tokens.begin(), requests[i].tokens.end()), out[i]);
      }
    });
  }
  void observe(SequenceId id, std::span<const TokenId> committed) override {
    inner_->observe(id, committed);
  }
  const TargetFeatures& features() const override { return inner_->features(); }
  bool wants_features(SequenceId id) const override { return inner_->wants_features(id); }
  std::int64_t known_positions(SequenceId id) const override { return inner_->known_positions(id); }
  void observe_features(std::span<const ObservedFeatures> batch) override {
    inner_->observe_features(batch);
  }
  bool suspend(SequenceId id) override { return inner_->suspend(id); }
  void resume(SequenceId id, std::span<const TokenId> tokens, std::int64_t max_length) override {
    inner_->resume(id, tokens, max_length);
  }
  void finished(SequenceId id, std::span<const TokenId> tokens) override {
    inner_->finished(id, tokens);
  }
  void release(SequenceId id) override { inner_->release(id); }
  bool tells_laws() const override { return inner_->tells_laws(); }
  MemoryUse memory() const override { return inner_->memory(); }
  double step_cost(std::int64_t target_bytes) const override {
    return inner_->step_cost(target_bytes);
  }

 private:
  std::shared_ptr<Drafter> inner_;
  py::object told_;
};

/// The options of a draft head, given as keywords of several functions.
DraftHeadOptions head_options(const std::string& name, std::int64_t kv_cache_bytes,
                              std::int64_t max_model_len, int max_batch_size, int max_rows,
                              int block_size, const std::string& kv_cache_dtype,
                              bool enable_prefix_caching, std::vector<std::int64_t> feature_layers,
                              bool feature_normed, std::int64_t depth, std::int64_t top_k,
                              std::int64_t modules, std::vector<TokenId> target_of_draft) {
  auto options =
      cache_options<DraftHeadOptions>(kv_cache_bytes, max_model_len, max_batch_size, max_rows,
                                      block_size, kv_cache_dtype, enable_prefix_caching);
  options.name = name;
  options.features.layers = std::move(feature_layers);
  options.features.normed = feature_normed;
  options.depth = depth;
  options.top_k = top_k;
  options.modules = modules;
  options.target_of_draft = std::move(target_of_draft);
  return options;
}

}  // namespace

void bind_drafter(py::module_& module) {
  py::class_<Drafter, std::shared_ptr<Drafter>>(module, "CoreDrafter",
                                                "A drafter as the core sees it.")
      .def_property_readonly("name", &Drafter::name)
      .def_property_readonly("memory", &Drafter::memory);

  module.def(
      "make_ngram_drafter",
      [](std::int64_t min_match, std::int64_t max_match, bool most_recent,
         std::int64_t num_candidates) {
        NgramOptions options;
        options.min_match = min_match;
        options.max_match = max_match;
        options.most_recent = most_recent;
        options.num_candidates = num_candidates;
        return make_ngram_drafter(options);
      },
      py::kw_only(), py::arg("min_match"), py::arg("max_match"), py::arg("most_recent") = true,
      py::arg("num_candidates") = 1);

  module.def("make_synthetic_drafter", &make_synthetic_drafter,
             "Drafts the last token over and over, at no cost.");

  module.def(
      "make_model_drafter",
      [](const Model& model, std::int64_t target_vocab_size, std::int64_t kv_cache_bytes,
         std::int64_t max_model_len, int max_batch_size, int max_rows, int block_size,
         const std::string& kv_cache_dtype, bool enable_prefix_caching,
         std::optional<std::pair<std::vector<TokenId>, std::vector<std::vector<TokenId>>>>
             vocabulary,
         std::shared_ptr<ThreadTeam> team, const std::string& cpu_isa, const std::string& device,
         bool check_invariants) {
        auto options = cache_options<DraftModelOptions>(kv_cache_bytes, max_model_len,
                                                        max_batch_size, max_rows, block_size,
                                                        kv_cache_dtype, enable_prefix_caching);
        options.team = std::move(team);
        options.cpu_isa = cpu_isa;
        options.device = device;
        options.check_invariants = check_invariants;
        std::shared_ptr<VocabularyMap> map;
        if (vocabulary) {
          map = std::make_shared<VocabularyMap>();
          map->draft_of_target = std::move(vocabulary->first);
          map->pieces = std::move(vocabulary->second);
        }
        const py::gil_scoped_release released;
        return make_model_drafter(model, target_vocab_size, options, map);
      },
      py::arg("model"), py::kw_only(), py::arg("target_vocab_size"), py::arg("kv_cache_bytes"),
      py::arg("max_model_len"), py::arg("max_batch_size"), py::arg("max_rows"),
      py::arg("block_size"), py::arg("kv_cache_dtype") = "auto", py::arg("enable_prefix_caching"),
      py::arg("vocabulary") = py::none(), py::arg("team"), py::arg("cpu_isa"),
      py::arg("device") = "cpu", py::arg("check_invariants") = false);

  module.def(
      "memory_of_draft_model",
      [](const ModelConfig& config, const std::string& dtype, std::int64_t target_vocab_size,
         std::int64_t kv_cache_bytes, std::int64_t max_model_len, int max_batch_size, int max_rows,
         int block_size, const std::string& kv_cache_dtype, bool enable_prefix_caching,
         const std::string& device) {
        auto options = cache_options<DraftModelOptions>(kv_cache_bytes, max_model_len,
                                                        max_batch_size, max_rows, block_size,
                                                        kv_cache_dtype, enable_prefix_caching);
        options.device = device;
        return memory_of_draft_model(config, precision_from_name(dtype), options,
                                     target_vocab_size);
      },
      py::arg("config"), py::arg("dtype"), py::kw_only(), py::arg("target_vocab_size"),
      py::arg("kv_cache_bytes"), py::arg("max_model_len"), py::arg("max_batch_size"),
      py::arg("max_rows"), py::arg("block_size"), py::arg("kv_cache_dtype"),
      py::arg("enable_prefix_caching"), py::arg("device") = "cpu",
      "What make_model_drafter() takes, before it is made.");

  module.def("make_layers_drafter", &make_layers_drafter, py::arg("target"), py::kw_only(),
             py::arg("layers"), py::arg("cpu_isa"),
             "The target's first layers as its drafter, over the decoder's own KV cache.");
  module.def("memory_of_layers_drafter", &memory_of_layers_drafter, py::arg("target"),
             "What it takes, before it is made.");

  module.def(
      "make_head_drafter",
      [](const std::vector<Model>& modules, const Model& target, const std::string& name,
         std::int64_t kv_cache_bytes, std::int64_t max_model_len, int max_batch_size, int max_rows,
         int block_size, const std::string& kv_cache_dtype, bool enable_prefix_caching,
         std::vector<std::int64_t> feature_layers, bool feature_normed, std::int64_t depth,
         std::int64_t top_k, std::vector<TokenId> target_of_draft, std::shared_ptr<ThreadTeam> team,
         const std::string& cpu_isa, const std::string& device, bool check_invariants) {
        DraftHeadOptions options = head_options(
            name, kv_cache_bytes, max_model_len, max_batch_size, max_rows, block_size,
            kv_cache_dtype, enable_prefix_caching, std::move(feature_layers), feature_normed, depth,
            top_k, std::ssize(modules), std::move(target_of_draft));
        options.team = std::move(team);
        options.cpu_isa = cpu_isa;
        options.device = device;
        options.check_invariants = check_invariants;
        const py::gil_scoped_release released;
        return make_head_drafter(std::span(modules), target, options);
      },
      py::arg("modules"), py::arg("target"), py::kw_only(), py::arg("name"),
      py::arg("kv_cache_bytes"), py::arg("max_model_len"), py::arg("max_batch_size"),
      py::arg("max_rows"), py::arg("block_size"), py::arg("kv_cache_dtype"),
      py::arg("enable_prefix_caching"), py::arg("feature_layers"), py::arg("feature_normed"),
      py::arg("depth"), py::arg("top_k"), py::arg("target_of_draft"), py::arg("team"),
      py::arg("cpu_isa"), py::arg("device") = "cpu", py::arg("check_invariants") = false,
      "A head over the target's hidden states: a chain (top_k 1) or EAGLE-2's trees. Of several "
      "modules the k-th drafts the k-th token.");
  module.def(
      "head_memory_of",
      [](const ModelConfig& config, const std::string& dtype, std::int64_t target_vocab_size,
         std::int64_t kv_cache_bytes, std::int64_t max_model_len, int max_batch_size, int max_rows,
         int block_size, const std::string& kv_cache_dtype, bool enable_prefix_caching,
         std::vector<std::int64_t> feature_layers, bool feature_normed, std::int64_t depth,
         std::int64_t top_k, std::int64_t modules, std::vector<TokenId> target_of_draft,
         const std::string& device) {
        DraftHeadOptions options =
            head_options("", kv_cache_bytes, max_model_len, max_batch_size, max_rows, block_size,
                         kv_cache_dtype, enable_prefix_caching, std::move(feature_layers),
                         feature_normed, depth, top_k, modules, std::move(target_of_draft));
        options.device = device;
        return memory_of(config, precision_from_name(dtype), options, target_vocab_size);
      },
      py::arg("config"), py::arg("dtype"), py::kw_only(), py::arg("target_vocab_size"),
      py::arg("kv_cache_bytes"), py::arg("max_model_len"), py::arg("max_batch_size"),
      py::arg("max_rows"), py::arg("block_size"), py::arg("kv_cache_dtype"),
      py::arg("enable_prefix_caching"), py::arg("feature_layers"), py::arg("feature_normed"),
      py::arg("depth"), py::arg("top_k"), py::arg("modules"), py::arg("target_of_draft"),
      py::arg("device") = "cpu", "What make_head_drafter() takes, before it is made.");
  module.def(
      "head_kv_cache_bytes_for",
      [](const ModelConfig& config, const std::string& dtype, std::int64_t max_model_len,
         int max_batch_size, int max_rows, int block_size, const std::string& kv_cache_dtype,
         bool enable_prefix_caching, std::vector<std::int64_t> feature_layers, bool feature_normed,
         std::int64_t depth, std::int64_t top_k, std::int64_t modules, std::int64_t sequences,
         std::int64_t tokens) {
        return kv_cache_bytes_for(
            config, precision_from_name(dtype),
            head_options("", 0, max_model_len, max_batch_size, max_rows, block_size, kv_cache_dtype,
                         enable_prefix_caching, std::move(feature_layers), feature_normed, depth,
                         top_k, modules, {}),
            sequences, tokens);
      },
      py::arg("config"), py::arg("dtype"), py::kw_only(), py::arg("max_model_len"),
      py::arg("max_batch_size"), py::arg("max_rows"), py::arg("block_size"),
      py::arg("kv_cache_dtype"), py::arg("enable_prefix_caching"), py::arg("feature_layers"),
      py::arg("feature_normed"), py::arg("depth"), py::arg("top_k"), py::arg("modules"),
      py::arg("sequences"), py::arg("tokens"),
      "A head's KV bytes for that many sequences of that many tokens.");

  module.def(
      "make_watched_drafter",
      [](std::shared_ptr<Drafter> inner, py::object told) -> std::shared_ptr<Drafter> {
        return std::make_shared<WatchedDrafter>(std::move(inner), std::move(told));
      },
      py::arg("inner").none(false), py::arg("told"),
      "The same drafter; told(tokens, tree) is called with every draft that it makes.");

  module.def(
      "make_python_drafter",
      [](py::object object) -> std::shared_ptr<Drafter> {
        return std::make_shared<PythonDrafter>(std::move(object));
      },
      py::arg("object"), "Wraps an object with propose(tokens, budget) and observe(committed).");
}

}  // namespace specrt::python
