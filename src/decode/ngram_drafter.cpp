#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/suffix_index.h"
#include "decode/observed.h"
#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt {
namespace {

constexpr std::int64_t kLongest = 16;  // beyond, a longer match says nothing more

// What a copy behind a match of so many tokens is worth, about: one token says little, four are
// nearly sure. Each copied token that is right makes the match longer. Fitted to a chat model's
// answers to forty prompts; whoever goes by it learns what it comes to for the text at hand.
float log_prob_of(std::int64_t match) {
  static const std::array<float, kLongest> kByLength = [] {
    std::array<float, kLongest> out{};
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<float>(std::log(1.0 - 0.8 * std::pow(static_cast<double>(i + 1), -0.9)));
    }
    return out;
  }();
  return kByLength[static_cast<std::size_t>(std::clamp<std::int64_t>(match, 1, kLongest) - 1)];
}

// Tokens before `next` that are the text's last ones too.
std::int64_t match_before(std::span<const TokenId> text, std::int64_t next) {
  std::int64_t length = 0;
  while (length < std::min(kLongest, next) &&
         text[static_cast<std::size_t>(next - 1 - length)] ==
             text[text.size() - 1 - static_cast<std::size_t>(length)]) {
    ++length;
  }
  return length;
}

class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const NgramOptions& options) : options_(options) {
    if (options.min_match < 1) {
      throw InvalidArgument(
          expected_got("prompt_lookup_min", "an integer >= 1", std::to_string(options.min_match)));
    }
    if (options.max_match < options.min_match) {
      throw InvalidArgument(expected_got(
          "prompt_lookup_max",
          "an integer >= prompt_lookup_min (" + std::to_string(options.min_match) + ")",
          std::to_string(options.max_match)));
    }
    if (options.num_candidates < 1) {
      throw InvalidArgument(expected_got("num_candidates", "an integer >= 1",
                                         std::to_string(options.num_candidates)));
    }
  }

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    if (sequences_.contains(id)) {
      throw InvalidArgument(expected_got("sequence", "an id not in use", std::to_string(id)));
    }
    Sequence sequence{SuffixIndex(options_.max_match, options_.most_recent, max_length), {}};
    append(sequence, prompt);
    sequences_.emplace(id, std::move(sequence));
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    if (out.size() != requests.size()) {
      throw InvalidArgument(expected_got("out", std::to_string(requests.size()) + " trees",
                                         std::to_string(out.size())));
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Sequence& sequence = find(requests[i].id);
      append(sequence, unobserved(requests[i], sequence.index.text()));
      out[i].clear();
      out[i].set_source(name_);
      draft(sequence, requests[i], out[i]);
    }
  }

  void observe(SequenceId id, std::span<const TokenId> committed) override {
    append(find(id), committed);
  }

  void release(SequenceId id) override {
    if (sequences_.erase(id) == 0) unknown(id);
  }

  MemoryUse memory() const override {
    MemoryUse use;
    for (const auto& [id, one] : sequences_) {
      use.other += one.index.bytes() +
                   static_cast<std::int64_t>(one.matches.capacity() * sizeof(SuffixIndex::Match));
    }
    return use;
  }

 private:
  struct Sequence {
    SuffixIndex index;
    // With several candidates: the match that the text had when it was so many tokens, less one.
    std::vector<SuffixIndex::Match> matches;
  };

  [[noreturn]] static void unknown(SequenceId id) {
    throw InvalidArgument(expected_got("sequence", "an admitted id", std::to_string(id)));
  }

  Sequence& find(SequenceId id) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) unknown(id);
    return found->second;
  }

  void append(Sequence& sequence, std::span<const TokenId> tokens) const {
    if (options_.num_candidates == 1) {
      sequence.index.append(tokens);
      return;
    }
    for (const TokenId token : tokens) {
      sequence.index.append(token);
      sequence.matches.push_back(sequence.index.match());
    }
  }

  void draft(const Sequence& sequence, const DraftRequest& request, DraftTree& tree) {
    SuffixIndex::Match match = sequence.index.match();
    if (match.length < options_.min_match) return;
    std::int64_t left = request.max_nodes;
    if (options_.num_candidates == 1 || needs_chain(request.sampling)) {
      copy(sequence.index.text(), match.next, request.max_depth, left, tree);
      return;
    }
    starts_.clear();
    while (match.length >= options_.min_match) {
      starts_.push_back(match.next);
      if (std::ssize(starts_) == options_.num_candidates) break;
      match = sequence.matches[static_cast<std::size_t>(match.next) - 1];
    }
    // The others share a quarter, and what they leave goes back to the first.
    const std::int64_t others = std::ssize(starts_) - 1;
    const std::int64_t share = others == 0 ? 0 : left / 4 / others;
    std::int64_t first = left - share * others;
    left = share * others + copy(sequence.index.text(), starts_[0], request.max_depth, first, tree);
    for (std::int64_t i = 1; i <= others; ++i) {
      const std::int64_t own = left / (others + 1 - i);
      left += copy(sequence.index.text(), starts_[static_cast<std::size_t>(i)], request.max_depth,
                   own, tree) -
              own;
    }
    copy(sequence.index.text(), starts_[0], request.max_depth, left, tree);
  }

  // Adds what follows position `from` to the tree: at most `nodes` new nodes. Past the end of the
  // text the copy goes on into itself, so that a period continues. Returns the nodes left over.
  static std::int64_t copy(std::span<const TokenId> text, std::int64_t from, std::int64_t depth,
                           std::int64_t nodes, DraftTree& tree) {
    const std::int64_t period = std::ssize(text) - from;
    const std::int64_t match = match_before(text, from);
    std::int32_t node = DraftTree::kRoot;
    for (std::int64_t i = 0; i < depth && nodes > 0; ++i) {
      const TokenId token = text[static_cast<std::size_t>(from + i % period)];
      const std::int32_t known = tree.child(node, token);
      if (known >= 0) {
        node = known;
        continue;
      }
      node = tree.add(token, node, log_prob_of(match + i));
      --nodes;
    }
    return nodes;
  }

  static bool needs_chain(const SamplingParams* sampling) {
    return sampling != nullptr && !sampling->greedy() &&
           sampling->verification == Verification::block;
  }

  const std::string name_ = "ngram";
  const NgramOptions options_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  std::vector<std::int64_t> starts_;
};

}  // namespace

std::shared_ptr<Drafter> make_ngram_drafter(const NgramOptions& options) {
  return std::make_shared<NgramDrafter>(options);
}

}  // namespace specrt
