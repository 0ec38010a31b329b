#include "specrt/draft_tree.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "specrt/error.h"

namespace specrt {
namespace {

[[noreturn]] void refuse(const char* what, const std::string& expected, const std::string& got) {
  throw InvalidArgument(expected_got(what, expected, got));
}

std::string at_node(std::size_t index) { return " for node " + std::to_string(index); }

void check_node(std::size_t index, TokenId token, std::int32_t parent, float log_prob) {
  if (index >= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    refuse("tokens", "fewer than 2^31 - 1 nodes", "more");
  }
  if (token < 0) refuse("tokens", "ids >= 0", std::to_string(token) + at_node(index));
  if (parent < DraftTree::kRoot || parent >= static_cast<std::int64_t>(index)) {
    refuse("parents", "an earlier node or -1", std::to_string(parent) + at_node(index));
  }
  if (std::isnan(log_prob)) refuse("log_probs", "numbers", "nan" + at_node(index));
}

[[noreturn]] void refuse_duplicate(TokenId token, std::int32_t parent) {
  refuse("tokens", "siblings that differ",
         "token " + std::to_string(token) + " twice under node " + std::to_string(parent));
}

std::string count_of(std::size_t count) { return std::to_string(count); }

}  // namespace

DraftTree::DraftTree(std::vector<TokenId> tokens, std::vector<std::int32_t> parents,
                     std::vector<float> log_probs, std::string source) {
  const std::size_t size = tokens.size();
  if (parents.size() != size) {
    refuse("parents", count_of(size) + " values, one a token", count_of(parents.size()));
  }
  if (log_probs.empty()) log_probs.resize(size, 0.0f);
  if (log_probs.size() != size) {
    refuse("log_probs", "none or " + count_of(size) + " values", count_of(log_probs.size()));
  }
  depths_.reserve(size);
  std::vector<std::pair<std::int32_t, TokenId>> children;
  children.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    check_node(i, tokens[i], parents[i], log_probs[i]);
    depths_.push_back(parents[i] == kRoot ? 1 : depths_[parents[i]] + 1);
    children.emplace_back(parents[i], tokens[i]);
  }
  // add() compares siblings one by one; here the tree may be any size.
  std::sort(children.begin(), children.end());
  const auto twin = std::adjacent_find(children.begin(), children.end());
  if (twin != children.end()) refuse_duplicate(twin->second, twin->first);

  tokens_ = std::move(tokens);
  parents_ = std::move(parents);
  log_probs_ = std::move(log_probs);
  source_ = std::move(source);
}

DraftTree DraftTree::chain(std::span<const TokenId> tokens, std::string source) {
  std::vector<std::int32_t> parents(tokens.size());
  for (std::size_t i = 0; i < parents.size(); ++i) parents[i] = static_cast<std::int32_t>(i) - 1;
  return DraftTree({tokens.begin(), tokens.end()}, std::move(parents), {}, std::move(source));
}

std::int32_t DraftTree::max_depth() const {
  return depths_.empty() ? 0 : *std::max_element(depths_.begin(), depths_.end());
}

std::int32_t DraftTree::child(std::int32_t node, TokenId token) const {
  const auto size = static_cast<std::int32_t>(tokens_.size());
  if (node < kRoot || node >= size) return -2;
  // Children come after their parent, so the chain's lookup ends at once.
  for (std::int32_t i = node + 1; i < size; ++i) {
    if (parents_[i] == node && tokens_[i] == token) return i;
  }
  return -2;
}

bool DraftTree::has_children(std::int32_t node) const {
  if (node < kRoot || node >= static_cast<std::int64_t>(size())) return false;
  return std::find(parents_.begin() + (node + 1), parents_.end(), node) != parents_.end();
}

void DraftTree::clear() {
  tokens_.clear();
  parents_.clear();
  depths_.clear();
  log_probs_.clear();
  source_.clear();
  sources_.clear();
  node_sources_.clear();
  draw_ = Draw::deterministic;
  distributions_.clear();
  distribution_row_.clear();
  distribution_size_ = 0;
}

void DraftTree::set_sources(std::span<const std::string> names) {
  if (names.size() > 32) refuse("sources", "at most 32 names", count_of(names.size()));
  sources_.assign(names.begin(), names.end());
  node_sources_.assign(size(), 0);
}

std::uint32_t DraftTree::sources_of(std::int32_t node) const {
  if (node < 0 || node >= static_cast<std::int64_t>(size())) {
    refuse("node", "a node of the draft", std::to_string(node));
  }
  return sources_.empty() ? 1u : node_sources_[static_cast<std::size_t>(node)];
}

void DraftTree::set_sources_of(std::int32_t node, std::uint32_t bits) {
  if (node < 0 || node >= static_cast<std::int64_t>(node_sources_.size())) {
    refuse("node", "a node of a draft with sources", std::to_string(node));
  }
  if (std::uint64_t{bits} >> sources_.size() != 0) {
    refuse("sources", "bits of the " + count_of(sources_.size()) + " names", std::to_string(bits));
  }
  node_sources_[static_cast<std::size_t>(node)] = bits;
}

