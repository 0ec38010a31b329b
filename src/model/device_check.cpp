#include "model/device_check.h"

#include <algorithm>
#include <bit>

#include "core/kv_dtype.h"
#include "model/runner.h"
#include "ops.h"
#include "specrt/error.h"

namespace specrt {

std::optional<int> cuda_device_of(const std::string& device) {
  if (device == "cpu") return std::nullopt;
  if (device == "cuda") return 0;
  const std::string prefix = "cuda:";
  const std::string number = device.substr(std::min(prefix.size(), device.size()));
  const bool digits =
      !number.empty() && number.size() <= 4 &&
      std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (device.compare(0, prefix.size(), prefix) != 0 || !digits) {
    throw InvalidArgument(expected_got("device", "'cpu', 'cuda' or 'cuda:N'", device));
  }
  return std::stoi(number);
}

void check_dtype(Precision precision, const std::string& device) {
  if (cuda_device_of(device)) {
    if (precision != Precision::f32 && precision != Precision::w8a8) return;
    throw UnsupportedError(expected_got(
        "dtype", "'bfloat16', 'float16', 'int8' or 'int4' with device 'cuda'", name_of(precision)));
  }
  if (precision != Precision::f16) return;
  throw UnsupportedError(expected_got(
      "dtype", "'float32', 'bfloat16', 'int8', 'int4' or 'w8a8' on the CPU", name_of(precision)));
}

void check_device(const ModelConfig& config, Precision precision, const RunnerOptions& options) {
  check_dtype(precision, options.device);
  const KvDType kv = kv_dtype_from_name(options.kv_cache_dtype, activation_dtype(precision));
  if (!cuda_device_of(options.device)) {
    if (kv != KvDType::f16) return;
    throw UnsupportedError(
        expected_got("kv_cache_dtype", "'float32', 'bfloat16' or 'int8' on the CPU", name_of(kv)));
  }
  const auto refuse = [](const char* what, const std::string& expected, const std::string& got) {
    throw UnsupportedError(expected_got(what, expected + " with device 'cuda'", got));
  };
  const KvDType own = precision == Precision::f16 ? KvDType::f16 : KvDType::bf16;
  if (kv != own) {
    refuse("kv_cache_dtype",
           "'" + std::string(name_of(own)) + "' for dtype '" + name_of(precision) + "'",
           name_of(kv));
  }
  if (options.block_size < 1 || !std::has_single_bit(static_cast<unsigned>(options.block_size))) {
    refuse("block_size", "a power of two", std::to_string(options.block_size));
  }
  if (config.head_dim % 8 != 0 || config.head_dim > 256) {
    refuse("model", "heads of a multiple of 8, up to 256, values", std::to_string(config.head_dim));
  }
  if (cuda::attention_rows(config.num_heads / config.num_kv_heads) < 1) {
    refuse("model", "at most 64 query heads to a key-value head",
           std::to_string(config.num_heads / config.num_kv_heads));
  }
}

}  // namespace specrt
