#include "grids.h"
#include "launch/launch.cuh"

namespace specrt::cuda {

void find_tops(const ChooseArgs& args, std::int64_t rows, Stream stream) {
  launch<FindTops>({args.chunks, rows}, args, stream);
}

void likely(const LikelyArgs& args, std::int64_t rows, Stream stream) {
  likely(OnGpu{stream}, args, rows);
}

void process_logits(const ProcessArgs& args, std::int64_t rows, Stream stream) {
  launch<ProcessLogits>({rows}, args, stream);
}

void favour(const FavourArgs& args, std::int64_t rows, bool filtered, Stream stream) {
  favour(OnGpu{stream}, args, rows, filtered);
}

void choose(const ProcessArgs& process, const ChooseArgs& args, std::int64_t rows, Stream stream) {
  choose(OnGpu{stream}, process, args, rows);
}

void verify(const VerifyArgs& args, std::int64_t sequences, Stream stream) {
  launch<Verify>({sequences}, args, stream);
}

void grow_level(const GrowArgs& args, std::int64_t drafts, Stream stream) {
  launch<GrowLevel>({drafts}, args, stream);
}

void finish_draft(const FinishDraftArgs& args, std::int64_t drafts, Stream stream) {
  launch<FinishDraft>({drafts}, args, stream);
}

}  // namespace specrt::cuda
