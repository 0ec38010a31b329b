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

enum class DType : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2 };

constexpr std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

SPECRT_API const char* name_of(DType dtype);

/// Of tensors as they are given: "float32" | "fp32" | "f32" | "bfloat16" | "bf16"; anything else
/// throws InvalidArgument.
SPECRT_API DType dtype_from_name(const std::string& name);

/// How a model's matrices are stored and multiplied. Products take activations rounded to bf16,
/// except f32 (as they are), f16 (rounded to fp16) and w8a8 (int8, one scale a row, found from the
/// row).
enum class Precision : std::uint8_t {
  f32 = 0,
  bf16 = 1,
  int8 = 2,  ///< the weight is bf16(scale * q), a scale per output
  int4 = 3,  ///< the weight is bf16(scale * q + min), both per group of 32 inputs
  w8a8 = 4,  ///< int8 weights times int8 activations, summed exactly
  f16 = 5,   ///< on CUDA only
};

SPECRT_API const char* name_of(Precision precision);

/// The names of dtype_from_name, "float16" | "fp16" | "f16" | "half", "int8", "int4" and "w8a8";
/// anything else throws InvalidArgument.
SPECRT_API Precision precision_from_name(const std::string& name);

/// What activations, the KV cache and row-wise tables of a model are in.
constexpr DType activation_dtype(Precision precision) {
  return precision == Precision::f32   ? DType::f32
         : precision == Precision::f16 ? DType::f16
                                       : DType::bf16;
}

}  // namespace specrt
