// Hidden states on the emulated device, and draft heads that read them there: the same bits however
// rows come together, what the CPU has within bfloat16's precision, and the bytes of plain decoding
// whatever a head drafts.

#include <cmath>
#include <cstring>
#include <map>
#include <memory>

#include "../native/check.h"
#include "../native/tiny_decode.h"
#include "../native/tiny_heads.h"
#include "../native/tiny_model.h"
#include "cpu/dispatch.h"
#include "decode/head_memory.h"
#include "emulated/emulated.h"
#include "model/runner.h"
#include "specrt/error.h"

namespace {

using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::DraftHeadOptions;
using specrt::DraftTree;
using specrt::FeatureRows;
using specrt::HeadKind;
using specrt::Model;
using specrt::ModelConfig;
using specrt::Precision;
using specrt::Runner;
using specrt::RunnerOptions;
using specrt::TargetFeatures;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;
namespace emulated = specrt::cuda::emulated;

RunnerOptions runner_options(const char* device, const TargetFeatures& features) {
  RunnerOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 20;
  options.max_batch_size = 4;
  options.max_rows = 64;
  options.features = features;
  options.device = device;
  options.poison = true;
  options.team = std::make_shared<specrt::ThreadTeam>(1);
  return options;
}

TargetFeatures every_feature() {
  TargetFeatures features;
  features.layers = {2, 0, 1};
  features.normed = true;
  return features;
}

std::vector<const float*> parts_of(const Runner& runner, const TargetFeatures& features) {
  std::vector<const float*> parts;
  for (const std::int64_t layer : features.layers) parts.push_back(runner.captured(layer));
  if (features.normed) parts.push_back(runner.captured_normed());
  return parts;
}

// Of these rows of the last pass, as a drafter on the host reads them.
using States = std::vector<std::vector<float>>;
States states_of(const Runner& runner, const TargetFeatures& features,
                 const std::vector<std::int64_t>& rows) {
  const std::vector<const float*> parts = parts_of(runner, features);
  const FeatureRows all(parts, rows, runner.config().hidden_size, runner.device_features());
  States out;
  for (std::int64_t i = 0; i < all.size(); ++i) {
    out.emplace_back(static_cast<std::size_t>(all.width()));
    all.copy(i, out.back().data());
  }
  return out;
}

States states_at_once(const Model& model, const char* device, const Tokens& text) {
  Runner runner(model, runner_options(device, every_feature()));
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, std::ssize(text));
  runner.begin();
  (void)runner.add_committed(0, text);
  runner.capture(0, runner.rows());
  runner.forward();
  std::vector<std::int64_t> rows;
  for (std::int64_t row = 0; row < runner.rows(); ++row) rows.push_back(row);
  return states_of(runner, every_feature(), rows);
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

}  // namespace

TEST(cuda_features_are_those_of_the_cpu) {
  for (const int architecture : {80, 90}) {
    emulated::reset();
    emulated::settings().architecture = architecture;
    const tiny::Spec spec = tiny::small_spec(Precision::bf16, 41);
    const Model model = tiny::random_model(spec);
    const Tokens text = tiny::random_tokens(1, 21, spec.vocab);
    const States got = states_at_once(model, "cuda", text);
    const States want = states_at_once(model, "cpu", text);
    CHECK_EQ(got.size(), want.size());
    for (std::size_t r = 0; r < got.size(); ++r) {
      for (std::size_t part = 0; part < 4; ++part) {
        double norm = 0.0;
        double error = 0.0;
        for (std::int64_t i = 0; i < spec.hidden; ++i) {
          const std::size_t at =
              part * static_cast<std::size_t>(spec.hidden) + static_cast<std::size_t>(i);
          norm += double{want[r][at]} * want[r][at];
          error += std::pow(double{got[r][at]} - want[r][at], 2);
        }
        CHECK(norm > 0.0);
        CHECK(std::sqrt(error) <= (part == 1 ? 0.0 : 2e-2) * std::sqrt(norm));  // 1: embeddings
      }
    }
    if (tiny::kThinned) break;
  }
  emulated::reset();
}

