#include "specrt/decoder.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <exception>
#include <optional>

#include "bindings.h"
#include "cache_options.h"
#include "specrt/error.h"

namespace specrt::python {
namespace {

DecoderOptions make_options(std::int64_t kv_cache_bytes, std::int64_t max_model_len,
                            int max_batch_size, int max_rows, int block_size,
                            const std::string& kv_cache_dtype, bool enable_prefix_caching,
                            std::shared_ptr<ThreadTeam> team, const std::string& cpu_isa,
                            bool check_invariants, std::vector<std::int64_t> feature_layers,
                            bool feature_normed, const std::string& device = "cpu") {
  auto options =
      cache_options<DecoderOptions>(kv_cache_bytes, max_model_len, max_batch_size, max_rows,
                                    block_size, kv_cache_dtype, enable_prefix_caching);
  options.features.layers = std::move(feature_layers);
  options.features.normed = feature_normed;
  options.team = std::move(team);
  options.cpu_isa = cpu_isa;
  options.device = device;
  options.check_invariants = check_invariants;
  return options;
}

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::none:
      return "";
    case Finish::stop:
      return "stop";
    case Finish::length:
      return "length";
    case Finish::error:
      return "error";
  }
  return "";
}

// Typed for the stubs.
using PyLogprobs =
    py::typing::Tuple<float, std::int64_t, py::typing::List<py::typing::Tuple<TokenId, float>>>;
using PyLogprobsList = py::typing::Optional<py::typing::List<PyLogprobs>>;
using PyProgress =
    py::typing::Tuple<SequenceId, py::typing::List<TokenId>, PyLogprobsList, PyLogprobsList,
                      py::str, py::typing::Optional<SequenceCounters>, py::str>;
using PyState = py::typing::Tuple<SequenceId, std::int64_t, std::int64_t, std::int64_t, bool>;

py::object token_logprobs(const TokenLogprobs& entry) {
  py::list top;
  for (const auto& [token, logprob] : entry.top) top.append(py::make_tuple(token, logprob));
  return py::make_tuple(entry.logprob, entry.rank, top);
}

py::object logprobs_list(std::span<const TokenLogprobs> entries) {
  if (entries.empty()) return py::none();
  py::list out;
  for (const TokenLogprobs& entry : entries) out.append(token_logprobs(entry));
  return out;
}

// (id, tokens, logprobs or None, prompt_logprobs or None, finish or "", counters or None, error):
// plain tuples, since one is made for every sequence and round.
py::typing::List<PyProgress> to_python(std::span<const Progress> progress) {
  py::typing::List<PyProgress> out;
  for (const Progress& p : progress) {
    py::list tokens;
    for (const TokenId token : p.tokens) tokens.append(token);
    py::object counters = py::none();
    if (p.finish != Finish::none) counters = py::cast(*p.counters);
    out.append(py::make_tuple(p.id, tokens, logprobs_list(p.logprobs),
                              logprobs_list(p.prompt_logprobs), finish_name(p.finish), counters,
                              p.error));
  }
  return out;
}

using PyTimes = py::typing::Tuple<std::int64_t, double, double, double>;
using PyTotals = py::typing::Tuple<std::int64_t, std::int64_t, SequenceCounters>;
using PyShare = py::typing::Tuple<SequenceId, std::int64_t, py::typing::List<TokenId>,
                                  py::typing::List<std::int32_t>, py::typing::List<float>,
                                  py::typing::List<py::typing::List<py::str>>,
                                  py::typing::List<std::int32_t>, py::typing::List<TokenId>>;

template <typename T>
py::list list_of(std::span<const T> values) {
  py::list out;
  for (const T value : values) out.append(value);
  return out;
}

// For each node the names of the drafters that proposed it.
py::list node_sources(const DraftTree& tree) {
  py::list out;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    py::list names;
    if (tree.sources().empty()) names.append(tree.source());
    const std::uint32_t bits = tree.sources_of(static_cast<std::int32_t>(node));
    for (std::size_t i = 0; i < tree.sources().size(); ++i) {
      if ((bits >> i & 1u) != 0) names.append(tree.sources()[i]);
    }
    out.append(names);
  }
  return out;
}

py::object to_python(const RoundShare& share) {
  const DraftTree& tree = *share.draft;
  return py::make_tuple(share.id, share.prompt_tokens, list_of(tree.tokens()),
                        list_of(tree.parents()), list_of(tree.log_probs()), node_sources(tree),
                        list_of(share.accepted), list_of(share.emitted));
}

using Items = std::vector<std::pair<SequenceId, std::int64_t>>;

