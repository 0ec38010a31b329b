#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "specrt/types.h"

namespace specrt {

/// How suffix decoding (Oliaro et al., arXiv 2411.04975) chooses a draft.
struct SuffixRule {
  std::int64_t max_nodes = 0;
  std::int64_t max_depth = 0;  ///< of the draft
  double factor = 1.0;         ///< a match of m tokens drafts at most m * factor + offset
  double offset = 0.0;
  float min_prob = 0.1f;  ///< nodes whose estimated path probability is lower are not drafted
  bool tree = false;      ///< branches too, likeliest first; else the likeliest path
};

/// A draft with the estimated probability of each node's path.
struct SuffixDraft {
  std::vector<TokenId> tokens;
  std::vector<std::int32_t> parents;
  std::vector<std::int32_t> depths;
  std::vector<float> probs;
  float score = 0.0f;      ///< sum of probs: expected accepted tokens
  std::int64_t match = 0;  ///< tokens of context that led here

  void clear();
};

/// Counts how often every string of at most max_depth tokens occurs in a set of texts: a trie of
/// all their suffixes, cut at that depth, with unary paths in one node. The newest text may still
/// grow, token by token; complete texts are forgotten oldest first. Of equal counts, whatever
/// occurred most recently comes first.
class SuffixTrie {
 public:
  /// `max_depth` >= 1; `capacity` bounds the tokens of all texts together. Memory is at most
  /// bytes_for(max_depth, capacity) and grows with the texts.
  SuffixTrie(std::int64_t max_depth, std::int64_t capacity);

  /// Makes the newest text longer. Throws CapacityError beyond the capacity and InvalidArgument for
  /// a negative token, before anything is changed.
  void append(std::span<const TokenId> tokens);
  /// The newest text is complete; what is appended next belongs to another. No effect on an empty
  /// text.
  void close();
  /// Forgets the oldest complete text, of which there must be one.
  void evict();

  std::int64_t texts() const;                  ///< complete ones
  std::int64_t tokens() const;                 ///< of all texts
  std::span<const TokenId> open_text() const;  ///< of a trie that never forgot anything
  std::int64_t nodes() const { return used_; }
  std::int64_t bytes() const;  ///< held now
  static std::int64_t bytes_for(std::int64_t max_depth, std::int64_t capacity);

  /// Memory of speculate(), for callers to keep.
  struct Scratch {
    struct Item {
      float prob;
      std::int32_t order;
      std::int32_t node;
      std::int32_t depth;
      std::int32_t parent;
    };
    std::vector<Item> queue;
    SuffixDraft candidate;
  };
  /// The draft of the best score among those of all suffixes of `context` that occur, the longest
  /// suffix of equals. `context` is the end of the open text, or stands outside of all texts.
  void speculate(std::span<const TokenId> context, const SuffixRule& rule, Scratch& scratch,
                 SuffixDraft& out) const;

  /// How often `string` of at most max_depth tokens occurs.
  std::int64_t count(std::span<const TokenId> string) const;
  /// Throws InternalError where the structure contradicts itself. For tests: it visits everything.
  void check_invariants() const;

 private:
  static constexpr std::int32_t kNone = -1;
  struct Node {
    std::int64_t end;     // the newest occurrence of the node's string ends before this token
    std::int32_t parent;  // of a free node: the next free one
    std::int32_t depth;   // tokens from the root; a leaf of the open text may not have them yet
    std::int32_t count;   // suffixes whose path enters the node's edge
    std::int32_t child;   // the most recent one
    std::int32_t older;   // siblings by when their edge was entered last
    std::int32_t newer;
  };
  struct Place {  // `depth` tokens from the root, on the edge of `node` or at its end
    std::int32_t node;
    std::int32_t depth;
  };
  struct Slot {
    std::int32_t from = kNone;  // kNone: free
    TokenId token = 0;
    std::int32_t to = 0;
  };

  TokenId at(std::int64_t position) const {
    const auto room = static_cast<std::int64_t>(capacity_);
    return text_[static_cast<std::size_t>(position < room ? position : position % room)];
  }
  std::int64_t label(std::int32_t node, std::int32_t depth) const {
    return nodes_[node].end - nodes_[node].depth + depth;
  }

  void append(TokenId token);
  bool step(Place& place, TokenId token);
  std::int32_t split(std::int32_t node, std::int32_t depth, std::int64_t end);
  void merge_into_child(std::int32_t node);

  std::int32_t new_node(const Node& node);
  void free_node(std::int32_t node);
  void link_child(std::int32_t parent, std::int32_t node);
  void unlink_child(std::int32_t node);
  void replace_child(std::int32_t node, std::int32_t by);

  std::size_t slot_of(std::int32_t from, TokenId token) const;
  std::int32_t find(std::int32_t from, TokenId token) const;
  void set_edge(std::int32_t from, TokenId token, std::int32_t to);
  void erase_edge(std::int32_t from, TokenId token);

  bool advance(Place& place, TokenId token) const;
  std::int32_t count_at(const Place& place) const;
  template <typename Visit>
  void successors(const Place& place, const Visit& visit) const;
  void draft_path(Place place, const SuffixRule& rule, SuffixDraft& out) const;
  void draft_tree(Place place, const SuffixRule& rule, Scratch& scratch, SuffixDraft& out) const;

  std::int64_t max_depth_;
  std::int64_t capacity_;
  std::vector<TokenId> text_;         // a ring of `capacity_` once it is full
  std::int64_t start_ = 0;            // the first token that is still there
  std::int64_t size_ = 0;             // tokens ever appended
  std::int64_t open_ = 0;             // where the newest text starts
  std::vector<std::int64_t> starts_;  // of complete texts, from `oldest_` on
  std::size_t oldest_ = 0;
  std::vector<Node> nodes_;
  std::int32_t free_ = kNone;
  std::int64_t used_ = 0;
  std::vector<Slot> table_;
  std::int64_t edges_ = 0;
  std::vector<Place> active_;         // suffixes of the open text that are no leaves, longest first
  std::vector<std::int32_t> leaves_;  // of the last max_depth suffixes, or kNone
  std::vector<std::int32_t> path_;
};

}  // namespace specrt