// In chunks, beside another sequence, behind padding, along a draft tree.
TEST(cuda_features_row_by_row_the_same_bits) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 42);
  const Model model = tiny::random_model(spec);
  const Tokens text = tiny::random_tokens(2, 40, spec.vocab);
  const Tokens other = tiny::random_tokens(3, 40, spec.vocab);
  const States whole = states_at_once(model, "cuda", text);
  Runner runner(model, runner_options("cuda", every_feature()));
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, 60);
  runner.cache().add(1, 60);
  std::size_t at = 0;
  for (const std::size_t count : {1, 1, 20, 1, 5, 5}) {
    runner.begin();
    (void)runner.add_committed(1, std::span(other).subspan(at, count));
    const std::int64_t first = runner.add_committed(0, std::span(text).subspan(at, count));
    runner.capture(first, static_cast<std::int64_t>(count));
    runner.forward();
    std::vector<std::int64_t> rows;
    for (std::size_t i = 0; i < count; ++i) rows.push_back(first + static_cast<std::int64_t>(i));
    const States got = states_of(runner, every_feature(), rows);
    for (std::size_t i = 0; i < count; ++i) CHECK(same(got[i], whole[at + i]));
    runner.advance(0, static_cast<std::int64_t>(count));
    runner.advance(1, static_cast<std::int64_t>(count));
    at += count;
  }
  runner.begin();
  const std::int64_t root = runner.add_committed(0, std::span(text).subspan(at, 1));
  DraftTree tree;
  std::vector<std::int64_t> rows = {root};
  std::int32_t parent = DraftTree::kRoot;
  for (std::size_t i = at + 1; i < at + 5; ++i) {
    (void)tree.add((text[i] + 1) % 61, parent);
    parent = tree.add(text[i], parent);
    rows.push_back(root + 1 + parent);
  }
  (void)runner.add_tree(0, tree);
  runner.capture(root, runner.rows() - root);
  runner.forward();
  const States got = states_of(runner, every_feature(), rows);
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(same(got[i], whole[at + i]));
}

namespace {

// What a head drafts behind every prefix of a text, from `first` tokens on. The target's features
// come out of one pass; those of `shift` positions further on show what a head does without its
// own.
std::vector<Tokens> drafts_of(const char* device, const std::vector<Model>& modules,
                              const Model& target, DraftHeadOptions own, const Tokens& text,
                              std::int64_t first, std::int64_t shift = 0) {
  own.device = device;
  own.max_rows = 32;
  own.max_batch_size = 2;
  own.modules = std::ssize(modules);
  Runner runner(target, runner_options(device, own.features));
  const specrt::cpu::FpMode mode;
  runner.cache().add(0, std::ssize(text));
  runner.begin();
  (void)runner.add_committed(0, text);
  runner.capture(0, runner.rows());
  runner.forward();
  if (runner.cuda() != nullptr) runner.cuda()->wait();
  const std::vector<const float*> parts = parts_of(runner, own.features);
  const auto drafter = specrt::make_head_drafter(std::span(modules), target, own);
  drafter->admit(5, std::span(text).first(static_cast<std::size_t>(first)), std::ssize(text) + 8);
  std::vector<Tokens> out;
  specrt::SamplingParams params;
  std::int64_t seen = 0;
  for (std::int64_t length = first; length < std::ssize(text) - shift; ++length) {
    const auto tokens = std::span(text).first(static_cast<std::size_t>(length));
    std::vector<std::int64_t> rows;
    const std::int64_t start = seen;
    for (; seen < length - 1; ++seen) rows.push_back(seen + shift);
    const specrt::ObservedFeatures observed{
        5, start, {parts, rows, target.config().hidden_size, runner.device_features()}, tokens};
    drafter->observe_features({&observed, 1});
    const specrt::DraftRequest request{5, tokens, own.top_k * own.depth, own.depth, &params};
    DraftTree tree;
    drafter->propose({&request, 1}, {&tree, 1});
    Tokens& draft = out.emplace_back(tree.tokens().begin(), tree.tokens().end());
    draft.insert(draft.end(), tree.parents().begin(), tree.parents().end());
  }
  drafter->release(5);
  return out;
}

double agreement(const std::vector<Tokens>& a, const std::vector<Tokens>& b) {
  std::int64_t equal = 0;
  std::int64_t all = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    CHECK(!b[i].empty());
    all += std::ssize(b[i]);
    for (std::size_t k = 0; k < std::min(a[i].size(), b[i].size()); ++k) {
      equal += a[i][k] == b[i][k] ? 1 : 0;
    }
  }
  return static_cast<double>(equal) / static_cast<double>(all);
}

