// The target drafts for itself: fewer layers, a coarser precision.

#include <cstring>
#include <string>

#include "check.h"
#include "model/weights.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::DecoderOptions;
using specrt::DraftModelOptions;
using specrt::InvalidArgument;
using specrt::Model;
using specrt::ModelConfig;
using specrt::Precision;
using specrt::Verification;
using specrt::WeightEntry;
using tiny::Output;
using tiny::Request;

tiny::Spec deep_spec(Precision precision = Precision::f32) {
  tiny::Spec spec = tiny::small_spec(precision, 23);
  spec.layers = 4;
  return spec;
}

Model windowed_model(Precision precision) {
  const tiny::Spec spec = deep_spec(precision);
  ModelConfig config = tiny::config_of(spec);
  config.windows = {6, 0, 6, 0};
  return tiny::build(config, precision, tiny::random_tensors(spec));
}

std::vector<Request> requests_for(std::int64_t vocab) {
  std::vector<Request> requests(5);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(900 + i, 1 + 11 * i, vocab);
    requests[i].params.max_tokens = static_cast<std::int64_t>(30 + 7 * i);
    requests[i].params.logprobs = 2;
    requests[i].params.seed = 5 + i;
    requests[i].arrival = static_cast<int>(i % 3);
  }
  requests[1].params.temperature = 1.0;
  requests[2].params.temperature = 0.7;
  requests[2].params.top_p = 0.9;
  requests[3].params.repetition_penalty = 1.3;
  return requests;
}

DraftModelOptions draft_options() {
  DraftModelOptions options;
  options.kv_cache_bytes = 1 << 22;
  options.threads = 1;
  options.check_invariants = true;
  return options;
}

std::vector<Output> run(const Model& model, const std::vector<Request>& given,
                        const std::shared_ptr<specrt::Drafter>& drafter,
                        const DecoderOptions& options, const tiny::Planner& planner) {
  std::vector<Request> requests = given;
  for (Request& request : requests) request.drafter = drafter;
  specrt::Decoder decoder(model, options);
  return tiny::run(decoder, requests, planner);
}

void check_same(const std::vector<Output>& a, const std::vector<Output>& b) {
  CHECK_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) CHECK_EQ(tiny::difference(a[i], b[i]), "");
}

void check_same_drafts(const std::vector<Output>& a, const std::vector<Output>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK_EQ(a[i].counters.drafted, b[i].counters.drafted);
    CHECK_EQ(a[i].counters.accepted, b[i].counters.accepted);
    CHECK((a[i].counters.accepted_at == b[i].counters.accepted_at));
  }
}

}  // namespace

// Reading the target's cache is as good as a cache of its own: the same drafts, token for token.
TEST(self_draft_of_first_layers_reads_the_targets_cache) {
  std::int64_t accepted = 0;
  for (const Precision precision : {Precision::f32, Precision::bf16, Precision::w8a8}) {
    for (const bool windows : {false, true}) {
      const Model model =
          windows ? windowed_model(precision) : tiny::random_model(deep_spec(precision));
      const std::vector<Request> requests = requests_for(model.config().vocab_size);
      for (const char* kv : {"auto", "int8"}) {
        const DecoderOptions options = tiny::options_for(model, 5, 128, 4, kv);
        const std::vector<Output> plain = run(model, requests, nullptr, options, tiny::fixed(0));
        for (const std::int64_t layers : {1, 3}) {
          DraftModelOptions own = draft_options();
          own.kv_cache_dtype = kv;
          for (const tiny::Planner& planner :
               {tiny::fixed(1), tiny::fixed(4), tiny::restless(4, 9)}) {
            const auto drafter = specrt::make_layers_drafter(model, layers);
            CHECK_EQ(drafter->memory().weights, 0);
            CHECK_EQ(drafter->memory().kv_cache, 0);
            const std::vector<Output> outputs = run(model, requests, drafter, options, planner);
            check_same(outputs, plain);
            const auto other = specrt::make_model_drafter(
                specrt::make_self_draft(model, precision, layers), model.config().vocab_size, own);
            check_same_drafts(outputs, run(model, requests, other, options, planner));
            for (const Output& output : outputs) {
              CHECK(output.counters.drafted > 0);
              accepted += output.counters.accepted;
            }
          }
        }
      }
    }
  }
  CHECK(accepted > 100);
}

// With `rejection` and `block` it samples by itself, over a cache of its own or the target's.
TEST(self_draft_of_first_layers_with_other_verifications) {
  const Model model = tiny::random_model(deep_spec());
  const DecoderOptions options = tiny::options_for(model, 5, 128, 4);
  for (const Verification verification :
       {Verification::rejection, Verification::block, Verification::typical}) {
    std::vector<Request> requests = requests_for(model.config().vocab_size);
    for (Request& request : requests) {
      request.params.verification = verification;
      request.params.temperature = 0.9;
    }
    const std::vector<Output> outputs =
        run(model, requests, specrt::make_layers_drafter(model, 2), options, tiny::fixed(3));
    const auto other = specrt::make_model_drafter(specrt::make_self_draft(model, Precision::f32, 2),
                                                  model.config().vocab_size, draft_options());
    const std::vector<Output> expected = run(model, requests, other, options, tiny::fixed(3));
    check_same(outputs, expected);
    check_same_drafts(outputs, expected);
  }
}

TEST(self_draft_of_first_layers_belongs_to_its_target) {
  const Model model = tiny::random_model(deep_spec());
  const Model other = tiny::random_model(deep_spec());
  const std::vector<Output> outputs =
      run(other, requests_for(61), specrt::make_layers_drafter(model, 2),
          tiny::options_for(other, 5, 128, 4), tiny::fixed(3));
  for (const Output& output : outputs) {
    CHECK(output.finish == specrt::Finish::error);
    CHECK(output.error.find("the model that it was made for") != std::string::npos);
  }
  CHECK_THROWS(specrt::make_layers_drafter(model, 0), InvalidArgument, "from 1 to 3");
  CHECK_THROWS(specrt::make_layers_drafter(model, 4), InvalidArgument, "from 1 to 3");
}

