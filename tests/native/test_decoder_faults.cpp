// Drafters and models that misbehave, and sequences that are taken away: nobody else notices.

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "specrt/decoder.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::CpuIsa;
using specrt::Decoder;
using specrt::DecoderOptions;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::Finish;
using specrt::Model;
using specrt::Precision;
using specrt::TokenId;
using tiny::Kind;
using tiny::Output;
using tiny::Request;
using tiny::Tokens;

std::vector<Request> some_requests(std::size_t count, std::int64_t vocab) {
  std::vector<Request> requests(count);
  for (std::size_t i = 0; i < count; ++i) {
    requests[i].prompt = tiny::random_tokens(300 + i, 2 + 7 * i, vocab);
    requests[i].params.max_tokens = static_cast<std::int64_t>(12 + 5 * i);
    requests[i].params.temperature = i % 2 == 0 ? 0.0 : 0.9;
    requests[i].params.seed = i;
    requests[i].params.logprobs = 2;
  }
  return requests;
}

std::vector<Output> plain(const Model& model, const DecoderOptions& options,
                          std::vector<Request> requests) {
  Decoder decoder(model, options);
  std::vector<Output> outputs;
  for (Request& request : requests) {
    request.drafter = nullptr;
    outputs.push_back(tiny::run(decoder, {request}, tiny::fixed(0))[0]);
  }
  return outputs;
}

/// Right for one token ahead; every call but the first few goes through `fault` first.
std::shared_ptr<tiny::ScriptedDrafter> faulty(
    const std::vector<Tokens>& texts, int good_calls,
    std::function<void(const DraftRequest&, DraftTree&)> fault) {
  auto calls = std::make_shared<int>(0);
  return std::make_shared<tiny::ScriptedDrafter>(
      "faulty", texts,
      [=](const DraftRequest& request, std::span<const TokenId> text, DraftTree& tree) {
        if (++*calls > good_calls) fault(request, tree);
        if (tree.empty() && !text.empty() && text.size() > request.tokens.size()) {
          tree.add(text[request.tokens.size()], DraftTree::kRoot);
        }
      });
}

class AdmitThrows final : public specrt::Drafter {
 public:
  const std::string& name() const override { return name_; }
  void admit(specrt::SequenceId, std::span<const TokenId>, std::int64_t) override {
    throw specrt::CapacityError("[drafter] expected room, got none");
  }
  void propose(std::span<const DraftRequest>, std::span<DraftTree>) override {}
  void observe(specrt::SequenceId, std::span<const TokenId>) override {}
  void release(specrt::SequenceId) override { ++released; }
  specrt::MemoryUse memory() const override { return {}; }
  int released = 0;

 private:
  std::string name_ = "full";
};

class ObserveThrows final : public specrt::Drafter {
 public:
  const std::string& name() const override { return name_; }
  void admit(specrt::SequenceId, std::span<const TokenId>, std::int64_t) override {}
  void propose(std::span<const DraftRequest>, std::span<DraftTree>) override {}
  void observe(specrt::SequenceId, std::span<const TokenId>) override {
    if (++calls_ == 3) throw std::runtime_error("cannot follow");
  }
  void release(specrt::SequenceId) override { throw std::runtime_error("cannot let go"); }
  specrt::MemoryUse memory() const override { return {}; }

 private:
  std::string name_ = "blind";
  int calls_ = 0;
};

}  // namespace

