#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "specrt/types.h"

namespace specrt {

/// A text that grows at its end, and the answer to "where did its longest suffix occur before?"
class SuffixIndex {
 public:
  struct Match {
    std::int64_t length = 0;  ///< 0: none
    std::int64_t next = 0;    ///< index of the token that followed the earlier occurrence
  };

  /// `max_match` >= 1 bounds the suffix; `most_recent` chooses among its earlier occurrences the
  /// last (else the first). `capacity` bounds the text; memory is at most bytes_for(capacity).
  SuffixIndex(std::int64_t max_match, bool most_recent, std::int64_t capacity);
  ~SuffixIndex();
  SuffixIndex(SuffixIndex&&) noexcept;
  SuffixIndex& operator=(SuffixIndex&&) noexcept;

  /// Throws CapacityError beyond the capacity and InvalidArgument for a negative token.
  void append(TokenId token);
  void append(std::span<const TokenId> tokens);

  /// The longest suffix of the text, of at most max_match tokens, that also ends earlier (the
  /// occurrences may overlap), with the chosen earlier occurrence of exactly that suffix.
  Match match() const;

  std::span<const TokenId> text() const;
  std::int64_t steps() const;  ///< elementary steps of all appends, for tests of their cost
  std::int64_t bytes() const;  ///< held now
  static std::int64_t bytes_for(std::int64_t capacity);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specrt