// A coarser model of the target's own weights is the one that the same weights would be loaded as.
TEST(self_draft_rounds_as_loading_does) {
  for (const bool tied : {false, true}) {
    for (const Precision target : {Precision::f32, Precision::bf16}) {
      tiny::Spec spec = deep_spec(target);
      spec.tied = tied;
      spec.qkv_bias = true;
      spec.mlp_bias = true;
      const ModelConfig config = tiny::config_of(spec);
      tiny::Tensors tensors = tiny::random_tensors(spec);
      // Weights that bf16 can hold, so that both round the same values.
      for (auto& [name, values] : tensors) {
        for (float& value : values)
          value = specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value));
      }
      const Model model = tiny::build(config, target, tensors);
      for (const Precision coarse :
           {Precision::bf16, Precision::int8, Precision::w8a8, Precision::int4}) {
        if (coarse == target) continue;
        const Model draft = specrt::make_self_draft(model, coarse, config.num_layers);
        // As ModelBuilder likes them best: in the order in which a pass reads them.
        specrt::ModelBuilder builder(config, coarse);
        const auto set = [&](const std::string& name) {
          for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
            if (tensor.name != name) continue;
            builder.set(name, tensor.shape, specrt::DType::f32, tensors.at(name).data());
          }
        };
        set("embedding");
        for (int i = 0; i < 4; ++i) {
          const std::string layer = "layers." + std::to_string(i) + ".";
          for (const char* part :
               {"attention_norm", "attention.q", "attention.q.bias", "attention.k",
                "attention.k.bias", "attention.v", "attention.v.bias", "attention.o", "mlp_norm",
                "mlp.gate", "mlp.gate.bias", "mlp.up", "mlp.up.bias", "mlp.down",
                "mlp.down.bias"}) {
            set(layer + part);
          }
        }
        set("norm");
        set("lm_head");
        const Model loaded = builder.build();
        CHECK_EQ(draft.weight_bytes(), specrt::self_draft_bytes(config, target, coarse, 4));
        CHECK(draft.weight_bytes() < loaded.weight_bytes());
        int shared = 0;
        for (const auto& [name, entry] : loaded.data().layout.entries) {
          const std::byte* at = nullptr;
          const WeightEntry* found = draft.data().find_entry(name, &at);
          CHECK(found != nullptr && found->precision == entry.precision);
          CHECK_EQ(std::memcmp(at, loaded.data().arena() + entry.offset,
                               static_cast<std::size_t>(entry.bytes)),
                   0);
          shared += draft.data().layout.entries.count(name) == 0 ? 1 : 0;
        }
        CHECK(shared >= 9);  // norms and biases, at least
        // The embedding has activations' dtype in every precision but fp32.
        CHECK_EQ(draft.data().layout.entries.count("embedding"),
                 !tied && target == Precision::f32 ? 1u : 0u);
      }
    }
  }
}

TEST(self_draft_shares_an_int8_head) {
  const Model model = tiny::random_model(deep_spec(Precision::int8));
  for (const Precision coarse : {Precision::int4, Precision::w8a8}) {
    const Model draft = specrt::make_self_draft(model, coarse, 4);
    CHECK_EQ(draft.data().head.data, model.data().head.data);
    CHECK_EQ(draft.data().embedding, model.data().embedding);
    const ModelConfig& config = model.config();  // a table of bf16 and a head of int8 are shared
    CHECK(draft.weight_bytes() <=
          specrt::weight_bytes(config, coarse) - 3 * config.vocab_size * config.hidden_size);
  }
  const Model view = specrt::make_self_draft(model, Precision::int8, 2);
  CHECK_EQ(view.weight_bytes(), 0);
  CHECK_EQ(view.config().num_layers, 2);
  CHECK_THROWS(view.save("/tmp/specrt_never_written.specrt"), InvalidArgument, "shares them");
}

TEST(self_draft_outlives_its_target) {
  Model draft;
  {
    const Model model = tiny::random_model(deep_spec(Precision::bf16));
    draft = specrt::make_self_draft(model, Precision::int4, 2);
  }
  const auto drafter = specrt::make_model_drafter(draft, 61, draft_options());
  const Model target = tiny::random_model(deep_spec(Precision::bf16));
  const auto requests = requests_for(61);
  const DecoderOptions options = tiny::options_for(target, 5, 128, 4);
  check_same(run(target, requests, drafter, options, tiny::fixed(3)),
             run(target, requests, nullptr, options, tiny::fixed(0)));
}

TEST(self_draft_refuses) {
  const Model model = tiny::random_model(deep_spec(Precision::int8));
  const auto make = [&](Precision precision, std::int64_t layers) {
    return specrt::make_self_draft(model, precision, layers);
  };
  CHECK_THROWS(make(Precision::int8, 4), InvalidArgument, "the target itself");
  CHECK_THROWS(make(Precision::int8, 5), InvalidArgument, "from 1 to the target's 4");
  CHECK_THROWS(make(Precision::int4, 0), InvalidArgument, "from 1 to the target's 4");
  CHECK_THROWS(make(Precision::bf16, 4), InvalidArgument, "coarser than the target's int8");
  CHECK_THROWS(make(Precision::bf16, 2), InvalidArgument, "coarser than the target's int8");
  CHECK_THROWS(specrt::make_self_draft(Model(), Precision::int4, 1), InvalidArgument, "loaded");
}