// Whatever a head may have: norms, biases, a vocabulary and an embedding of its own.
struct Layout {
  std::string what;
  HeadKind kind;
  std::int64_t parts;
  std::function<void(ModelConfig&)> change;
};

const Layout kLayouts[] = {
    {"fused", HeadKind::fused, 1, [](ModelConfig&) {}},
    {"beside", HeadKind::beside, 2, [](ModelConfig&) {}},
    {"fused, all norms", HeadKind::fused, 1,
     [](ModelConfig& c) {
       c.head.hidden_first = c.head.embedding_norm = c.head.hidden_norm = true;
       c.head.zero_first = c.head.first_norm = c.head.fc_bias = true;
       c.head.final_norm = c.head.norm_output = c.head.own_embedding = true;
       c.head.input_vocab = 50;  // tokens beyond it are zeros
     }},
    {"beside, all norms", HeadKind::beside, 3,
     [](ModelConfig& c) {
       c.head.input_norm = c.head.part_norms = c.head.norm_before_residual = true;
       c.head.own_lm_head = true;
       c.vocab_size = 40;
     }},
    {"beside, one state as it is", HeadKind::beside, 1, [](ModelConfig& c) { c.head.fc = false; }},
};

DraftHeadOptions options_for(const Layout& layout, const Model& head, std::int64_t top_k,
                             std::int64_t depth) {
  DraftHeadOptions own = tiny::head_options(layout.kind, top_k, depth);
  if (layout.kind == HeadKind::beside) {
    own.features.layers.clear();
    for (std::int64_t p = 0; p < layout.parts; ++p) own.features.layers.push_back(p);
    std::swap(own.features.layers.front(), own.features.layers.back());
  }
  for (TokenId id = 0; head.config().vocab_size == 40 && id < 40; ++id) {
    own.target_of_draft.push_back(id + id / 2);
  }
  return own;
}

Model head_of(const Layout& layout, const tiny::Spec& spec, Precision precision) {
  return tiny::random_head(spec, layout.kind, precision, 1.0, 9, [&](ModelConfig& c) {
    c.head.feature_parts = layout.parts;
    layout.change(c);
  });
}

}  // namespace

TEST(cuda_heads_draft_as_on_the_cpu) {
  emulated::reset();
  tiny::Spec spec = tiny::small_spec(Precision::bf16, 43);
  const Model target = tiny::random_model(spec);
  const Tokens text = tiny::random_tokens(4, tiny::kThinned ? 10 : 20, spec.vocab);
  for (const Layout& layout : kLayouts) {
    const std::vector<Model> head = {head_of(layout, spec, Precision::bf16)};
    const bool plain = &layout == &kLayouts[0] || &layout == &kLayouts[1];
    const DraftHeadOptions own = options_for(layout, head[0], 2, plain ? 3 : 2);
    const auto cpu = drafts_of("cpu", head, target, own, text, 6);
    const double agree = agreement(drafts_of("cuda", head, target, own, text, 6), cpu);
    if (agree < 0.9) check::fail(__FILE__, __LINE__, layout.what + std::to_string(agree));
    // It is the target's states that decide.
    if (plain) CHECK(agreement(drafts_of("cuda", head, target, own, text, 6, 2), cpu) < 0.7);
  }
}

TEST(cuda_heads_in_float16_draft_as_on_the_cpu) {
  if (tiny::kThinned) return;
  for (const int architecture : {80, 90}) {
    emulated::reset();
    emulated::settings().architecture = architecture;
    const auto target_in = [](Precision precision) {
      return tiny::random_model(tiny::small_spec(precision, 49));
    };
    const tiny::Spec spec = tiny::small_spec(Precision::f16, 49);
    const Tokens text = tiny::random_tokens(8, 20, spec.vocab);
    for (std::size_t at = 0; at < 2; ++at) {
      const Layout& layout = kLayouts[at];
      const std::vector<Model> head = {head_of(layout, spec, Precision::f16)};
      const std::vector<Model> exact = {head_of(layout, spec, Precision::f32)};
      const DraftHeadOptions own = options_for(layout, head[0], 2, 3);
      const auto cpu = drafts_of("cpu", exact, target_in(Precision::f32), own, text, 6);
      const auto cuda = drafts_of("cuda", head, target_in(Precision::f16), own, text, 6);
      const double agree = agreement(cuda, cpu);
      if (agree < 0.9) check::fail(__FILE__, __LINE__, layout.what + std::to_string(agree));
    }
  }
  emulated::reset();
}

