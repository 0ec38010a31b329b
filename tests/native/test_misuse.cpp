// What a program that embeds the library can get wrong: each is told by name, and nothing is read
// or written that is not there.

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "specrt/medusa.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::Decoder;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::DType;
using specrt::Finish;
using specrt::InvalidArgument;
using specrt::Model;
using specrt::Precision;
using specrt::TokenId;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

specrt::MedusaHeads random_heads(std::int64_t vocab, std::int64_t hidden) {
  specrt::MedusaConfig config;
  config.vocab_size = config.outputs = vocab;
  config.hidden_size = hidden;
  config.num_heads = 2;
  specrt::MedusaBuilder builder(config, Precision::f32);
  for (const specrt::TensorSpec& spec : specrt::tensors_of(config)) {
    std::int64_t size = 1;
    for (const std::int64_t one : spec.shape) size *= one;
    const std::vector<float> zeros(static_cast<std::size_t>(size), 0.0f);
    builder.set(spec.name, spec.shape, DType::f32, zeros.data());
  }
  return builder.build();
}

/// Does what it is told to at each turn of a sequence.
class Odd final : public specrt::Drafter {
 public:
  using Propose = void (*)(DraftTree&);
  explicit Odd(Propose propose, bool finishes = true) : propose_(propose), finishes_(finishes) {}
  const std::string& name() const override { return name_; }
  void admit(specrt::SequenceId, std::span<const TokenId>, std::int64_t) override { ++held; }
  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    for (std::size_t i = 0; i < requests.size(); ++i) propose_(out[i]);
  }
  void observe(specrt::SequenceId, std::span<const TokenId>) override {}
  bool tells_laws() const override { return true; }
  void finished(specrt::SequenceId, std::span<const TokenId>) override {
    if (!finishes_) throw std::runtime_error("cannot remember");
  }
  void release(specrt::SequenceId) override { --held; }
  specrt::MemoryUse memory() const override { return {}; }

  int held = 0;

 private:
  std::string name_ = "odd";
  Propose propose_;
  bool finishes_;
};

/// Forbids nothing and says that it knows more tokens than it was shown, or fewer than none.
class Boaster final : public specrt::TokenConstraint {
 public:
  explicit Boaster(std::int64_t more) : more_(more) {}
  void fill_bitmask(std::span<std::uint32_t> mask) override {
    for (std::uint32_t& word : mask) word = ~0u;
  }
  void advance(TokenId) override {}
  bool finished() const override { return false; }
  std::int64_t accepts(std::span<const TokenId> tokens) override {
    return more_ < 0 ? more_ : std::ssize(tokens) + more_;
  }
  std::unique_ptr<TokenConstraint> fork() const override {
    return std::make_unique<Boaster>(more_);
  }

 private:
  std::int64_t more_;
};

void add_branches(DraftTree& tree) {
  const std::int32_t left = tree.add(1, DraftTree::kRoot);
  tree.add(2, DraftTree::kRoot);
  tree.add(3, left);
}

}  // namespace

TEST(misuse_medusa_heads_of_another_model) {
  const tiny::Spec spec = tiny::small_spec();
  const Model model = tiny::random_model(spec);
  specrt::DecoderOptions options = tiny::options_for(model, 2, 80, 4);
  options.features.normed = true;
  for (const std::int64_t hidden : {spec.hidden / 2, 2 * spec.hidden}) {
    specrt::MedusaOptions own;
    own.tree = specrt::StaticTree::chain(2);
    own.threads = 1;
    std::vector<Request> requests(2);
    for (Request& request : requests) request.prompt = tiny::random_tokens(4, 9, spec.vocab);
    requests[0].drafter = specrt::make_medusa_drafter(random_heads(spec.vocab, hidden), own);
    Decoder decoder(model, options);
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(2));
    CHECK(outputs[0].finish == Finish::error);
    CHECK(outputs[0].error.find("expected " + std::to_string(hidden) + " features") !=
          std::string::npos);
    CHECK(outputs[1].finish == Finish::length);
  }
}

