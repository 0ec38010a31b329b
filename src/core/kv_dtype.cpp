#include "core/kv_dtype.h"

#include "specrt/error.h"

namespace specrt {

const char* name_of(KvDType dtype) {
  switch (dtype) {
    case KvDType::f32:
      return "float32";
    case KvDType::bf16:
      return "bfloat16";
    case KvDType::f16:
      return "float16";
    case KvDType::i8:
      return "int8";
  }
  return "unknown";
}

KvDType kv_dtype_from_name(const std::string& name, DType model) {
  if (name == "auto") {
    return model == DType::f32 ? KvDType::f32 : model == DType::f16 ? KvDType::f16 : KvDType::bf16;
  }
  if (name == "float32" || name == "fp32" || name == "f32") return KvDType::f32;
  if (name == "bfloat16" || name == "bf16") return KvDType::bf16;
  if (name == "float16" || name == "fp16" || name == "f16") return KvDType::f16;
  if (name == "int8") return KvDType::i8;
  throw InvalidArgument(expected_got(
      "kv_cache_dtype",
      "\"auto\", \"float32\", \"bfloat16\", \"float16\" (or fp32, bf16, fp16) or \"int8\"",
      '"' + name + '"'));
}

}  // namespace specrt
