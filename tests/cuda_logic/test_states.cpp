// What hidden states go through on their way to draft heads and inside Medusa's, and what comes
// back of their logits, against their definitions.

#include <cmath>
#include <limits>

#include "kernels/add_silu.h"
#include "kernels/likely.h"
#include "kernels/states.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

constexpr std::int64_t kRows = 4, kWidth = 70, kStride = 128;

// Rows that lie anywhere, one of them nowhere, into a part of wider rows.
template <typename T>
void check_states(bool normed) {
  const Floats x = random_floats(kRows * 100, 1, 3.0f), weight = random_floats(kWidth, 2);
  const std::vector<const float*> from = {x.data() + 200, nullptr, x.data(), x.data() + 100};
  Floats far(kRows * kWidth, -1.0f);
  const std::vector<float*> to = {far.data() + kWidth, far.data(), nullptr,
                                  far.data() + 2 * kWidth};
  StatesArgs args;
  args.from = from.data();
  args.offset = 7;
  args.weight = normed ? weight.data() : nullptr;
  args.width = kWidth;
  args.eps = 1e-5f;
  std::vector<T> rounded(kRows * kStride);
  args.rounded = rounded.data();
  args.rounded_stride = kStride;
  args.rounded_width = 80;
  Floats kept(kRows * kWidth);
  args.kept = kept.data();
  args.kept_stride = kWidth;
  args.to = to.data();
  run_in_all_orders<States<T>>({kRows}, args, rounded);
  for (std::int64_t r = 0; r < kRows; ++r) {
    const float* row = from[static_cast<std::size_t>(r)];
    Vector want(kWidth, 0.0);
    if (row != nullptr) {
      want = Vector(row + 7, row + 7 + kWidth);
      if (normed) want = specrt::reference::rms_norm(want, doubles(weight), 1e-5);
    }
    for (std::int64_t i = 0; i < 80; ++i) {
      const double expected = i < kWidth ? want[static_cast<std::size_t>(i)] : 0.0;
      CHECK_NEAR(to_float(rounded[r * kStride + i]), expected, tolerance<T>(expected, 4));
      if (i >= kWidth) continue;
      CHECK_NEAR(kept[r * kWidth + i], expected, tolerance<float>(expected, 8));
      // Exactly what is kept goes where it is wanted.
      if (r != 2) CHECK_EQ(to[static_cast<std::size_t>(r)][i], kept[r * kWidth + i]);
    }
    CHECK_EQ(rounded[r * kStride + 80].bits, 0xFFFF);  // what lies behind is left alone
  }
}

}  // namespace

TEST(cuda_states_are_normed_and_copied) {
  check_states<Bf16>(true);
  check_states<Bf16>(false);
  check_states<Half>(true);
}

TEST(cuda_states_at_the_first_position_may_count_as_zeros) {
  const Floats x = random_floats(2 * kWidth, 1);
  const std::vector<std::int32_t> positions = {0, 3};
  Floats kept(2 * kWidth);
  StatesArgs args;
  args.x = x.data();
  args.x_stride = args.width = args.kept_stride = kWidth;
  args.positions = positions.data();
  args.kept = kept.data();
  run_in_all_orders<States<Bf16>>({2}, args, kept);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    CHECK_EQ(kept[i], 0.0f);
    CHECK_EQ(kept[kWidth + i], x[kWidth + i]);
  }
}

TEST(cuda_add_silu) {
  constexpr std::int64_t kRows = 2, kWidth = 300, kStride = 320;
  const Floats before = random_floats(kRows * kWidth, 1), block = random_floats(kRows * kWidth, 2);
  Floats x = before;
  std::vector<Bf16> rounded(kRows * kStride);
  AddSiluArgs args{x.data(), block.data(), rounded.data(), kStride, kWidth};
  run_grid<AddSilu<Bf16>>({2, kRows}, args);
  for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
    const double want = before[i] + block[i] / (1.0 + std::exp(-double{block[i]}));
    CHECK_NEAR(x[i], want, tolerance<float>(want, 8));
    CHECK_EQ(rounded[i / kWidth * kStride + i % kWidth].bits, from_float<Bf16>(x[i]).bits);
  }
}

namespace {

std::vector<LikelyToken> likely(const Floats& logits, std::int64_t rows, std::int64_t vocab,
                                std::int32_t count) {
  LikelyArgs args;
  args.logits = logits.data();
  args.stride = std::ssize(logits) / rows;
  args.vocab = vocab;
  args.chunks = chunks_of(vocab);
  args.count = count;
  std::vector<LikelyShare> shares(rows * args.chunks);
  std::vector<LikelyToken> found(rows * args.chunks * count), out(rows * count);
  args.shares = shares.data();
  args.found = found.data();
  args.out = out.data();
  run_in_all_orders<LikelyInChunk>({args.chunks, rows}, args, found);
  run_in_all_orders<Likely>({rows}, args, out);
  return out;
}

}  // namespace

TEST(cuda_likely_are_the_largest_logits) {
  // Inside a chunk, over several, and many equal ones.
  for (const auto [vocab, count] : {std::pair{61, 5}, {5000, 9}, {9000, 64}}) {
    constexpr std::int64_t kTwo = 2;
    const std::int64_t stride = vocab + 3;
    Floats logits = random_floats(kTwo * stride, 7, 3.0f);
    for (float& one : logits) one = vocab == 9000 ? std::round(one) : one;
    const std::vector<LikelyToken> got = likely(logits, kTwo, vocab, count);
    for (std::int64_t r = 0; r < kTwo; ++r) {
      const float* row = logits.data() + r * stride;
      std::vector<std::int32_t> order(static_cast<std::size_t>(vocab));
      double sum = 0.0;
      for (std::int32_t i = 0; i < vocab; ++i) {
        order[static_cast<std::size_t>(i)] = i;
        sum += std::exp(double{row[i]});
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](std::int32_t a, std::int32_t b) { return row[a] > row[b]; });
      for (std::int32_t n = 0; n < count; ++n) {
        const LikelyToken& one = got[static_cast<std::size_t>(r * count + n)];
        CHECK_EQ(one.id, order[static_cast<std::size_t>(n)]);
        CHECK_NEAR(one.value, row[one.id] - std::log(sum), 1e-5);
      }
      // A row by itself has the same bits.
      const std::vector<LikelyToken> alone =
          likely(Floats(row, row + stride), 1, vocab, static_cast<std::int32_t>(count));
      CHECK(same_bits(alone, {got.begin() + r * count, got.begin() + (r + 1) * count}));
    }
  }
}

TEST(cuda_likely_of_rows_that_are_not_finite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr std::int64_t kVocab = 4099;
  Floats logits(4 * kVocab, 0.0f);
  logits[4098] = NAN;  // in the second chunk
  logits[kVocab + 5] = kInfinity;
  std::fill_n(logits.begin() + 2 * kVocab, 2 * kVocab, -kInfinity);
  logits[3 * kVocab + 4097] = 2.0f;  // all that is possible
  const std::vector<LikelyToken> got = likely(logits, 4, kVocab, 2);
  for (std::size_t i = 0; i < 8; ++i) CHECK_EQ(got[i].id, i == 6 ? 4097 : -1);
  CHECK_EQ(got[6].value, 0.0f);
}
