#pragma once

#include <span>
#include <string>

#include "specrt/drafter.h"
#include "specrt/error.h"

namespace specrt {

/// The request's tokens behind the `known` ones that a drafter has, whose last one is `last`. The
/// request is the truth: what was not observed is learnt now. Comparing all of it would cost as
/// much as the text is long.
inline std::span<const TokenId> unobserved(const DraftRequest& request,
                                           std::span<const TokenId> known) {
  const std::size_t count = known.size();
  if (request.tokens.size() < count) {
    throw InternalError(expected_got("tokens",
                                     "at least the " + std::to_string(count) +
                                         " tokens observed of sequence " +
                                         std::to_string(request.id),
                                     std::to_string(request.tokens.size())));
  }
  if (count > 0 && request.tokens[count - 1] != known.back()) {
    throw InternalError(expected_got("tokens",
                                     "token " + std::to_string(known.back()) + " as observed at " +
                                         std::to_string(count - 1) + " of sequence " +
                                         std::to_string(request.id),
                                     std::to_string(request.tokens[count - 1])));
  }
  return request.tokens.subspan(count);
}

}  // namespace specrt
