#include "core/kv_dtype.h"

#include "specrt/error.h"

namespace specrt {

const char* name_of(KvDType dtype) {
  return dtype == KvDType::f32 ? "float32" : dtype == KvDType::bf16 ? "bfloat16" : "int8";
}

KvDType kv_dtype_from_name(const std::string& name, DType model) {
  if (name == "auto") return model == DType::f32 ? KvDType::f32 : KvDType::bf16;
  if (name == "float32" || name == "fp32" || name == "f32") return KvDType::f32;
  if (name == "bfloat16" || name == "bf16") return KvDType::bf16;
  if (name == "int8") return KvDType::i8;
  throw InvalidArgument(expected_got(
      "kv_cache_dtype", "\"auto\", \"float32\", \"bfloat16\" or \"int8\" (or fp32, f32, bf16)",
      '"' + name + '"'));
}

}  // namespace specrt