// It reads the target's embeddings and output head with its own kernels.
TEST(cuda_heads_share_their_targets_type) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 49);
  const std::vector<Model> head = {head_of(kLayouts[0], spec, Precision::f16)};
  const Model target = tiny::random_model(spec);
  DraftHeadOptions own = options_for(kLayouts[0], head[0], 2, 3);
  own.device = "cuda";
  CHECK_THROWS(specrt::make_head_drafter(std::span(head), target, own), specrt::UnsupportedError,
               "float16 with a target in bfloat16");
}

// Each module over the states of the one before.
TEST(cuda_modules_draft_as_on_the_cpu) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 48);
  const Model target = tiny::random_model(spec);
  const Tokens text = tiny::random_tokens(5, tiny::kThinned ? 8 : 14, spec.vocab);
  std::vector<Model> modules = tiny::random_modules(spec, Precision::bf16, 3);
  const DraftHeadOptions own = tiny::head_options(HeadKind::fused, 2, 4);
  const auto cpu = drafts_of("cpu", modules, target, own, text, 6);
  CHECK(agreement(drafts_of("cuda", modules, target, own, text, 6), cpu) > 0.9);
  std::swap(modules[1], modules[2]);
  CHECK(agreement(drafts_of("cuda", modules, target, own, text, 6), cpu) < 0.9);
}

namespace {

/// Drafts nothing and keeps all that it hears, on the host.
class Listener final : public specrt::Drafter {
 public:
  Listener() : features_(every_feature()) {}
  const std::string& name() const override { return name_; }
  const TargetFeatures& features() const override { return features_; }
  void admit(specrt::SequenceId, std::span<const TokenId>, std::int64_t) override {}
  void propose(std::span<const specrt::DraftRequest>, std::span<DraftTree>) override {}
  void observe(specrt::SequenceId, std::span<const TokenId>) override {}
  void observe_features(std::span<const specrt::ObservedFeatures> batch) override {
    for (const specrt::ObservedFeatures& one : batch) {
      States& states = heard[one.id];
      CHECK_EQ(one.first, std::ssize(states));
      for (std::int64_t i = 0; i < one.rows.size(); ++i) {
        states.emplace_back(static_cast<std::size_t>(one.rows.width()));
        one.rows.copy(i, states.back().data());
      }
    }
  }
  void release(specrt::SequenceId) override {}
  specrt::MemoryUse memory() const override { return {}; }

  std::map<specrt::SequenceId, States> heard;

 private:
  std::string name_ = "listener";
  TargetFeatures features_;
};

// Drafts what a counter says next out of the target's state alone: fc turns each token's state into
// that of the one behind it.
Model counting_head(const Model& target) {
  ModelConfig config = target.config();
  const std::int64_t size = config.hidden_size;
  config.head.kind = HeadKind::fused;
  config.head.input_vocab = config.vocab_size;
  config.head.feature_size = size;
  config.head.first_norm = false;
  config.head.own_embedding = config.head.own_lm_head = false;
  tiny::Tensors tensors;
  for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
    std::int64_t count = 1;
    for (const std::int64_t one : tensor.shape) count *= one;
    tensors[tensor.name].assign(static_cast<std::size_t>(count),
                                tensor.shape.size() == 1 ? 1.0f : 0.0f);
  }
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t next = (i + 1) % size;
    tensors["fc"][static_cast<std::size_t>(next * 2 * size + size + i)] = 1.0f;
  }
  return tiny::build(config, Precision::bf16, tensors);
}

DecoderOptions decoder_options(const Model& model, int sequences, const TargetFeatures& features,
                               int block_size = 4) {
  DecoderOptions options = tiny::options_for(model, sequences, 80, block_size);
  options.device = "cuda";
  options.max_rows = 64;
  options.features = features;
  return options;
}

