#include "grids.h"
#include "launch/launch.cuh"

namespace specrt::cuda {

void embed(Type type, const EmbedArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { launch<Embed<decltype(t)>>({rows}, args, stream); });
}

void embed_packed(Type type, Stored stored, const EmbedPackedArgs& args, std::int64_t rows,
                  Stream stream) {
  by_type(type == Type::bf16, [&](auto t) {
    using T = decltype(t);
    if (stored == Stored::plain) {
      launch<EmbedPacked<T, Stored::plain>>({rows}, args, stream);
    } else if (stored == Stored::int8) {
      launch<EmbedPacked<T, Stored::int8>>({rows}, args, stream);
    } else {
      throw InternalError(expected_got("embedding", "a plain or int8 table", "int4"));
    }
  });
}

void add_block(const AddBlockArgs& args, std::int64_t rows, Stream stream) {
  launch<AddBlock>({rows}, args, stream);
}

void add_silu(Type type, const AddSiluArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { add_silu<decltype(t)>(OnGpu{stream}, args, rows); });
}

void finish_logits(const FinishLogitsArgs& args, std::int64_t rows, Stream stream) {
  finish_logits(OnGpu{stream}, args, rows);
}

void rms_norm(Type type, const RmsNormArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { launch<RmsNorm<decltype(t)>>({rows}, args, stream); });
}

void states(Type type, const StatesArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16, [&](auto t) { launch<States<decltype(t)>>({rows}, args, stream); });
}

void rope_kv(Type type, const RopeKvArgs& args, std::int64_t rows, Stream stream) {
  by_type(type == Type::bf16,
          [&](auto t) { launch<RopeKv<decltype(t)>>({rows, 2}, args, stream); });
}

void commit(const CommitArgs& args, std::int64_t sequences, std::int64_t planes, Stream stream) {
  commit(OnGpu{stream}, args, sequences, planes);
}

}  // namespace specrt::cuda