Items to_items(const Plan& plan) {
  Items items;
  items.reserve(plan.size());
  for (const PlanItem& item : plan) items.emplace_back(item.id, item.tokens);
  return items;
}

Plan to_plan(const Items& items) {
  Plan plan;
  plan.reserve(items.size());
  for (const auto& [id, tokens] : items) plan.push_back({id, tokens});
  return plan;
}

void bind_counters(py::module_& module) {
  py::class_<SourceCounters>(module, "SourceCounters", "What one drafter's nodes came to.")
      .def_readonly("source", &SourceCounters::source)
      .def_readonly("drafted", &SourceCounters::drafted)
      .def_readonly("accepted", &SourceCounters::accepted);
  py::class_<SequenceCounters>(module, "SequenceCounters", "Counters of one sequence.")
      .def_readonly("prompt_tokens", &SequenceCounters::prompt_tokens)
      .def_readonly("cached_prompt_tokens", &SequenceCounters::cached_prompt_tokens)
      .def_readonly("tokens", &SequenceCounters::tokens)
      .def_readonly("rounds", &SequenceCounters::rounds)
      .def_readonly("drafts", &SequenceCounters::drafts)
      .def_readonly("drafted", &SequenceCounters::drafted)
      .def_readonly("accepted", &SequenceCounters::accepted)
      .def_readonly("truncated_rounds", &SequenceCounters::truncated_rounds)
      .def_readonly("full_rounds", &SequenceCounters::full_rounds)
      .def_readonly("full_accepted", &SequenceCounters::full_accepted)
      .def_readonly("first_rejections", &SequenceCounters::first_rejections)
      .def_readonly("drafted_at", &SequenceCounters::drafted_at)
      .def_readonly("accepted_at", &SequenceCounters::accepted_at)
      .def_readonly("first_rejected_at", &SequenceCounters::first_rejected_at)
      .def_readonly("preemptions", &SequenceCounters::preemptions)
      .def_readonly("sources", &SequenceCounters::sources)
      .def_readonly("draft_seconds", &SequenceCounters::draft_seconds)
      .def_readonly("verify_seconds", &SequenceCounters::verify_seconds)
      .def_readonly("sample_seconds", &SequenceCounters::sample_seconds)
      .def_readonly("prefill_seconds", &SequenceCounters::prefill_seconds);
}

}  // namespace

