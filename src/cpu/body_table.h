#pragma once

// The table of this unit's instruction set. Include after the other bodies.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr Kernels table_named(const char* name) {
  Kernels table = {};
  table.name = name;
  table.gemm_f32 = gemm<FloatWeight>;
  table.gemm_bf16 = gemm<PairWeight>;
  table.rms_norm = rms_norm;
  table.rope = rope;
  table.silu_mul = silu_mul;
  table.gelu_mul = gelu_mul;
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
  table.race = race;
  return table;
}

}  // namespace
}  // namespace specrt::cpu
