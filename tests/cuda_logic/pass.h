#pragma once

// A small pass of a layer whose rows may be padded, as a captured graph pads them: rotation and
// storing of keys and values, attention, and the move of accepted ones. What padding rows point at
// is stale on purpose: places that hold other sequences' keys and values.

#include "kernels/attention.h"
#include "kernels/commit.h"
#include "kernels/rope_kv.h"
#include "support.h"

namespace cuda_test {

struct PaddedPass {
  static constexpr int kHeads = 4, kKvHeads = 2, kDim = 64, kPairs = 32;
  static constexpr int kBlock = 8, kBlocks = 6, kScratch = 8, kSlots = kBlocks * kBlock + kScratch;
  static constexpr int kKvWidth = kKvHeads * kDim, kWidth = (kHeads + 2 * kKvHeads) * kDim;
  static constexpr int kOut = kHeads * kDim, kMost = 4;

  // Sequence 0 has 13 positions in blocks 4 and 1, its root and two draft nodes; sequence 1, which
  // takes no part, has the rest.
  std::vector<std::int32_t> tables = {4, 1}, positions = {12, 13, 13};
  std::vector<std::int64_t> slots = {1 * kBlock + 4, kBlocks * kBlock, kBlocks * kBlock + 1};
  std::vector<specrt::cuda::AttentionRow> rows = {{0, 13, 0, 0}, {0, 13, 0, 1}, {0, 13, 1, 1}};
  std::vector<specrt::cuda::AttentionUnit> units = {{0, 3}};
  std::vector<std::int32_t> paths = {0, 1};
  std::vector<std::int32_t> path = {1, 0, 0, 0}, path_length = {1};
  std::vector<std::int64_t> node_slots, next_slots;
  Floats qkv, cos, sin, partials;
  std::vector<Bf16> k, v, out;
  std::vector<void*> planes;
  std::int64_t padded_rows = 3, padded_units = 1, sequences = 1;

  explicit PaddedPass(std::int64_t padding) {
    for (int i = 0; i < kMost; ++i) {
      node_slots.push_back(kBlocks * kBlock + i);
      next_slots.push_back(1 * kBlock + 5 + i % 3);
    }
    qkv = random_floats(3 * kWidth, 51);
    for (std::int64_t i = 0; i < padding; ++i) {
      positions.push_back(static_cast<std::int32_t>(i));
      slots.push_back(-1);
      rows.push_back({0, 9, 0, 2});
      units.push_back({0, 0});
      path.insert(path.end(), kMost, 1);
      path_length.push_back(0);
      for (int n = 0; n < kMost; ++n) node_slots.push_back(2 * kBlock + n);
      for (int n = 0; n < kMost; ++n) next_slots.push_back(3 * kBlock + n);
      const Floats row = random_floats(kWidth, 60 + static_cast<std::uint32_t>(i));
      qkv.insert(qkv.end(), row.begin(), row.end());
    }
    padded_rows += padding;
    padded_units += padding;
    sequences += padding;
    for (int p = 0; p < 16; ++p) {
      for (int i = 0; i < kPairs; ++i) {
        cos.push_back(std::cos(static_cast<float>(p) * std::pow(0.8f, static_cast<float>(i))));
        sin.push_back(std::sin(static_cast<float>(p) * std::pow(0.8f, static_cast<float>(i))));
      }
    }
    k = as<Bf16>(random_floats(kSlots * kKvWidth, 52));
    v = as<Bf16>(random_floats(kSlots * kKvWidth, 53));
    planes = {k.data(), v.data()};
    out.assign(padded_rows * kOut, Bf16{0x1234});
    partials.assign(padded_rows * kHeads * (kDim + 2), NAN);
  }

  specrt::cuda::RopeKvArgs rope() {
    specrt::cuda::RopeKvArgs args;
    args.qkv = qkv.data();
    args.qkv_stride = kWidth;
    args.positions = positions.data();
    args.slots = slots.data();
    args.cos = cos.data();
    args.sin = sin.data();
    args.pairs = kPairs;
    args.k = k.data();
    args.v = v.data();
    args.q_heads = kHeads;
    args.kv_heads = kKvHeads;
    args.head_dim = kDim;
    return args;
  }
  specrt::cuda::AttentionArgs attention() {
    specrt::cuda::AttentionArgs args;
    args.q = qkv.data();
    args.q_stride = kWidth;
    args.out = out.data();
    args.out_stride = kOut;
    args.k = k.data();
    args.v = v.data();
    args.rows = rows.data();
    args.units = units.data();
    args.tables = tables.data();
    args.paths = paths.data();
    args.path_base = kBlocks * kBlock;
    args.block_shift = 3;
    args.q_heads = kHeads;
    args.kv_heads = kKvHeads;
    args.head_dim = kDim;
    args.scale = 0.125f;
    args.segments = 1;
    args.partials = partials.data();
    return args;
  }
  specrt::cuda::CommitArgs commit() {
    return {planes.data(),     path.data(), path_length.data(), node_slots.data(),
            next_slots.data(), kMost,       kKvWidth * 2};
  }

  /// A checksum of every slot that this pass has no business to write.
  std::uint64_t others() const {
    std::uint64_t sum = 14695981039346656037u;
    for (int slot = 0; slot < kSlots; ++slot) {
      bool own = false;
      for (int r = 0; r < 3; ++r) own = own || slots[r] == slot;
      own = own || slot == next_slots[0];
      if (own) continue;
      for (int i = slot * kKvWidth; i < (slot + 1) * kKvWidth; ++i) {
        sum = (sum ^ k[i].bits) * 1099511628211u;
        sum = (sum ^ v[i].bits) * 1099511628211u;
      }
    }
    return sum;
  }
  /// All that the pass has written for its real rows.
  std::vector<Bf16> results() const {
    std::vector<Bf16> all(out.begin(), out.begin() + 3 * kOut);
    for (const std::int64_t slot : {slots[0], slots[1], slots[2], next_slots[0]}) {
      all.insert(all.end(), k.begin() + slot * kKvWidth, k.begin() + (slot + 1) * kKvWidth);
      all.insert(all.end(), v.begin() + slot * kKvWidth, v.begin() + (slot + 1) * kKvWidth);
    }
    return all;
  }
};

}  // namespace cuda_test
