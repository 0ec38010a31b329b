// Kernels that work row by row, against their definitions in double precision.

#include <cmath>

#include "kernels/add_block.h"
#include "kernels/commit.h"
#include "kernels/embed.h"
#include "kernels/finish_logits.h"
#include "kernels/finish_product.h"
#include "kernels/pack.h"
#include "kernels/rms_norm.h"
#include "kernels/rope_kv.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

template <typename T>
void check_norm(std::int64_t width) {
  constexpr std::int64_t kRows = 3;
  const std::int64_t stride = padded_columns(width);
  const Floats x = random_floats(kRows * width, 1, 3.0f);
  const Floats weight = random_floats(width, 2);
  std::vector<T> out(kRows * stride);
  RmsNormArgs args{x.data(), nullptr, weight.data(), out.data(), width, stride, width, 1e-5f};
  run_in_all_orders<RmsNorm<T>>({kRows}, args, out);
  for (std::int64_t r = 0; r < kRows; ++r) {
    const Vector row(x.begin() + r * width, x.begin() + (r + 1) * width);
    const Vector want = specrt::reference::rms_norm(row, doubles(weight), 1e-5);
    for (std::int64_t i = 0; i < stride; ++i) {
      const double expected = i < width ? want[i] : 0.0;
      CHECK_NEAR(to_float(out[r * stride + i]), expected, tolerance<T>(expected, 4));
    }
    // A row by itself has the same bits.
    std::vector<T> alone(stride);
    args.x = x.data() + r * width;
    args.out = alone.data();
    run_grid<RmsNorm<T>>({1}, args);
    CHECK(same_bits(alone, {out.begin() + r * stride, out.begin() + (r + 1) * stride}));
  }
}

TEST(cuda_rms_norm) {
  for (const std::int64_t width : {1, 31, 64, 255, 576, 1030}) {
    check_norm<Bf16>(width);
    check_norm<Half>(width);
    check_norm<float>(width);
  }
}

TEST(cuda_rms_norm_without_weight_rounds_only) {
  const Floats x = random_floats(70, 1);
  std::vector<Bf16> out(128);
  run_in_all_orders<RmsNorm<Bf16>>(
      {1}, {x.data(), nullptr, nullptr, out.data(), 70, 128, 70, 1e-5f}, out);
  for (int i = 0; i < 70; ++i) CHECK_EQ(out[i].bits, from_float<Bf16>(x[i]).bits);
}

TEST(cuda_rms_norm_of_chosen_rows) {
  constexpr std::int64_t kWidth = 70, kStride = 128;
  const Floats x = random_floats(4 * kWidth, 1), weight = random_floats(kWidth, 2);
  std::vector<Bf16> all(4 * kStride), chosen(3 * kStride);
  RmsNormArgs args{x.data(), nullptr, weight.data(), all.data(), kWidth, kStride, kWidth, 1e-5f};
  run_grid<RmsNorm<Bf16>>({4}, args);
  const std::vector<std::int32_t> rows = {3, -1, 0};
  args.rows = rows.data();
  args.out = chosen.data();
  run_in_all_orders<RmsNorm<Bf16>>({3}, args, chosen);
  for (std::int64_t i = 0; i < kStride; ++i) {
    CHECK_EQ(chosen[i].bits, all[3 * kStride + i].bits);
    CHECK_EQ(chosen[kStride + i].bits, 0);
    CHECK_EQ(chosen[2 * kStride + i].bits, all[i].bits);
  }
}

TEST(cuda_add_block) {
  constexpr std::int64_t kRows = 3, kWidth = 70;
  const Floats stream = random_floats(kRows * kWidth, 1);
  const Floats block = random_floats(kRows * kWidth, 2, 3.0f), weight = random_floats(kWidth, 3);
  for (const bool normed : {true, false}) {
    Floats x, first;
    for (const Order order : {Order::forward, Order::backward, Order::shuffled}) {
      x = stream;
      run_grid<AddBlock>(
          {kRows}, {x.data(), block.data(), normed ? weight.data() : nullptr, kWidth, 0.22f, 1e-5f},
          order);
      if (first.empty()) first = x;
      CHECK(same_bits(first, x));
    }
    for (std::int64_t r = 0; r < kRows; ++r) {
      Vector row(block.begin() + r * kWidth, block.begin() + (r + 1) * kWidth);
      if (normed) row = specrt::reference::rms_norm(row, doubles(weight), 1e-5);
      for (std::int64_t i = 0; i < kWidth; ++i) {
        const double want = stream[r * kWidth + i] + double{0.22f} * row[i];
        CHECK_NEAR(x[r * kWidth + i], want, 1e-5);
      }
    }
  }
}

