#pragma once

// The table of this unit's instruction set. Include after the other bodies.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr Kernels table_named(const char* name) {
  Kernels table = {};
  table.name = name;
  fill_codes(table);
  table.gemm[static_cast<int>(Precision::f32)] = gemm<FloatWeight>;
  table.gemm[static_cast<int>(Precision::bf16)] = gemm<PairWeight>;
  table.rms_norm = rms_norm;
  table.rope = rope;
  table.softcap = softcap;
  table.scale = scale_by;
  table.add_scaled = add_scaled;
  table.store = store_as;
  table.load = load_as;
  table.store_kv = store_kv;
  table.attention = attention;
  table.attention_combine = attention_combine;
  table.arg_max = arg_max;
  table.exp_sum = exp_sum;
  table.exp_weights = exp_weights;
  table.share_from = share_from;
  table.ids_between = ids_between;
  table.keep_bits = keep_bits;
  table.race = race;
  return table;
}

}  // namespace
}  // namespace specrt::cpu
