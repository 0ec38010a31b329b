#include "model/state_copies.h"

#include <algorithm>

#include "model/cuda_runner.h"
#include "specrt/error.h"

namespace specrt {

StateCopies::StateCopies(int device)
    : device_(device),
      list_(static_cast<std::size_t>(device_bytes())),
      staging_(static_cast<std::size_t>(device_bytes())) {
  from_.reserve(static_cast<std::size_t>(kMost));
  to_.reserve(static_cast<std::size_t>(kMost));
}

void StateCopies::add(const float* from, float* to, std::int64_t width, cuda::Stream stream,
                      CudaRunner* owner) {
  const bool others = !from_.empty() && (width_ != width || owner_ != owner);
  if (others || std::ssize(from_) == kMost) flush(stream);
  from_.push_back(from);
  to_.push_back(to);
  width_ = width;
  owner_ = owner;
}

void StateCopies::check(const FeatureRows& from) const {
  auto* const owner = static_cast<CudaRunner*>(from.device());
  if (owner != nullptr && owner->device() == device_) return;
  throw InvalidArgument("[drafter] expected a target on the drafter's own device, got another");
}

void StateCopies::add_features(const FeatureRows& from, std::int64_t i, float* to,
                               cuda::Stream stream) {
  auto* const owner = static_cast<CudaRunner*>(from.device());
  const std::int64_t hidden = owner->config().hidden_size;
  for (std::int64_t p = 0; p * hidden < from.width(); ++p) {
    add(from.address(i, p), to + p * hidden, hidden, stream, owner);
  }
}

void StateCopies::flush(cuda::Stream stream) {
  if (from_.empty()) return;
  cuda::use_device(device_);
  sent_.wait();
  const std::size_t count = from_.size();
  auto* staged = reinterpret_cast<const float**>(staging_.data());
  std::copy(from_.begin(), from_.end(), staged);
  std::copy(to_.begin(), to_.end(), staged + count);
  cuda::copy_to_device(list_.data(), staged, 2 * count * sizeof(float*), stream);
  sent_.record(stream);
  cuda::StatesArgs args;
  args.from = reinterpret_cast<const float* const*>(list_.data());
  args.to = reinterpret_cast<float* const*>(list_.data()) + count;
  args.width = width_;
  if (owner_ != nullptr) {
    made_.record(owner_->stream());
    made_.hold(stream);
  }
  cuda::states(cuda::Type::bf16, args, static_cast<std::int64_t>(count), stream);
  if (owner_ != nullptr) {
    done_.record(stream);
    done_.hold(owner_->stream());
  }
  from_.clear();
  to_.clear();
  owner_ = nullptr;
}

}  // namespace specrt
