#pragma once

// How ops.cpp puts kernels on the streams of device.cpp.

#include <functional>

#include "emulated/emulated.h"

namespace specrt::cuda::emulated {

void put(Stream stream, std::function<void()> kernel);

/// Throws InternalError where the host's memory is given to a kernel; null is fine.
void require_on_device(const void* at, const char* what);

}  // namespace specrt::cuda::emulated
