#include "specrt/types.h"

#include "specrt/error.h"

namespace specrt {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
  }
  return "unknown";
}

DType dtype_from_name(const std::string& name) {
  if (name == "float32" || name == "fp32" || name == "f32") return DType::f32;
  if (name == "bfloat16" || name == "bf16") return DType::bf16;
  throw InvalidArgument(
      expected_got("dtype", "\"float32\" or \"bfloat16\" (or fp32, f32, bf16)", '"' + name + '"'));
}

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return "float32";
    case Precision::bf16:
      return "bfloat16";
    case Precision::int8:
      return "int8";
    case Precision::int4:
      return "int4";
    case Precision::w8a8:
      return "w8a8";
    case Precision::f16:
      return "float16";
  }
  return "unknown";
}

Precision precision_from_name(const std::string& name) {
  if (name == "float32" || name == "fp32" || name == "f32") return Precision::f32;
  if (name == "bfloat16" || name == "bf16") return Precision::bf16;
  if (name == "float16" || name == "fp16" || name == "f16" || name == "half") return Precision::f16;
  for (const Precision one : {Precision::int8, Precision::int4, Precision::w8a8}) {
    if (name == name_of(one)) return one;
  }
  throw InvalidArgument(expected_got("dtype",
                                     "\"float32\", \"bfloat16\", \"float16\" (or fp32, bf16, "
                                     "fp16), \"int8\", \"int4\" or \"w8a8\"",
                                     '"' + name + '"'));
}

}  // namespace specrt
