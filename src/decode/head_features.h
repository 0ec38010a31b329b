#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "model/held_rows.h"
#include "specrt/types.h"

namespace specrt {

/// Target features that wait for the head to read them: rows of one buffer, given out one by one.
class FeatureStore {
 public:
  FeatureStore(HeldRows room, std::int64_t rows) : room_(std::move(room)) {
    free_.reserve(static_cast<std::size_t>(rows));
    for (std::int64_t i = rows; i-- > 0;) free_.push_back(static_cast<std::int32_t>(i));
  }

  bool full() const { return free_.empty(); }
  std::int32_t take() {
    const std::int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give_back(std::int32_t slot) { free_.push_back(slot); }
  float* row(std::int32_t slot) const { return room_.row(slot); }

 private:
  HeldRows room_;
  std::vector<std::int32_t> free_;
};

/// Keys under which a head's blocks are remembered. Position i holds what follows from tokens 0 to
/// i + shift (1 but for later modules); so its key is token i + shift, and the first keys carry the
/// tokens before as well, a digit each.
class HeadKeys {
 public:
  explicit HeadKeys(std::int64_t vocab_size, std::int64_t shift = 1)
      : vocab_(vocab_size), base_(INT32_MAX / vocab_size), shift_(shift) {
    if (base_ < 2) return;
    for (std::int64_t reach = 1; reach < vocab_size; reach *= base_) ++digits_;
  }
  /// Whether blocks of this size tell all first tokens apart.
  bool usable(std::int64_t block_size) const {
    return base_ >= 2 && block_size >= digits_ * shift_;
  }

  /// The keys that follow from `tokens` beyond those that are there.
  void append(std::span<const TokenId> tokens, std::vector<TokenId>& keys) const {
    const auto shift = static_cast<std::size_t>(shift_);
    for (std::size_t i = keys.size(); i + shift < tokens.size(); ++i) {
      std::int64_t digit = 0;
      const auto at = static_cast<std::int64_t>(i);
      if (at < digits_ * shift_) {
        digit = tokens[static_cast<std::size_t>(at / digits_)];
        for (std::int64_t j = 0; j < at % digits_; ++j) digit /= base_;
        digit %= base_;
      }
      keys.push_back(static_cast<TokenId>(tokens[i + shift] + vocab_ * digit));
    }
  }

 private:
  std::int64_t vocab_ = 0;
  std::int64_t base_ = 0;
  std::int64_t shift_ = 1;
  std::int64_t digits_ = 0;
};

}  // namespace specrt