TEST(decoder_drafter_that_throws_ends_its_own_sequence) {
  const tiny::Spec spec = tiny::small_spec();
  const Model model = tiny::random_model(spec);
  const DecoderOptions options = tiny::options_for(model, 5, 80, 4);
  std::vector<Request> requests = some_requests(5, spec.vocab);
  const std::vector<Output> alone = plain(model, options, requests);
  for (std::size_t i = 0; i < 5; ++i) {
    const Tokens text = tiny::joined(requests[i].prompt, alone[i].tokens);
    requests[i].drafter = tiny::make_scripted(Kind::tree, {text}, spec.vocab);
  }
  requests[2].drafter =
      faulty({tiny::joined(requests[2].prompt, alone[2].tokens)}, 2,
             [](const DraftRequest&, DraftTree&) { throw std::runtime_error("out of ideas"); });
  Decoder decoder(model, options);
  const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(4));
  for (std::size_t i = 0; i < 5; ++i) {
    if (i == 2) continue;
    CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
  }
  CHECK(outputs[2].finish == Finish::error);
  CHECK_EQ(outputs[2].error, "[drafter faulty] out of ideas");
  // What had come by then is right.
  CHECK_EQ(outputs[2].tokens.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) CHECK_EQ(outputs[2].tokens[i], alone[2].tokens[i]);
}

// One drafter for all: ids outside the vocabulary are the fault of one sequence's draft.
TEST(decoder_drafts_outside_the_vocabulary) {
  const tiny::Spec spec = tiny::small_spec();
  const Model model = tiny::random_model(spec);
  const DecoderOptions options = tiny::options_for(model, 5, 80, 4);
  for (const std::size_t culprit : {0u, 2u, 4u}) {
    std::vector<Request> requests = some_requests(5, spec.vocab);
    const std::vector<Output> alone = plain(model, options, requests);
    std::vector<Tokens> texts;
    for (std::size_t i = 0; i < 5; ++i) {
      texts.push_back(tiny::joined(requests[i].prompt, alone[i].tokens));
    }
    const std::size_t size = requests[culprit].prompt.size();
    const auto shared = faulty(texts, 0, [=](const DraftRequest& request, DraftTree& tree) {
      if (request.tokens.size() > size + 2 && request.id == static_cast<int>(culprit)) {
        tree.add(static_cast<TokenId>(spec.vocab), DraftTree::kRoot);
      }
    });
    for (Request& request : requests) request.drafter = shared;
    Decoder decoder(model, options);
    const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(4));
    for (std::size_t i = 0; i < 5; ++i) {
      if (i != culprit) CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
    }
    CHECK(outputs[culprit].finish == Finish::error);
    CHECK(outputs[culprit].error.find("[drafter faulty] [tokens] expected ids in [0, 61)") == 0);
    CHECK_EQ(shared->open(), 0u);
  }
}

TEST(decoder_trees_that_are_too_large_are_pruned) {
  const tiny::Spec spec = tiny::small_spec();
  const Model model = tiny::random_model(spec);
  DecoderOptions options = tiny::options_for(model, 3, 80, 4);
  options.max_rows = 20;
  std::vector<Request> requests = some_requests(3, spec.vocab);
  const std::vector<Output> alone = plain(model, options, requests);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto text = tiny::joined(requests[i].prompt, alone[i].tokens);
    requests[i].drafter = std::make_shared<tiny::ScriptedDrafter>(
        "large", std::vector<Tokens>{text},
        [&random, vocab = spec.vocab](const DraftRequest& request, std::span<const TokenId> known,
                                      DraftTree& tree) {
          // Right as deep as the text goes and beyond, with wrong leaves everywhere.
          std::int32_t parent = DraftTree::kRoot;
          for (std::size_t j = 0; j < 200; ++j) {
            const std::size_t at = request.tokens.size() + j;
            const TokenId right = at < known.size() ? known[at] : 1;
            for (int k = 0; k < 2; ++k) {
              const auto token = static_cast<TokenId>(random() % static_cast<std::uint64_t>(vocab));
              if (token != right && tree.child(parent, token) < 0) tree.add(token, parent);
            }
            parent = tree.add(right, parent);
          }
        });
  }
  Decoder decoder(model, options);
  const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::restless(2, 17));
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
    CHECK(outputs[i].counters.accepted > 0);
    CHECK(outputs[i].counters.drafted <= outputs[i].counters.rounds * 17);
  }
}

