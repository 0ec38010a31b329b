#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/suffix_index.h"
#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt {
namespace {

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
  }

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    if (sequences_.contains(id)) {
      throw InvalidArgument(expected_got("sequence", "an id not in use", std::to_string(id)));
    }
    SuffixIndex index(options_.max_match, options_.most_recent, max_length);
    index.append(prompt);
    sequences_.emplace(id, std::move(index));
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    if (out.size() != requests.size()) {
      throw InvalidArgument(expected_got("out", std::to_string(requests.size()) + " trees",
                                         std::to_string(out.size())));
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      SuffixIndex& index = find(requests[i].id);
      catch_up(index, requests[i]);
      out[i].clear();
      out[i].set_source(name_);
      draft(index, std::min(requests[i].max_nodes, requests[i].max_depth), out[i]);
    }
  }

  void observe(SequenceId id, std::span<const TokenId> committed) override {
    find(id).append(committed);
  }

  void release(SequenceId id) override {
    if (sequences_.erase(id) == 0) unknown(id);
  }

  MemoryUse memory() const override {
    MemoryUse use;
    for (const auto& [id, index] : sequences_) use.other += index.bytes();
    return use;
  }

 private:
  [[noreturn]] static void unknown(SequenceId id) {
    throw InvalidArgument(expected_got("sequence", "an admitted id", std::to_string(id)));
  }

  SuffixIndex& find(SequenceId id) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) unknown(id);
    return found->second;
  }

  // The request is the truth: what was not observed is indexed now. Comparing all of it would
  // cost as much as the text is long.
  static void catch_up(SuffixIndex& index, const DraftRequest& request) {
    const std::size_t known = index.text().size();
    if (request.tokens.size() < known) {
      throw InternalError(expected_got("tokens",
                                       "at least the " + std::to_string(known) +
                                           " tokens observed of sequence " +
                                           std::to_string(request.id),
                                       std::to_string(request.tokens.size())));
    }
    if (known > 0 && request.tokens[known - 1] != index.text().back()) {
      throw InternalError(expected_got("tokens",
                                       "token " + std::to_string(index.text().back()) +
                                           " as observed at " + std::to_string(known - 1) +
                                           " of sequence " + std::to_string(request.id),
                                       std::to_string(request.tokens[known - 1])));
    }
    if (request.tokens.size() > known) index.append(request.tokens.subspan(known));
  }

  // What followed the earlier occurrence; past the end of the text the copy goes on into itself,
  // so that a period continues.
  void draft(const SuffixIndex& index, std::int64_t count, DraftTree& tree) const {
    const SuffixIndex::Match match = index.match();
    if (match.length < options_.min_match) return;
    const std::span<const TokenId> followed = index.text().subspan(match.next);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t back = i - std::ssize(followed);
      tree.add(back < 0 ? followed[i] : tree.tokens()[back], static_cast<std::int32_t>(i) - 1);
    }
  }

  const std::string name_ = "ngram";
  const NgramOptions options_;
  std::unordered_map<SequenceId, SuffixIndex> sequences_;
};

}  // namespace

std::shared_ptr<Drafter> make_ngram_drafter(const NgramOptions& options) {
  return std::make_shared<NgramDrafter>(options);
}

}  // namespace specrt
