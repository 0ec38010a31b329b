#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "specrt/types.h"

namespace specrt {

/// How keys and values lie in the cache. i8 is symmetric: a vector of a head is scale * whole
/// numbers in [-127, 127], the scale an fp32 of its own for each token and head. f16 is CUDA's.
enum class KvDType : std::uint8_t { f32 = 0, bf16 = 1, i8 = 2, f16 = 3 };

constexpr std::size_t size_of(KvDType dtype) {
  return dtype == KvDType::f32 ? 4 : dtype == KvDType::i8 ? 1 : 2;
}

const char* name_of(KvDType dtype);

/// "auto" (a float32 or float16 model's own, else bf16) | "float32" | "fp32" | "f32" | "bfloat16" |
/// "bf16" | "float16" | "fp16" | "f16" | "int8"; anything else throws InvalidArgument.
KvDType kv_dtype_from_name(const std::string& name, DType model);

}  // namespace specrt
