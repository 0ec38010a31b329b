#include "specrt/types.h"

#include "specrt/error.h"

namespace specrt {

const char* name_of(DType dtype) { return dtype == DType::f32 ? "float32" : "bfloat16"; }

DType dtype_from_name(const std::string& name) {
  if (name == "float32" || name == "fp32" || name == "f32") return DType::f32;
  if (name == "bfloat16" || name == "bf16") return DType::bf16;
  throw InvalidArgument(
      expected_got("dtype", "\"float32\" or \"bfloat16\" (or fp32, f32, bf16)", '"' + name + '"'));
}

}  // namespace specrt