TEST(decoder_drafter_that_admits_nobody) {
  const Model model = tiny::counter_model();
  Decoder decoder(model, tiny::options_for(model, 2, 40));
  const std::int64_t free = decoder.free_kv_tokens();
  const auto full = std::make_shared<AdmitThrows>();
  CHECK_THROWS(decoder.add(Tokens{1}, {}, full), specrt::CapacityError, "[drafter]");
  CHECK(decoder.idle());
  CHECK_EQ(decoder.free_kv_tokens(), free);
  CHECK_EQ(full->released, 0);
  Request request;
  request.prompt = {1};
  CHECK_EQ(tiny::run(decoder, {request}, tiny::fixed(2))[0].tokens.size(), 16u);
}

TEST(decoder_drafter_that_fails_to_observe) {
  const Model model = tiny::counter_model();
  Decoder decoder(model, tiny::options_for(model, 2, 40));
  std::vector<Request> requests(2);
  for (Request& request : requests) request.prompt = {1};
  requests[0].drafter = std::make_shared<ObserveThrows>();
  const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(2));
  CHECK(outputs[0].finish == Finish::error);
  CHECK_EQ(outputs[0].error, "[drafter blind] cannot follow");
  CHECK(outputs[1].finish == Finish::length);
  CHECK_EQ(outputs[1].tokens.size(), 16u);
}

// A NaN anywhere in the head: no id is chosen, the sequence is named, and the decoder lives on.
TEST(decoder_nan_in_the_head) {
  for (const CpuIsa isa : specrt::available_cpu_isas()) {
    for (const Precision dtype : {Precision::f32, Precision::bf16}) {
      for (const std::int64_t row : {0, 60, 130}) {
        tiny::Spec spec = tiny::small_spec(dtype);
        spec.vocab = 131;
        tiny::Tensors tensors = tiny::random_tensors(spec);
        tensors.at("lm_head")[static_cast<std::size_t>(row * spec.hidden + 3)] = NAN;
        const Model model = tiny::build(tiny::config_of(spec), dtype, tensors);
        DecoderOptions options = tiny::options_for(model, 3, 40);
        options.cpu_isa = specrt::name_of(isa);
        Decoder decoder(model, options);
        std::vector<Request> requests = some_requests(3, spec.vocab);
        const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(3));
        for (std::size_t i = 0; i < 3; ++i) {
          CHECK(outputs[i].finish == Finish::error);
          CHECK(outputs[i].tokens.empty());
          CHECK(outputs[i].error.find("[logits] expected finite numbers, got NaN") == 0);
          CHECK(outputs[i].error.find("of sequence " + std::to_string(outputs[i].id)) !=
                std::string::npos);
        }
      }
    }
  }
}

