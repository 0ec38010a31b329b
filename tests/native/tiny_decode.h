#pragma once

// Drafters that know the answer (or know it is wrong), and a loop that runs requests to their end.

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "specrt/constraint.h"
#include "specrt/decoder.h"
#include "specrt/drafter.h"

namespace tiny {

using specrt::TokenId;
using Tokens = std::vector<TokenId>;

struct DraftStats {
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  std::int64_t later_siblings = 0;  ///< accepted nodes that have an earlier sibling
  DraftStats& operator+=(const DraftStats& other);
};

/// Given known texts (prompt and plain continuation), calls `fill` with the one that the request
/// is a prefix of, or with nothing where there is none.
class ScriptedDrafter : public specrt::Drafter {
 public:
  using Fill = std::function<void(const specrt::DraftRequest& request,
                                  std::span<const TokenId> text, specrt::DraftTree& tree)>;
  ScriptedDrafter(std::string name, std::vector<Tokens> texts, Fill fill);

  const std::string& name() const override { return name_; }
  void admit(specrt::SequenceId id, std::span<const TokenId> prompt,
             std::int64_t max_length) override;
  void propose(std::span<const specrt::DraftRequest> requests,
               std::span<specrt::DraftTree> out) override;
  void observe(specrt::SequenceId id, std::span<const TokenId> committed) override;
  void release(specrt::SequenceId id) override;
  specrt::MemoryUse memory() const override { return {}; }

  /// Of rounds after which the sequence went on.
  const DraftStats& stats() const { return stats_; }
  std::size_t open() const { return last_.size(); }  ///< admitted and not released
  std::int64_t calls() const { return calls_; }

 private:
  std::string name_;
  std::vector<Tokens> texts_;
  Fill fill_;
  DraftStats stats_;
  std::int64_t calls_ = 0;
  std::unordered_map<specrt::SequenceId, specrt::DraftTree> last_;
};

enum class Kind { none, ngram, oracle, half, wrong, tree, bushy };
inline constexpr Kind kDrafters[] = {Kind::ngram, Kind::oracle, Kind::half,
                                     Kind::wrong, Kind::tree,   Kind::bushy};

/// - oracle: a chain that is right as far as the text is known
/// - half: a chain whose first half is right, the rest wrong
/// - wrong: a chain whose every token is wrong
/// - tree: at each depth the right token comes after 0 to 2 wrong siblings that have children
/// - bushy: trees of random shape with the right token somewhere among the children, or not
std::shared_ptr<ScriptedDrafter> make_scripted(Kind kind, std::vector<Tokens> texts,
                                               std::int64_t vocab);
/// Those and the library's own.
std::shared_ptr<specrt::Drafter> make_drafter(Kind kind, std::vector<Tokens> texts,
                                              std::int64_t vocab);

struct Request {
  Tokens prompt;
  specrt::SamplingParams params;
  std::shared_ptr<specrt::Drafter> drafter = nullptr;
  int arrival = 0;  ///< the round before which it is added
  std::shared_ptr<const specrt::TokenConstraint> constraint = nullptr;  ///< each run has a copy
};

struct Output {
  specrt::SequenceId id = -1;
  Tokens tokens;
  std::vector<specrt::TokenLogprobs> logprobs;
  specrt::Finish finish = specrt::Finish::none;
  std::string error;
  specrt::SequenceCounters counters;
};

using Planner = std::function<specrt::Plan(const specrt::Decoder& decoder, int round)>;
Planner fixed(std::int64_t num_speculative_tokens);
/// Another node budget for every sequence and round, prompts a few tokens at a time, and now and
/// then a sequence is left out.
Planner restless(std::uint64_t seed, std::int64_t most_nodes);

/// Room for `sequences` sequences of `tokens` tokens; checks the bookkeeping after every round.
specrt::DecoderOptions options_for(const specrt::Model& model, int sequences, std::int64_t tokens,
                                   int block_size = 16, const std::string& kv_cache_dtype = "auto");

/// Runs all requests to their end in one decoder. Checks on the way what holds for every run:
/// the counters add up and the pool is as free afterwards as it was before.
/// With `preempt`, requests come in on room for few tokens, and give their blocks to others where
/// there are too few, or just so.
std::vector<Output> run(specrt::Decoder& decoder, const std::vector<Request>& requests,
                        const Planner& planner, std::uint64_t preempt = 0);
Output run_alone(const specrt::Model& model, const specrt::DecoderOptions& options,
                 const Request& request, const Planner& planner);

/// "" where ids, logprobs (bit for bit) and the way it ended are the same, else what differs.
std::string difference(const Output& a, const Output& b);

Tokens joined(const Tokens& prompt, const Tokens& continuation);

}  // namespace tiny