std::span<const float> DraftTree::distribution(std::int32_t node) const {
  const auto at = static_cast<std::size_t>(node + 1);
  if (node < kRoot || at >= distribution_row_.size() || distribution_row_[at] < 0) return {};
  return std::span(distributions_)
      .subspan(static_cast<std::size_t>(distribution_row_[at]) * distribution_size_,
               distribution_size_);
}

void DraftTree::set_distribution(std::int32_t node, std::span<const float> probabilities) {
  if (node < kRoot || node >= static_cast<std::int64_t>(size())) {
    refuse("distribution", "a node of the draft or -1", std::to_string(node));
  }
  if (distribution_size_ != 0 && probabilities.size() != distribution_size_) {
    refuse("distribution", count_of(distribution_size_) + " values",
           count_of(probabilities.size()));
  }
  double sum = 0.0;
  for (const float value : probabilities) {
    if (!(value >= 0.0f) || std::isinf(value)) {
      refuse("distribution", "finite numbers of at least 0", std::to_string(value));
    }
    sum += double{value};
  }
  if (!(sum > 0.0)) refuse("distribution", "a positive sum", std::to_string(sum));
  distribution_size_ = probabilities.size();
  const auto at = static_cast<std::size_t>(node + 1);
  if (distribution_row_.size() <= at) distribution_row_.resize(at + 1, -1);
  distribution_row_[at] = static_cast<std::int32_t>(distributions_.size() /
                                                    std::max<std::size_t>(1, distribution_size_));
  distributions_.insert(distributions_.end(), probabilities.begin(), probabilities.end());
}

std::int32_t DraftTree::add(TokenId token, std::int32_t parent, float log_prob) {
  const std::size_t index = size();
  check_node(index, token, parent, log_prob);
  if (draw_ != Draw::with_replacement && child(parent, token) >= 0) {
    refuse_duplicate(token, parent);
  }
  tokens_.push_back(token);
  parents_.push_back(parent);
  depths_.push_back(parent == kRoot ? 1 : depths_[parent] + 1);
  log_probs_.push_back(log_prob);
  if (!sources_.empty()) node_sources_.push_back(0);
  return static_cast<std::int32_t>(index);
}

bool DraftTree::prune(std::int64_t depth, std::int64_t nodes) {
  const auto limit = static_cast<std::size_t>(std::max<std::int64_t>(nodes, 0));
  std::size_t kept = 0;
  return compact([&](std::size_t i) {
    const bool keep = kept < limit && depths_[i] <= depth;
    kept += keep ? 1 : 0;
    return keep;
  });
}

bool DraftTree::keep(const std::vector<bool>& kept) {
  if (kept.size() != size()) {
    refuse("kept", count_of(size()) + " values, one a node", count_of(kept.size()));
  }
  for (std::size_t i = 0; i < size(); ++i) {
    if (kept[i] && parents_[i] != kRoot && !kept[parents_[i]]) {
      refuse("kept", "every kept node's parent", "none" + at_node(i));
    }
  }
  return compact([&](std::size_t i) { return kept[i]; });
}

// `keep` is asked once a node, in order, and keeps every kept node's parent.
template <typename Keep>
bool DraftTree::compact(const Keep& keep) {
  const std::size_t before = size();
  // depths_ holds each node's new index meanwhile, so that nothing need be allocated.
  std::size_t kept = 0;
  for (std::size_t i = 0; i < before; ++i) {
    depths_[i] = keep(i) ? static_cast<std::int32_t>(kept++) : -1;
  }
  for (std::size_t i = 0; i < before; ++i) {
    const std::int32_t to = depths_[i];
    if (i + 1 < distribution_row_.size()) {
      const std::int32_t row = distribution_row_[i + 1];
      distribution_row_[i + 1] = -1;
      if (to >= 0) distribution_row_[to + 1] = row;
    }
    if (to < 0) continue;
    tokens_[to] = tokens_[i];
    parents_[to] = parents_[i] == kRoot ? kRoot : depths_[parents_[i]];
    log_probs_[to] = log_probs_[i];
    if (!sources_.empty()) node_sources_[to] = node_sources_[i];
  }
  tokens_.resize(kept);
  parents_.resize(kept);
  depths_.resize(kept);
  log_probs_.resize(kept);
  if (!sources_.empty()) node_sources_.resize(kept);
  for (std::size_t i = 0; i < kept; ++i) {
    depths_[i] = parents_[i] == kRoot ? 1 : depths_[parents_[i]] + 1;
  }
  return kept < before;
}

void DraftTree::check_vocabulary(std::int64_t vocab_size) const {
  for (const TokenId token : tokens_) {
    if (token >= vocab_size) {
      refuse("tokens", "ids in [0, " + std::to_string(vocab_size) + ")", std::to_string(token));
    }
  }
}

}  // namespace specrt
