#include "launch/attention.cuh"

namespace specrt::cuda {

void attention(Type type, const AttentionArgs& args, std::int64_t rows, std::int64_t units,
               Stream stream) {
  if (args.head_dim < 8 || args.head_dim > 256 || args.head_dim % 8 != 0) {
    throw UnsupportedError(expected_got("attention", "a head size up to 256, a multiple of 8",
                                        std::to_string(args.head_dim)));
  }
  if (attention_rows(args.q_heads / args.kv_heads) < 1) {
    throw UnsupportedError(expected_got("attention", "at most 64 query heads to a key-value head",
                                        std::to_string(args.q_heads / args.kv_heads)));
  }
  by_type(type == Type::bf16,
          [&](auto t) { launch_attention<decltype(t)>(args, rows, units, stream); });
}

}  // namespace specrt::cuda
