#pragma once

#include <optional>
#include <string>

#include "specrt/model.h"

namespace specrt {

struct RunnerOptions;

/// "cpu": none; "cuda", "cuda:1": the number of a GPU. Throws InvalidArgument for anything else.
std::optional<int> cuda_device_of(const std::string& device);

/// Throws UnsupportedError for weights that no kernel of the device takes.
void check_dtype(Precision precision, const std::string& device);
/// Throws UnsupportedError naming what options.device does not do of what is asked, and what it
/// does.
void check_device(const ModelConfig& config, Precision precision, const RunnerOptions& options);

}  // namespace specrt