std::vector<Request> requests_for(std::int64_t vocab) {
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = tiny::random_tokens(700 + i, 3 + 4 * i, vocab);
    requests[i].params.max_tokens = 6;
    requests[i].params.seed = 7 + i;
    requests[i].params.temperature = i == 0 ? 0.0 : 1.0;
  }
  requests[1].params.repetition_penalty = 1.3;
  requests[2].params.logprobs = 1;
  requests[3].params.top_k = 9;
  return requests;
}

std::vector<Output> plain_outputs(const Model& target, const std::vector<Request>& requests) {
  Decoder decoder(target, decoder_options(target, 4, {}));
  return tiny::run(decoder, requests, tiny::fixed(0));
}

// Drafts of `own` for all requests at once change no byte; in rounds and chunks of every size, a
// second time out of the prefix caches, and with preemption.
std::int64_t check_same_bytes(const Model& target, const std::vector<Model>& modules,
                              DraftHeadOptions own, const std::vector<Request>& plain,
                              const std::vector<Output>& expected, int turns,
                              std::uint64_t preempt = 0) {
  own.device = "cuda";
  own.max_rows = 16;
  own.max_batch_size = 4;
  own.modules = std::ssize(modules);
  const auto drafter = specrt::make_head_drafter(std::span(modules), target, own);
  std::vector<Request> requests = plain;
  for (Request& request : requests) request.drafter = drafter;
  Decoder decoder(target, decoder_options(target, 4, own.features));
  std::int64_t drafted = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::restless(4, 6), preempt);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK_EQ(tiny::difference(outputs[i], expected[i]), "");
      drafted += outputs[i].counters.drafted;
    }
  }
  return drafted;
}

}  // namespace

// Recorders hear on the host what a pass over the whole text has, of batches in chunks.
TEST(cuda_features_reach_who_records_them) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 50);
  const Model model = tiny::random_model(spec);
  std::vector<Request> requests = requests_for(spec.vocab);
  requests.resize(2);
  const auto listener = std::make_shared<Listener>();
  for (Request& request : requests) request.drafter = listener;
  DecoderOptions options = decoder_options(model, 2, every_feature());
  options.enable_prefix_caching = false;
  Decoder decoder(model, options);
  const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::restless(8, 0));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Tokens text = tiny::joined(requests[i].prompt, outputs[i].tokens);
    text.pop_back();  // which was not run
    const States want = states_at_once(model, "cuda", text);
    const States& got = listener->heard.at(outputs[i].id);
    CHECK_EQ(got.size(), want.size());
    for (std::size_t r = 0; r < got.size(); ++r) CHECK(same(got[r], want[r]));
  }
}

// Greedy chains and trees: a head that knows is believed to the last token, as on the CPU.
TEST(cuda_heads_are_accepted_as_on_the_cpu) {
  emulated::reset();
  constexpr std::int64_t kVocab = 24;
  std::vector<std::vector<float>> logits(kVocab, std::vector<float>(kVocab, 0.0f));
  for (std::size_t i = 0; i < kVocab; ++i) logits[i][(i + 1) % kVocab] = 40.0f;
  const Model target = tiny::bigram_model(logits, 128, Precision::bf16);
  const Model head = counting_head(target);
  const auto run = [&](std::int64_t top_k, const char* of_head, const char* of_target) {
    DraftHeadOptions own = tiny::head_options(HeadKind::fused, top_k, 4);
    own.device = of_head;
    own.max_batch_size = 2;
    own.max_rows = 16;
    Request request;
    request.prompt = {3, 4, 5};
    request.params.max_tokens = 16;
    request.drafter = specrt::make_head_drafter(head, target, own);
    DecoderOptions options = decoder_options(target, 2, own.features);
    options.device = of_target;
    Decoder decoder(target, options);
    return tiny::run(decoder, {request}, tiny::fixed(top_k == 1 ? 4 : 7))[0];
  };
  const auto check = [&](const Output& out) {
    for (std::size_t i = 0; i < out.tokens.size(); ++i) {
      CHECK_EQ(out.tokens[i], static_cast<TokenId>((6 + i) % kVocab));
    }
    CHECK_EQ(out.counters.first_rejections, 0);
    CHECK(out.counters.accepted >= 12);
  };
  check(run(1, "cuda", "cuda"));
  check(run(2, "cuda", "cuda"));
  // A head on the host reads what comes from the device; not the other way.
  check(run(1, "cpu", "cuda"));
  const Output refused = run(1, "cuda", "cpu");
  CHECK(refused.finish == specrt::Finish::error);
  CHECK(refused.error.find("own device") != std::string::npos);
}

