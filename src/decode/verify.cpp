#include "decode/verify.h"

namespace specrt {

void TreeWalk::start(std::int64_t limit) {
  limit_ = limit;
  node_ = DraftTree::kRoot;
  end_ = WalkEnd::running;
  emitted_.clear();
  path_.clear();
}

void TreeWalk::step(TokenId choice, std::int32_t child, bool is_stop) {
  emitted_.push_back(choice);
  // A stop is a stop even on the last token allowed.
  if (is_stop) {
    end_ = WalkEnd::stop;
    return;
  }
  if (static_cast<std::int64_t>(emitted_.size()) == limit_) {
    end_ = WalkEnd::length;
    return;
  }
  if (child < 0) {
    end_ = WalkEnd::mismatch;
    return;
  }
  path_.push_back(child);
  node_ = child;
}

}  // namespace specrt
