#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

/// Decides which tokens may come next: the hook for grammar engines. One object follows one
/// sequence and is advanced only along the path that the target really takes.
class SPECRT_API TokenConstraint {
 public:
  TokenConstraint() = default;
  TokenConstraint(const TokenConstraint&) = delete;
  TokenConstraint& operator=(const TokenConstraint&) = delete;
  virtual ~TokenConstraint();

  /// Sets bit id % 32 of mask[id / 32] for every token that may come next, clears the others.
  /// mask has (vocab_size + 31) / 32 words.
  virtual void fill_bitmask(std::span<std::uint32_t> mask) = 0;

  /// The token has been chosen. Throws InvalidArgument where it may not come here.
  virtual void advance(TokenId token) = 0;

  /// Nothing may follow: the text is complete.
  virtual bool finished() const = 0;

  /// How many leading tokens of a draft's path could follow; changes nothing.
  virtual std::int64_t accepts(std::span<const TokenId> tokens) = 0;

  /// An independent copy in the same state: a draft model follows its draft with one.
  virtual std::unique_ptr<TokenConstraint> fork() const = 0;
};

}  // namespace specrt