// The embedding of one token is NaN (or infinite): only who reads it is struck, though a drafter
// puts it into everybody's drafts.
TEST(decoder_nan_strikes_only_its_own_sequence) {
  for (const float poison : {std::nanf(""), INFINITY}) {
    for (const Precision dtype : {Precision::f32, Precision::bf16}) {
      const tiny::Spec spec = tiny::small_spec(dtype, 31);
      tiny::Tensors tensors = tiny::random_tensors(spec);
      const Model clean = tiny::build(tiny::config_of(spec), dtype, tensors);
      const DecoderOptions options = tiny::options_for(clean, 4, 80, 4);
      std::vector<Request> requests = some_requests(4, spec.vocab);
      const std::vector<Output> alone = plain(clean, options, requests);
      // A token that nobody says.
      TokenId bad = 0;
      const auto said = [&](TokenId token) {
        for (std::size_t i = 0; i < 4; ++i) {
          for (const TokenId t : tiny::joined(requests[i].prompt, alone[i].tokens)) {
            if (t == token) return true;
          }
        }
        return false;
      };
      while (bad < spec.vocab && said(bad)) ++bad;
      if (bad == spec.vocab) check::fail(__FILE__, __LINE__, "every token was said");
      for (std::int64_t k = 0; k < spec.hidden; ++k) {
        tensors.at("embedding")[static_cast<std::size_t>(bad * spec.hidden + k)] = poison;
      }
      const Model model = tiny::build(tiny::config_of(spec), dtype, tensors);
      for (std::size_t i = 0; i < 4; ++i) {
        const Tokens text = tiny::joined(requests[i].prompt, alone[i].tokens);
        requests[i].drafter = std::make_shared<tiny::ScriptedDrafter>(
            "poisoned", std::vector<Tokens>{text},
            [bad](const DraftRequest& request, std::span<const TokenId> known, DraftTree& tree) {
              const std::int32_t branch = tree.add(bad, DraftTree::kRoot);
              const std::size_t at = request.tokens.size();
              if (at >= known.size()) return;
              const std::int32_t right = tree.add(known[at], DraftTree::kRoot);
              if (request.max_depth > 1) {
                tree.add(1, branch);
                tree.add(bad, right);
              }
            });
      }
      requests[1].prompt[1] = bad;
      requests[1].arrival = 2;
      Decoder decoder(model, options);
      const std::vector<Output> outputs = tiny::run(decoder, requests, tiny::fixed(6));
      for (std::size_t i = 0; i < 4; ++i) {
        if (i == 1) {
          CHECK(outputs[i].finish == Finish::error);
          continue;
        }
        CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
        CHECK(outputs[i].counters.accepted > 0);
      }
    }
  }
}

// Cancelled before its start, in its prompt, and after any round.
TEST(decoder_cancel_at_any_time) {
  const tiny::Spec spec = tiny::small_spec();
  const Model model = tiny::random_model(spec);
  const DecoderOptions options = tiny::options_for(model, 4, 80, 4);
  std::vector<Request> requests = some_requests(4, spec.vocab);
  const std::vector<Output> alone = plain(model, options, requests);
  std::vector<Tokens> texts;
  for (std::size_t i = 0; i < 4; ++i) {
    texts.push_back(tiny::joined(requests[i].prompt, alone[i].tokens));
  }
  for (int when = 0; when < 12; ++when) {
    for (std::size_t victim = 0; victim < 4; victim += 3) {
      Decoder decoder(model, options);
      const std::int64_t free = decoder.free_kv_tokens();
      const auto drafter = tiny::make_scripted(Kind::bushy, texts, spec.vocab);
      std::vector<specrt::SequenceId> ids;
      std::vector<Output> outputs(4);
      for (const Request& request : requests) {
        ids.push_back(decoder.add(request.prompt, request.params, drafter));
      }
      for (int round = 0; !decoder.idle(); ++round) {
        if (round == when && outputs[victim].finish == Finish::none) {
          decoder.cancel(ids[victim]);
          CHECK_THROWS(decoder.cancel(ids[victim]), specrt::InvalidArgument, "[sequence]");
          decoder.check_invariants();
          outputs[victim].finish = Finish::error;
          if (decoder.idle()) break;
        }
        for (const auto& progress : decoder.round(tiny::restless(5, 6)(decoder, round))) {
          Output& output = outputs[static_cast<std::size_t>(progress.id - ids[0])];
          CHECK(output.finish == Finish::none);
          output.tokens.insert(output.tokens.end(), progress.tokens.begin(), progress.tokens.end());
          output.logprobs.insert(output.logprobs.end(), progress.logprobs.begin(),
                                 progress.logprobs.end());
          output.finish = progress.finish;
        }
      }
      for (std::size_t i = 0; i < 4; ++i) {
        if (i != victim) CHECK_EQ(tiny::difference(outputs[i], alone[i]), "");
      }
      CHECK_EQ(decoder.free_kv_tokens(), free);
      CHECK_EQ(drafter->open(), 0u);
    }
  }
}