TEST(misuse_builders_read_no_float16) {
  const tiny::Spec spec = tiny::small_spec();
  specrt::ModelBuilder builder(tiny::config_of(spec), Precision::f32);
  const std::vector<std::uint16_t> halves(static_cast<std::size_t>(spec.hidden), 0x3c00);
  CHECK_THROWS(
      builder.set("norm", std::vector<std::int64_t>{spec.hidden}, DType::f16, halves.data()),
      InvalidArgument, "[norm] expected float32 or bfloat16");
  specrt::MedusaConfig config;
  config.vocab_size = config.outputs = 8;
  config.hidden_size = spec.hidden;
  config.num_heads = 1;
  specrt::MedusaBuilder heads(config, Precision::f32);
  CHECK_THROWS(heads.set("heads.0.blocks.0.bias", std::vector<std::int64_t>{spec.hidden},
                         DType::f16, halves.data()),
               InvalidArgument, "expected float32 or bfloat16");
}

TEST(misuse_drafter_is_released_whatever_it_throws_first) {
  const Model model = tiny::counter_model();
  Decoder decoder(model, tiny::options_for(model, 2, 40));
  const auto drafter = std::make_shared<Odd>([](DraftTree&) {}, false);
  std::vector<Request> requests(2);
  for (Request& request : requests) {
    request.prompt = {1};
    request.drafter = drafter;
  }
  for (const Output& one : tiny::run(decoder, requests, tiny::fixed(2))) {
    CHECK(one.finish == Finish::length);
  }
  CHECK_EQ(drafter->held, 0);
}

TEST(misuse_huge_numbers) {
  const Model model = tiny::counter_model();
  Decoder decoder(model, tiny::options_for(model, 1, 40));
  CHECK(decoder.can_add(4, 16, kHuge));
  CHECK(!decoder.can_add(4, 400, kHuge));
  const specrt::SequenceId id = decoder.add(Tokens{1, 2}, {}, nullptr, nullptr, kHuge);
  decoder.preempt(id);
  CHECK(decoder.can_resume(id, kHuge));
  decoder.resume(id, kHuge);
  while (decoder.sequences()[0].prompt_left > 0) decoder.round({{id, 2}});
  CHECK_THROWS(decoder.begin_round({{id, kHuge}}), InvalidArgument, "[plan]");
  while (!decoder.idle()) decoder.round({{id, 0}});
}

TEST(misuse_constraint_that_counts_wrongly) {
  const Model model = tiny::counter_model();
  for (const std::int64_t more : {1, 1000, -1}) {
    Decoder decoder(model, tiny::options_for(model, 2, 40));
    std::vector<Request> requests(2);
    for (Request& request : requests) request.prompt = {1};
    requests[0].constraint = std::make_shared<Boaster>(more);
    requests[0].drafter = std::make_shared<Odd>(add_branches);
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(3));
    CHECK(outputs[0].finish == Finish::error);
    CHECK(outputs[0].error.find("[constraint] expected to accept 0 to") != std::string::npos);
    CHECK(outputs[1].finish == Finish::length);
  }
}

TEST(misuse_adasd_takes_chains_with_their_laws) {
  const Model model = tiny::counter_model();
  const std::pair<Odd::Propose, const char*> cases[] = {
      {add_branches, "a chain for adasd"},
      {[](DraftTree& tree) { tree.add(5, DraftTree::kRoot); }, "the law behind each drafted token"},
  };
  for (const auto& [propose, expected] : cases) {
    Decoder decoder(model, tiny::options_for(model, 2, 40));
    std::vector<Request> requests(2);
    for (Request& request : requests) request.prompt = {1};
    requests[0].drafter = std::make_shared<Odd>(propose);
    requests[0].params.speculation.policy = specrt::Policy::adasd;
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(3));
    CHECK(outputs[0].finish == Finish::error);
    CHECK(outputs[0].error.find(expected) != std::string::npos);
    CHECK(outputs[1].finish == Finish::length);
  }
}

TEST(misuse_draft_model_matched_with_another_vocabulary) {
  const Model model = tiny::counter_model(16);
  const auto map = std::make_shared<specrt::VocabularyMap>();
  map->draft_of_target = {0, 1, 2, 3};
  map->pieces.resize(4);
  specrt::DraftModelOptions options;
  options.kv_cache_bytes = 1 << 20;
  options.max_model_len = 64;
  options.threads = 1;
  Decoder decoder(model, tiny::options_for(model, 2, 40));
  std::vector<Request> requests(2);
  for (Request& request : requests) request.prompt = {1};
  requests[0].drafter = specrt::make_model_drafter(model, 4, options, map);
  const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(3));
  CHECK(outputs[0].finish == Finish::error);
  CHECK(outputs[0].error.find("[draft model] expected tokens of the 4") != std::string::npos);
  CHECK(outputs[1].finish == Finish::length);
}
