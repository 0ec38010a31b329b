#pragma once

#include <string>

#include "specrt/error.h"

namespace specrt {

/// A GPU that failed. What was running on it is lost; the text says whether this process can use it
/// further.
class SPECRT_API DeviceError : public Error {
 public:
  DeviceError(const std::string& message, bool usable) : Error(message), usable_(usable) {}
  DeviceError(const DeviceError&) = default;
  ~DeviceError() override;
  /// Whether later calls can succeed. Where not, the process has to be started anew.
  bool usable() const { return usable_; }

 private:
  bool usable_ = false;
};

}  // namespace specrt