TEST(cuda_logits_are_scaled_and_capped) {
  constexpr std::int64_t kRows = 2, kVocab = 300, kStride = 320;
  const Floats before = random_floats(kRows * kStride, 1, 30.0f);
  for (const float cap : {0.0f, 20.0f}) {
    Floats x = before;
    run_grid<FinishLogits>({2, kRows}, {x.data(), kStride, kVocab, 0.5f, cap});
    for (std::int64_t i = 0; i < kRows * kStride; ++i) {
      double want = before[i];
      if (i % kStride < kVocab) {
        want *= 0.5;
        if (cap > 0.0f) want = cap * std::tanh(want / cap);
      }
      CHECK_NEAR(x[i], want, 1e-4);
    }
  }
}

TEST(cuda_embedding_rows) {
  constexpr std::int64_t kVocab = 11, kWidth = 67, kStride = 128;
  const auto table = as<Bf16>(random_floats(kVocab * kStride, 1));
  const std::vector<std::int32_t> tokens = {10, 0, 3, 11, -1};
  Floats out(tokens.size() * kWidth);
  run_in_all_orders<Embed<Bf16>>(
      {5}, {table.data(), tokens.data(), out.data(), kVocab, kStride, kWidth, 2.5f}, out);
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const bool known = tokens[r] >= 0 && tokens[r] < kVocab;
      CHECK_EQ(out[r * kWidth + i], known ? 2.5f * to_float(table[tokens[r] * kStride + i]) : 0.0f);
    }
  }
}

// A tied table is read where the output head lies.
TEST(cuda_embedding_rows_out_of_a_packed_head) {
  constexpr std::int64_t kVocab = 35, kWidth = 130;
  const auto table = as<Bf16>(random_floats(kVocab * kWidth, 1));
  std::vector<std::uint16_t> bits;
  for (const Bf16 value : table) bits.push_back(value.bits);
  std::vector<std::byte> plain(packed_bytes(kVocab, kWidth, Stored::plain));
  pack_plain(bits, 0, kVocab, kWidth, plain);
  std::vector<std::int8_t> codes;
  for (std::int64_t i = 0; i < kVocab * kWidth; ++i) {
    codes.push_back(static_cast<std::int8_t>(i * 37 % 255 - 127));
  }
  std::vector<std::byte> coded(packed_bytes(kVocab, kWidth, Stored::int8));
  pack_int8(codes, 0, kVocab, kWidth, coded);
  const Floats scales = random_floats(kVocab, 2);
  const std::vector<std::int32_t> tokens = {34, 0, 17, 35, -1};
  Floats out(tokens.size() * kWidth);
  EmbedPackedArgs args{plain.data(), nullptr, tokens.data(), out.data(), kVocab, kWidth, 2.5f};
  run_in_all_orders<EmbedPacked<Bf16, Stored::plain>>({5}, args, out);
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const float want = r < 3 ? 2.5f * to_float(table[tokens[r] * kWidth + i]) : 0.0f;
      CHECK_EQ(out[r * kWidth + i], want);
    }
  }
  args.table = coded.data();
  args.scales = scales.data();
  run_in_all_orders<EmbedPacked<Bf16, Stored::int8>>({5}, args, out);
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const float weight = to_float(
          from_float<Bf16>(static_cast<float>(codes[tokens[r] * kWidth + i]) * scales[tokens[r]]));
      CHECK_EQ(out[r * kWidth + i], 2.5f * weight);
    }
  }
}

struct RopeCase {
  int q_heads, kv_heads, dim, pairs;
  HeadNorm norm;
};

