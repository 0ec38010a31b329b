#include "launch/launch.cuh"
#include "ops.h"

namespace specrt::cuda {

void find_tops(const ChooseArgs& args, std::int64_t rows, Stream stream) {
  launch<FindTops>({args.chunks, rows}, args, stream);
}

void likely(const LikelyArgs& args, std::int64_t rows, Stream stream) {
  launch<LikelyInChunk>({args.chunks, rows}, args, stream);
  launch<Likely>({rows}, args, stream);
}

void choose(const ProcessArgs& process, const ChooseArgs& args, std::int64_t rows, Stream stream) {
  launch<ProcessLogits>({rows}, process, stream);
  launch<FindTops>({args.chunks, rows}, args, stream);
  launch<Weigh>({args.chunks, rows}, args, stream);
  launch<Choose>({rows}, args, stream);
}

void verify(const VerifyArgs& args, std::int64_t sequences, Stream stream) {
  launch<Verify>({sequences}, args, stream);
}

}  // namespace specrt::cuda
