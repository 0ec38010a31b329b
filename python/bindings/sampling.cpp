#include "specrt/sampling.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {

void bind_sampling(py::module_& module) {
  py::class_<SamplingParams>(module, "CoreSamplingParams",
                             "The part of specrt.SamplingParams that the core applies.")
      .def(py::init([](std::int64_t max_tokens, std::int64_t min_tokens, double temperature,
                       std::int64_t top_k, double top_p, double min_p, double repetition_penalty,
                       double frequency_penalty, double presence_penalty,
                       std::vector<std::pair<TokenId, float>> logit_bias,
                       std::vector<TokenId> allowed_token_ids,
                       std::vector<std::vector<TokenId>> bad_words, std::uint64_t seed,
                       std::uint32_t sample_index, std::vector<TokenId> stop_token_ids,
                       const std::string& verification, double posterior_threshold,
                       double posterior_alpha, std::int32_t logprobs, std::int32_t prompt_logprobs,
                       const std::string& policy, std::int64_t num_speculative_tokens,
                       double target_tpot_seconds, double target_ttft_seconds,
                       std::vector<double> synthetic_acceptance_rates) {
             SamplingParams params;
             params.max_tokens = max_tokens;
             params.min_tokens = min_tokens;
             params.temperature = temperature;
             params.top_k = top_k;
             params.top_p = top_p;
             params.min_p = min_p;
             params.repetition_penalty = repetition_penalty;
             params.frequency_penalty = frequency_penalty;
             params.presence_penalty = presence_penalty;
             params.logit_bias = std::move(logit_bias);
             params.allowed_token_ids = std::move(allowed_token_ids);
             params.bad_words = std::move(bad_words);
             params.seed = seed;
             params.sample_index = sample_index;
             params.stop_token_ids = std::move(stop_token_ids);
             params.verification = verification_from_name(verification);
             params.posterior_threshold = posterior_threshold;
             params.posterior_alpha = posterior_alpha;
             params.logprobs = logprobs;
             params.prompt_logprobs = prompt_logprobs;
             params.speculation.policy = policy_from_name(policy);
             params.speculation.num_speculative_tokens = num_speculative_tokens;
             params.speculation.target_tpot_seconds = target_tpot_seconds;
             params.speculation.target_ttft_seconds = target_ttft_seconds;
             params.speculation.synthetic_acceptance_rates = std::move(synthetic_acceptance_rates);
             return params;
           }),
           py::kw_only(), py::arg("max_tokens"), py::arg("min_tokens") = 0,
           py::arg("temperature") = 0.0, py::arg("top_k") = 0, py::arg("top_p") = 1.0,
           py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
           py::arg("frequency_penalty") = 0.0, py::arg("presence_penalty") = 0.0,
           py::arg("logit_bias") = std::vector<std::pair<TokenId, float>>{},
           py::arg("allowed_token_ids") = std::vector<TokenId>{},
           py::arg("bad_words") = std::vector<std::vector<TokenId>>{}, py::arg("seed") = 0,
           py::arg("sample_index") = 0, py::arg("stop_token_ids") = std::vector<TokenId>{},
           py::arg("verification") = "coupled", py::arg("posterior_threshold") = 0.09,
           py::arg("posterior_alpha") = 0.3, py::arg("logprobs") = -1,
           py::arg("prompt_logprobs") = -1, py::arg("policy") = "brake",
           py::arg("num_speculative_tokens") = -1, py::arg("target_tpot_seconds") = 0.0,
           py::arg("target_ttft_seconds") = 0.0,
           py::arg("synthetic_acceptance_rates") = std::vector<double>{})
      .def_readonly("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_property_readonly("drafts",
                             [](const SamplingParams& p) { return p.speculation.drafts(); })
      .def_property_readonly("draft_changes_text", &SamplingParams::draft_changes_text)
      .def_property_readonly("lossy", &SamplingParams::lossy)
      .def("check", &SamplingParams::check, py::arg("vocab_size"));
}

}  // namespace specrt::python
