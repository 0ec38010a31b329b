#include <algorithm>
#include <cmath>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/suffix_trie.h"
#include "decode/observed.h"
#include "decode/suffix_cache.h"
#include "specrt/error.h"
#include "specrt/suffix.h"

namespace specrt {
namespace {

class SuffixDrafter final : public Drafter {
 public:
  explicit SuffixDrafter(const SuffixOptions& options) : options_(options) {
    require("suffix_decoding_max_tree_depth",
            options.max_tree_depth >= 1 && options.max_tree_depth <= 4096,
            "an integer in [1, 4096]", std::to_string(options.max_tree_depth));
    require("suffix_decoding_max_spec_factor",
            std::isfinite(options.max_spec_factor) && options.max_spec_factor >= 0.0,
            "a finite number >= 0", std::to_string(options.max_spec_factor));
    require("suffix_decoding_max_spec_offset", std::isfinite(options.max_spec_offset),
            "a finite number", std::to_string(options.max_spec_offset));
    require("suffix_decoding_min_token_prob",
            options.min_token_prob >= 0.0 && options.min_token_prob <= 1.0, "a number in [0, 1]",
            std::to_string(options.min_token_prob));
    if (options.cache != nullptr) {
      require("cache", options.cache->max_depth() == options.max_tree_depth,
              "one of depth " + std::to_string(options.max_tree_depth),
              std::to_string(options.cache->max_depth()));
    }
    rule_.factor = options.max_spec_factor;
    rule_.offset = options.max_spec_offset;
    rule_.min_prob = static_cast<float>(options.min_token_prob);
  }

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    if (sequences_.contains(id)) {
      throw InvalidArgument(expected_got("sequence", "an id not in use", std::to_string(id)));
    }
    SuffixTrie own(options_.max_tree_depth, max_length);
    own.append(prompt);
    sequences_.emplace(id, Sequence{std::move(own), prompt.size()});
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    if (out.size() != requests.size()) {
      throw InvalidArgument(expected_got("out", std::to_string(requests.size()) + " trees",
                                         std::to_string(out.size())));
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      SuffixTrie& own = find(requests[i].id).own;
      own.append(unobserved(requests[i], own.open_text()));
      out[i].clear();
      out[i].set_source(name_);
      draft(own, requests[i], out[i]);
    }
  }

  void observe(SequenceId id, std::span<const TokenId> committed) override {
    find(id).own.append(committed);
  }

  void finished(SequenceId id, std::span<const TokenId> tokens) override {
    SuffixTrie& own = find(id).own;
    own.append(tokens.subspan(own.open_text().size()));
  }

  // It holds no place in a pool, and knows where the response begins.
  bool suspend(SequenceId id) override {
    find(id);
    return true;
  }

  void release(SequenceId id) override {
    const Sequence& gone = find(id);
    if (options_.cache != nullptr) options_.cache->add(gone.own.open_text().subspan(gone.prompt));
    sequences_.erase(id);
  }

  MemoryUse memory() const override {
    MemoryUse use;
    for (const auto& [id, sequence] : sequences_) use.other += sequence.own.bytes();
    if (options_.cache != nullptr) use.other += options_.cache->bytes();
    return use;
  }

 private:
  struct Sequence {
    SuffixTrie own;
    std::size_t prompt;  // tokens of it; what follows is the response
  };

  static void require(const char* what, bool fine, const std::string& expected,
                      const std::string& got) {
    if (!fine) throw InvalidArgument(expected_got(what, expected, got));
  }

  Sequence& find(SequenceId id) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) {
      throw InvalidArgument(expected_got("sequence", "an admitted id", std::to_string(id)));
    }
    return found->second;
  }

  // Others' texts may not have a say where the draft has one in the text.
  static bool reads_cache(const SamplingParams* sampling) {
    return sampling == nullptr || sampling->greedy() ||
           sampling->verification == Verification::coupled;
  }

  void draft(const SuffixTrie& own, const DraftRequest& request, DraftTree& tree) {
    rule_.max_nodes = request.max_nodes;
    rule_.max_depth = request.max_depth;
    rule_.tree = options_.use_tree_spec && !needs_chain(request.sampling);
    const auto depth = static_cast<std::size_t>(options_.max_tree_depth);
    const std::span<const TokenId> context =
        request.tokens.last(std::min(request.tokens.size(), depth));
    own.speculate(context, rule_, scratch_, best_);
    if (options_.cache != nullptr && reads_cache(request.sampling)) {
      const SuffixCache::State& shared = options_.cache->state();
      const std::shared_lock<std::shared_mutex> reading(shared.mutex);
      shared.trie.speculate(context, rule_, scratch_, other_);
      if (other_.score > best_.score) std::swap(best_, other_);
    }
    for (std::size_t i = 0; i < best_.tokens.size(); ++i) {
      const std::int32_t parent = best_.parents[i];
      const float above = parent < 0 ? 1.0f : best_.probs[static_cast<std::size_t>(parent)];
      tree.add(best_.tokens[i], parent, std::log(best_.probs[i] / above));
    }
  }

  static bool needs_chain(const SamplingParams* sampling) {
    return sampling != nullptr && !sampling->greedy() &&
           sampling->verification == Verification::block;
  }

  const std::string name_ = "suffix";
  const SuffixOptions options_;
  SuffixRule rule_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  SuffixTrie::Scratch scratch_;
  SuffixDraft best_;
  SuffixDraft other_;
};

}  // namespace

std::shared_ptr<Drafter> make_suffix_drafter(const SuffixOptions& options) {
  return std::make_shared<SuffixDrafter>(options);
}

}  // namespace specrt