TEST(cuda_heads_give_the_bytes_of_plain_decoding) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 44);
  const Model target = tiny::random_model(spec);
  const std::vector<Request> requests = requests_for(spec.vocab);
  const std::vector<Output> plain = plain_outputs(target, requests);
  for (const Layout& layout : kLayouts) {
    const auto number = &layout - kLayouts;
    if (number == 2 || number == 4) continue;  // nothing that the decoder would see
    if (tiny::kThinned && number > 0) break;
    const Model head = head_of(layout, spec, Precision::bf16);
    const DraftHeadOptions own =
        options_for(layout, head, number == 0 ? 1 : 2, number == 1 ? 3 : 2);
    CHECK(check_same_bytes(target, {head}, own, requests, plain, number == 1 ? 2 : 1,
                           number == 0 ? 5 : 0) > 10);
  }
}

TEST(cuda_modules_give_the_bytes_of_plain_decoding) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 49);
  const Model target = tiny::random_model(spec);
  std::vector<Request> requests = requests_for(spec.vocab);
  requests.resize(tiny::kThinned ? 1 : 3);
  const std::vector<Output> plain = plain_outputs(target, requests);
  const std::vector<Model> modules = tiny::random_modules(spec, Precision::bf16, 3);
  const DraftHeadOptions own = tiny::head_options(HeadKind::fused, 2, 4);
  CHECK(check_same_bytes(target, modules, own, requests, plain, 1) > 3);
}

TEST(cuda_heads_in_other_precisions_and_orders) {
  if (tiny::kThinned) return;
  for (const int architecture : {80, 90}) {
    emulated::reset();
    emulated::settings().architecture = architecture;
    emulated::settings().order = specrt::simt::Order::shuffled;
    const Precision precision = architecture == 80 ? Precision::int4 : Precision::bf16;
    tiny::Spec spec = tiny::small_spec(precision, 45);
    spec.tied = architecture == 80;  // so that the head's embedding is the target's output head
    const Model target = tiny::random_model(spec);
    std::vector<Request> requests = requests_for(spec.vocab);
    requests.resize(2);
    const Model head = head_of(kLayouts[1], spec, precision);
    CHECK(check_same_bytes(target, {head}, options_for(kLayouts[1], head, 2, 2), requests,
                           plain_outputs(target, requests), 1) > 5);
  }
  emulated::reset();
}

// What a head takes is what was told, and the target's weights are there once.
TEST(cuda_heads_take_what_was_told) {
  emulated::reset();
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 46);
  const Model target = tiny::random_model(spec);
  for (const std::int64_t modules : {1, 2}) {
    const std::vector<Model> heads = tiny::random_modules(spec, Precision::bf16, modules);
    DraftHeadOptions own = tiny::head_options(HeadKind::fused, 2, 3);
    own.device = "cuda";
    own.modules = modules;
    own.max_rows = 16;
    own.max_batch_size = 2;
    const DecoderOptions options = decoder_options(target, 2, own.features);
    const specrt::MemoryUse of_target =
        specrt::memory_of(target.config(), target.precision(), options);
    const specrt::MemoryUse of_head =
        specrt::memory_of(heads[0].config(), heads[0].precision(), own, spec.vocab);
    {
      const auto drafter = specrt::make_head_drafter(std::span(heads), target, own);
      const Decoder decoder(target, options);
      CHECK_EQ(drafter->memory().weights, of_head.weights);
      CHECK_EQ(drafter->memory().kv_cache, of_head.kv_cache);
      CHECK_EQ(drafter->memory().workspace, of_head.workspace);
      const std::int64_t told = of_target.total() + of_head.total();
      CHECK(emulated::in_use() >= told && emulated::in_use() < told + 24 * 4096);
    }
    CHECK_EQ(emulated::in_use(), 0);
  }
}