template <typename T>
void check_rope(const RopeCase& at) {
  constexpr std::int64_t kRows = 3, kSlots = 7;
  const std::int64_t q_width = at.q_heads * at.dim, kv_width = at.kv_heads * at.dim;
  const std::int64_t width = q_width + 2 * kv_width;
  const Floats before = random_floats(kRows * width, 5, 2.0f);
  const bool whole = at.norm == HeadNorm::whole;
  const Floats q_norm = random_floats(whole ? q_width : at.dim, 6);
  const Floats k_norm = random_floats(whole ? kv_width : at.dim, 7);
  Floats cos, sin, angles;
  for (int p = 0; p < 20; ++p) {
    for (int i = 0; i < at.pairs; ++i) {
      angles.push_back(static_cast<float>(p) * std::pow(10.0f, -4.0f * i / at.pairs));
      cos.push_back(std::cos(angles.back()));
      sin.push_back(std::sin(angles.back()));
    }
  }
  const std::vector<std::int32_t> positions = {0, 19, 4};
  const std::vector<std::int64_t> slots = {5, -1, 0};
  const auto norm_of = [&](Vector x, const Floats& weight, std::int64_t from) {
    Vector w(weight.begin() + from, weight.begin() + from + static_cast<std::int64_t>(x.size()));
    return specrt::reference::rms_norm(x, w, 1e-6);
  };
  Floats first;
  for (const Order order : {Order::forward, Order::backward, Order::shuffled}) {
    Floats qkv = before;
    std::vector<T> k(kSlots * kv_width, T{0x1234}), v(k);
    RopeKvArgs args;
    args.qkv = qkv.data();
    args.qkv_stride = width;
    args.positions = positions.data();
    args.slots = slots.data();
    args.cos = cos.data();
    args.sin = sin.data();
    args.pairs = at.pairs;
    args.k = k.data();
    args.v = v.data();
    args.q_norm = q_norm.data();
    args.k_norm = k_norm.data();
    args.norm = at.norm;
    args.eps = 1e-6f;
    args.q_heads = at.q_heads;
    args.kv_heads = at.kv_heads;
    args.head_dim = at.dim;
    run_grid<RopeKv<T>>({kRows, 2}, args, order);
    if (first.empty()) first = qkv;
    CHECK(same_bits(first, qkv));
    std::vector<bool> written(kSlots);
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (int head = 0; head < at.q_heads + at.kv_heads; ++head) {
        const bool key = head >= at.q_heads;
        const Floats& weight = key ? k_norm : q_norm;
        Vector x(before.begin() + r * width + head * at.dim,
                 before.begin() + r * width + (head + 1) * at.dim);
        if (at.norm == HeadNorm::head) x = norm_of(x, weight, 0);
        if (whole) {
          const std::int64_t from = r * width + (key ? q_width : 0);
          const Vector all =
              norm_of({before.begin() + from, before.begin() + from + (key ? kv_width : q_width)},
                      weight, 0);
          const int local = key ? head - at.q_heads : head;
          x.assign(all.begin() + local * at.dim, all.begin() + (local + 1) * at.dim);
        }
        Vector turned(x.begin(), x.begin() + 2 * at.pairs);
        Vector by(at.pairs);
        for (int i = 0; i < at.pairs; ++i) by[i] = angles[positions[r] * at.pairs + i];
        turned = specrt::reference::rope(turned, by);
        std::copy(turned.begin(), turned.end(), x.begin());
        for (int i = 0; i < at.dim; ++i) {
          CHECK_NEAR(qkv[r * width + head * at.dim + i], x[i], tolerance<float>(x[i], 30));
          if (!key || slots[r] < 0) continue;
          written[slots[r]] = true;
          const std::int64_t local = (head - at.q_heads) * at.dim + i;
          CHECK_EQ(k[slots[r] * kv_width + local].bits,
                   from_float<T>(qkv[r * width + q_width + local]).bits);
          CHECK_EQ(v[slots[r] * kv_width + local].bits,
                   from_float<T>(before[r * width + q_width + kv_width + local]).bits);
        }
      }
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      if (written[slot]) continue;
      for (std::int64_t i = 0; i < kv_width; ++i) {
        CHECK_EQ(k[slot * kv_width + i].bits, 0x1234);
        CHECK_EQ(v[slot * kv_width + i].bits, 0x1234);
      }
    }
  }
}

TEST(cuda_rope_and_append) {
  for (const RopeCase& at :
       {RopeCase{4, 2, 64, 32, HeadNorm::none}, RopeCase{9, 3, 40, 10, HeadNorm::head},
        RopeCase{3, 1, 72, 36, HeadNorm::whole}}) {
    check_rope<Bf16>(at);
    check_rope<Half>(at);
  }
}

