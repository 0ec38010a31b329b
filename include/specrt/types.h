#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "specrt/export.h"

namespace specrt {

/// Index into the target's vocabulary.
using TokenId = std::int32_t;

/// Names a sequence inside one Decoder; never reused by it.
using SequenceId = std::int64_t;

enum class DType : std::uint8_t { f32 = 0, bf16 = 1 };

constexpr std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

SPECRT_API const char* name_of(DType dtype);

/// "float32" | "fp32" | "f32" | "bfloat16" | "bf16"; anything else throws InvalidArgument.
SPECRT_API DType dtype_from_name(const std::string& name);

}  // namespace specrt