// Hundreds of requests with every kind of end; the last is as if it were the first.
TEST(decoder_hundreds_of_requests_leave_nothing_behind) {
  const tiny::Spec spec = tiny::small_spec(Precision::bf16, 41);
  const Model model = tiny::random_model(spec);
  for (const int block_size : {1, 4, 16}) {
    const DecoderOptions options = tiny::options_for(model, 6, 40, block_size);
    std::vector<Request> last = some_requests(1, spec.vocab);
    const Output fresh = plain(model, options, last)[0];
    last[0].drafter =
        tiny::make_scripted(Kind::tree, {tiny::joined(last[0].prompt, fresh.tokens)}, spec.vocab);

    Decoder decoder(model, options);
    const std::int64_t free = decoder.free_kv_tokens();
    const auto ngram = specrt::make_ngram_drafter({1, 3, true});
    const auto bushy = tiny::make_scripted(Kind::bushy, {}, spec.vocab);
    const auto broken = faulty({}, 10, [](const DraftRequest& request, DraftTree&) {
      if (request.id % 2 == 0) throw std::runtime_error("broken");
    });
    std::mt19937_64 random(static_cast<std::uint64_t>(block_size));
    int ends[6] = {};
    const int total = tiny::kThinned ? 80 : 250;
    for (int added = 0; added < total || !decoder.idle();) {
      while (added < total) {
        Request request;
        request.prompt = tiny::random_tokens(random(), 1 + random() % 20, spec.vocab);
        request.params.max_tokens = static_cast<std::int64_t>(random() % 20);
        request.params.temperature = 0.5 * static_cast<double>(random() % 3);
        request.params.seed = random();
        if (random() % 2 == 0) {
          for (TokenId token = 0; token < 8; ++token) {
            request.params.stop_token_ids.push_back(token * 7);
          }
        }
        if (!decoder.can_add(std::ssize(request.prompt), request.params.max_tokens)) break;
        const std::shared_ptr<specrt::Drafter> drafters[] = {nullptr, ngram, bushy, broken};
        (void)decoder.add(request.prompt, request.params, drafters[random() % 4]);
        ++added;
      }
      const auto progress = decoder.round(tiny::restless(random(), 8)(decoder, added));
      std::vector<specrt::SequenceId> stoppable;
      for (const specrt::Progress& p : progress) {
        ++ends[static_cast<int>(p.finish)];
        if (p.finish == Finish::none && !p.tokens.empty()) stoppable.push_back(p.id);
      }
      if (!stoppable.empty() && random() % 6 == 0) {
        (void)decoder.stop(stoppable[random() % stoppable.size()], 0);
        ++ends[4];
      }
      const auto states = decoder.sequences();
      if (!states.empty() && random() % 12 == 0) {
        decoder.cancel(states[random() % states.size()].id);
        ++ends[5];
      }
    }
    for (const int end : ends) CHECK(end > 0);
    CHECK_EQ(decoder.free_kv_tokens(), free);
    CHECK_EQ(bushy->open(), 0u);
    CHECK_EQ(broken->open(), 0u);
    CHECK_EQ(ngram->memory().total(), 0);
    CHECK_EQ(tiny::difference(tiny::run(decoder, last, tiny::fixed(5))[0], fresh), "");
  }
}

// A decoder that goes away tells the drafters.
TEST(decoder_releases_drafters_when_it_goes) {
  const Model model = tiny::counter_model();
  const auto drafter = tiny::make_scripted(Kind::oracle, {}, 16);
  {
    Decoder decoder(model, tiny::options_for(model, 2, 40));
    (void)decoder.add(Tokens{1}, {}, drafter);
    (void)decoder.add(Tokens{2}, {}, drafter);
    (void)decoder.round(specrt::plan_fixed(decoder, 2));
    CHECK_EQ(drafter->open(), 2u);
  }
  CHECK_EQ(drafter->open(), 0u);
}