template <typename T>
void check_finish(std::int64_t n, int splits, bool with_bias) {
  constexpr std::int64_t kRows = 3;
  const Floats sums = random_floats(splits * kRows * n, 1);
  const Floats bias = random_floats(n, 2);
  const auto total = [&](std::int64_t r, std::int64_t i) {
    double sum = with_bias ? bias[i] : 0.0;
    for (int s = 0; s < splits; ++s) sum += sums[(s * kRows + r) * n + i];
    return sum;
  };
  FinishArgs args;
  args.sums = sums.data();
  args.bias = with_bias ? bias.data() : nullptr;
  args.rows = kRows;
  args.n = n;
  args.splits = splits;
  const std::int64_t blocks = (n + 255) / 256;

  Floats y(kRows * n);
  args.y = y.data();
  args.y_stride = n;
  run_in_all_orders<FinishProduct<T>>({blocks, kRows}, args, y);
  for (std::int64_t i = 0; i < kRows * n; ++i) CHECK_NEAR(y[i], total(i / n, i % n), 1e-5);

  const Floats stream = random_floats(kRows * n, 3);
  y = stream;
  args.after = After::add;
  run_grid<FinishProduct<T>>({blocks, kRows}, args);
  for (std::int64_t i = 0; i < kRows * n; ++i) {
    CHECK_NEAR(y[i], stream[i] + total(i / n, i % n), 1e-5);
  }

  const std::int64_t outputs = n / 2, stride = padded_columns(outputs);
  std::vector<T> gated(kRows * stride);
  args.y = gated.data();
  args.y_stride = stride;
  for (const After after : {After::gate_silu, After::gate_gelu}) {
    args.after = after;
    run_in_all_orders<FinishProduct<T>>({(stride + 255) / 256, kRows}, args, gated);
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t i = 0; i < stride; ++i) {
        double want = 0.0;
        if (i < outputs) {
          const Vector gate = {total(r, gate_row(i))}, up = {total(r, gate_row(i) + kGateRows)};
          want = after == After::gate_silu ? specrt::reference::silu_mul(gate, up)[0]
                                           : specrt::reference::gelu_mul(gate, up)[0];
        }
        CHECK_NEAR(to_float(gated[r * stride + i]), want, tolerance<T>(want, 2));
      }
    }
  }
}

TEST(cuda_products_end) {
  check_finish<Bf16>(16, 1, false);
  check_finish<Half>(336, 3, true);
  check_finish<Bf16>(272, 2, true);
}

TEST(cuda_commit_moves_the_accepted_path) {
  constexpr std::int64_t kMost = 4, kSlots = 40, kBytes = 48;
  std::vector<unsigned char> before[2], planes[2];
  std::vector<void*> pointers(2);
  for (int p = 0; p < 2; ++p) {
    for (int i = 0; i < kSlots * kBytes; ++i) before[p].push_back((i * 37 + p * 101) % 251);
  }
  // Sequence 0 accepted nodes 0 and 3, sequence 1 none, sequence 2 all.
  const std::vector<std::int32_t> path = {0, 3, -7, -7, -7, -7, -7, -7, 0, 1, 2, 3};
  const std::vector<std::int32_t> lengths = {2, 0, 4};
  std::vector<std::int64_t> nodes, next;
  for (int s = 0; s < 3; ++s) {
    for (int i = 0; i < kMost; ++i) nodes.push_back(20 + 5 * s + i);
    for (int i = 0; i < kMost; ++i) next.push_back(6 * s + i);
  }
  for (const Order order : {Order::forward, Order::shuffled}) {
    for (int p = 0; p < 2; ++p) {
      planes[p] = before[p];
      pointers[p] = planes[p].data();
    }
    run_grid<Commit>(
        {kMost, 3, 2},
        {pointers.data(), path.data(), lengths.data(), nodes.data(), next.data(), kMost, kBytes},
        order);
    for (int p = 0; p < 2; ++p) {
      auto want = before[p];
      for (int s = 0; s < 3; ++s) {
        for (int i = 0; i < lengths[s]; ++i) {
          const auto from = before[p].begin() + nodes[s * kMost + path[s * kMost + i]] * kBytes;
          std::copy(from, from + kBytes, want.begin() + next[s * kMost + i] * kBytes);
        }
      }
      CHECK(planes[p] == want);
    }
  }
}

}  // namespace
