#include "launch/launch.cuh"
#include "ops.h"

namespace specrt::cuda {

void embed(Type type, const EmbedArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { launch<Embed<decltype(t)>>({rows}, args, stream); });
}

void rms_norm(Type type, const RmsNormArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { launch<RmsNorm<decltype(t)>>({rows}, args, stream); });
}

void rope_kv(Type type, const RopeKvArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16,
          [&](auto t) { launch<RopeKv<decltype(t)>>({rows, 2}, args, stream); });
}

void commit(const CommitArgs& args, std::int64_t sequences, std::int64_t planes, Stream stream) {
  launch<Commit>({args.most_nodes, sequences, planes}, args, stream);
}

}  // namespace specrt::cuda
