// Padding rows of a captured graph: they write nothing that anybody has, whatever they point at,
// and nobody's result depends on them.

#include "pass.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

std::vector<Bf16> run(PaddedPass& pass, Order order) {
  const std::uint64_t before = pass.others();
  run_grid<RopeKv<Bf16>>({pass.padded_rows, 2}, pass.rope(), order);
  run_grid<Attention<Bf16, 64>>({pass.padded_units, PaddedPass::kKvHeads, 1}, pass.attention(),
                                order);
  run_grid<Commit>({PaddedPass::kMost, pass.sequences, 2}, pass.commit(), order);
  CHECK_EQ(pass.others(), before);
  for (std::size_t i = 3 * PaddedPass::kOut; i < pass.out.size(); ++i) {
    CHECK_EQ(pass.out[i].bits, 0x1234);
  }
  return pass.results();
}

TEST(cuda_padding_rows_leave_pages_alone) {
  PaddedPass plain(0);
  const auto want = run(plain, Order::forward);
  for (const Order order : {Order::forward, Order::backward, Order::shuffled}) {
    PaddedPass padded(2);
    CHECK(same_bits(run(padded, order), want));
  }
}

}  // namespace