namespace {

/// Runs part of a round without the GIL. An interrupt that a hook met is raised here also where the
/// round fails: nobody else's call is to meet it.
template <typename Part>
void in_round(const Part& part) {
  std::exception_ptr failure;
  {
    const py::gil_scoped_release released;
    try {
      part();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure == nullptr) return;
  raise_noted_interrupt();
  std::rethrow_exception(failure);
}

}  // namespace

void bind_decoder(py::module_& module) {
  bind_counters(module);

  module.def(
      "resolve_kv_cache_dtype",
      [](const std::string& kv_cache_dtype, const std::string& dtype) {
        return resolve_kv_cache_dtype(kv_cache_dtype, activation_dtype(precision_from_name(dtype)));
      },
      py::arg("kv_cache_dtype"), py::arg("dtype"),
      "What a kv_cache_dtype comes to for a model of that dtype.");
  module.def(
      "memory_of",
      [](const ModelConfig& config, const std::string& dtype, std::int64_t kv_cache_bytes,
         std::int64_t max_model_len, int max_batch_size, int max_rows, int block_size,
         const std::string& kv_cache_dtype, bool enable_prefix_caching,
         std::vector<std::int64_t> feature_layers, bool feature_normed, const std::string& device) {
        return memory_of(
            config, precision_from_name(dtype),
            make_options(kv_cache_bytes, max_model_len, max_batch_size, max_rows, block_size,
                         kv_cache_dtype, enable_prefix_caching, nullptr, "auto", false,
                         std::move(feature_layers), feature_normed, device));
      },
      py::arg("config"), py::arg("dtype"), py::kw_only(), py::arg("kv_cache_bytes"),
      py::arg("max_model_len"), py::arg("max_batch_size"), py::arg("max_rows"),
      py::arg("block_size"), py::arg("kv_cache_dtype") = "auto", py::arg("enable_prefix_caching"),
      py::arg("feature_layers") = std::vector<std::int64_t>(), py::arg("feature_normed") = false,
      py::arg("device") = "cpu", "What a Decoder of these options takes, before it is made.");
  module.def(
      "kv_cache_bytes_for",
      [](const ModelConfig& config, const std::string& dtype, std::int64_t max_model_len,
         int max_batch_size, int max_rows, int block_size, bool enable_prefix_caching,
         std::int64_t sequences, std::int64_t tokens, const std::string& kv_cache_dtype) {
        return kv_cache_bytes_for(
            config, precision_from_name(dtype),
            make_options(0, max_model_len, max_batch_size, max_rows, block_size, kv_cache_dtype,
                         enable_prefix_caching, nullptr, "auto", false, {}, false),
            sequences, tokens);
      },
      py::arg("config"), py::arg("dtype"), py::kw_only(), py::arg("max_model_len"),
      py::arg("max_batch_size"), py::arg("max_rows"), py::arg("block_size"),
      py::arg("enable_prefix_caching"), py::arg("sequences"), py::arg("tokens"),
      py::arg("kv_cache_dtype") = "auto", "KV bytes for that many sequences of that many tokens.");

  py::class_<Decoder>(module, "Decoder", "Rounds of draft, verify and commit over one target.")
      .def(
          py::init([](const Model& model, std::int64_t kv_cache_bytes, std::int64_t max_model_len,
                      int max_batch_size, int max_rows, int block_size,
                      const std::string& kv_cache_dtype, bool enable_prefix_caching,
                      std::shared_ptr<ThreadTeam> team, const std::string& cpu_isa,
                      bool check_invariants, std::vector<std::int64_t> feature_layers,
                      bool feature_normed, const std::string& device) {
            const DecoderOptions options =
                make_options(kv_cache_bytes, max_model_len, max_batch_size, max_rows, block_size,
                             kv_cache_dtype, enable_prefix_caching, std::move(team), cpu_isa,
                             check_invariants, std::move(feature_layers), feature_normed, device);
            const py::gil_scoped_release released;
            return std::make_unique<Decoder>(model, options);
          }),
          py::arg("model"), py::kw_only(), py::arg("kv_cache_bytes"), py::arg("max_model_len"),
          py::arg("max_batch_size"), py::arg("max_rows"), py::arg("block_size"),
          py::arg("kv_cache_dtype") = "auto", py::arg("enable_prefix_caching"), py::arg("team"),
          py::arg("cpu_isa"), py::arg("check_invariants"),
          py::arg("feature_layers") = std::vector<std::int64_t>(),
          py::arg("feature_normed") = false, py::arg("device") = "cpu",
          "feature_layers, feature_normed: the target's hidden states that drafters may read: the\n"
          "residual stream as it enters these layers, and the final norm's output.")
      .def(
          "add",
          [](Decoder& decoder, const std::vector<TokenId>& prompt, const SamplingParams& params,
             std::optional<std::shared_ptr<Drafter>> drafter,
             std::optional<std::shared_ptr<TokenConstraint>> constraint, std::int64_t reserve,
             double waited_seconds) {
            const py::gil_scoped_release released;
            return decoder.add(prompt, params, drafter.value_or(nullptr),
                               constraint.value_or(nullptr), reserve, waited_seconds);
          },
          py::arg("prompt"), py::arg("params"), py::arg("drafter") = py::none(),
          py::arg("constraint") = py::none(), py::arg("reserve") = -1,
          py::arg("waited_seconds") = 0.0,
          "reserve: output tokens to set KV blocks aside for; -1: all of them.")
      .def("can_add", &Decoder::can_add, py::arg("prompt_tokens"), py::arg("max_tokens"),
           py::arg("reserve") = -1)
      .def(
          "check",
          [](const Decoder& decoder, const std::vector<TokenId>& prompt,
             const SamplingParams& params) { decoder.check(prompt, params); },
          py::arg("prompt"), py::arg("params"),
          "Raises what add() would raise however empty the decoder is.")
      .def("stop", &Decoder::stop, py::arg("id"), py::arg("dropped"),
           py::call_guard<py::gil_scoped_release>(),
           "Ends a sequence in its last round less `dropped` tokens; returns its counters.")
      .def("cancel", &Decoder::cancel, py::arg("id"), py::call_guard<py::gil_scoped_release>(),
           "Ends a sequence, also a preempted one; returns its counters.")
      .def("preempt", &Decoder::preempt, py::arg("id"), py::call_guard<py::gil_scoped_release>(),
           "Takes a sequence out and frees its blocks; resume() puts it back.")
      .def("can_resume", &Decoder::can_resume, py::arg("id"), py::arg("reserve") = -1)
      .def("resume", &Decoder::resume, py::arg("id"), py::arg("reserve") = -1,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("idle", &Decoder::idle)
      .def("draft_limit", &Decoder::draft_limit, py::arg("id"), py::arg("most"),
           "How many of `most` draft nodes are worth asking for, by this sequence's drafts so far.")
      .def(
          "sequences",
          [](const Decoder& decoder) {
            py::typing::List<PyState> out;
            for (const SequenceState& s : decoder.sequences()) {
              out.append(
                  py::make_tuple(s.id, s.prompt_left, s.length, s.tokens_left, s.has_drafter));
            }
            return out;
          },
          "(id, prompt_left, length, tokens_left, has_drafter) of each running sequence.")
      .def("most_tokens", &Decoder::most_tokens, py::arg("prompt_tokens"),
           "The tokens that context and KV cache have room for behind a prompt.")
      .def(
          "round",
          [](Decoder& decoder, const Items& plan) {
            const Plan items = to_plan(plan);
            std::span<const Progress> progress;
            in_round([&] { progress = decoder.round(items); });
            raise_noted_interrupt();
            return to_python(progress);
          },
          py::arg("plan"),
          "A round, of (id, tokens) pairs: a list of (id, tokens, logprobs, prompt_logprobs, "
          "finish, "
          "counters, error).")
      .def(
          "policy_round",
          [](Decoder& decoder, std::int64_t num_speculative_tokens)
              -> std::optional<std::pair<Items, py::typing::List<PyProgress>>> {
            Plan plan;
            std::span<const Progress> progress;
            bool fits = true;
            in_round([&] {
              plan = plan_policies(decoder, num_speculative_tokens);
              // One alone has nobody to make room for it: the round says what it lacks.
              fits = decoder.sequences().size() == 1 || !decoder.reserve(plan);
              if (fits) progress = decoder.round(plan);
            });
            raise_noted_interrupt();
            if (!fits) return std::nullopt;
            return std::pair(to_items(plan), to_python(progress));
          },
          py::arg("num_speculative_tokens"),
          "A round of every sequence under its own policy: the plan, and what round() gives.\n"
          "None where the pool lacks blocks for the plan and another sequence could make room.")
      .def_property_readonly(
          "totals",
          [](const Decoder& decoder) -> PyTotals {
            const DecoderTotals& totals = decoder.totals();
            return py::make_tuple(totals.passes, totals.rows, totals.counters);
          },
          "(passes, rows, counters of all sequences together) since it was made.")
      .def("clear_totals", &Decoder::clear_totals, "Counts anew.")
      .def_property_readonly(
          "last_times",
          [](const Decoder& decoder) -> PyTimes {
            const RoundTimes times = decoder.last_times();
            return py::make_tuple(times.rows, times.draft_seconds, times.verify_seconds,
                                  times.sample_seconds);
          },
          "(rows, draft_seconds, verify_seconds, sample_seconds) of the last finished round.")
      .def(
          "last_round",
          [](const Decoder& decoder) {
            py::typing::List<PyShare> out;
            for (const RoundShare& share : decoder.last_round()) out.append(to_python(share));
            return out;
          },
          "The sequences of the last finished round: (id, prompt_tokens, tokens, parents, "
          "log_probs, sources of each node, accepted nodes, emitted tokens).")
      .def_property(
          "cost_model", [](const Decoder& decoder) { return decoder.cost_model(); },
          [](Decoder& decoder, const CostModel& model) { decoder.set_cost_model(model); })
      .def_property_readonly("ema_steps", &Decoder::ema_steps,
                             "How many steps policy ema_tiers would have sequences draft now.")
      .def_property_readonly("memory", &Decoder::memory)
      .def_property_readonly("max_model_len", &Decoder::max_model_len)
      .def_property_readonly("max_rows", &Decoder::max_rows)
      .def_property_readonly("vocab_size", &Decoder::vocab_size)
      .def_property_readonly("free_kv_tokens", &Decoder::free_kv_tokens)
      .def_property_readonly("cpu_isa",
                             [](const Decoder& d) { return std::string(name_of(d.cpu_isa())); })
      .def_property_readonly("threads", &Decoder::threads)
      .def("check_invariants", &Decoder::check_invariants);

  module.def(
      "measure_cost",
      [](Decoder& decoder, std::optional<std::shared_ptr<Drafter>> drafter,
         std::int64_t num_speculative_tokens, double seconds, int passes) {
        const py::gil_scoped_release released;
        return measure_cost(decoder, drafter.value_or(nullptr), num_speculative_tokens, seconds,
                            passes);
      },
      py::arg("decoder"), py::arg("drafter"), py::arg("num_speculative_tokens"),
      py::arg("seconds") = 2.0, py::arg("passes") = 20,
      "What passes and drafts cost here, measured with sequences of its own.");

  module.def(
      "plan_fixed",
      [](const Decoder& decoder, std::int64_t num_speculative_tokens) {
        return to_items(plan_fixed(decoder, num_speculative_tokens));
      },
      py::arg("decoder"), py::arg("num_speculative_tokens"),
      "As if every sequence that drafts had policy fixed.");
}

}  // namespace specrt::python
