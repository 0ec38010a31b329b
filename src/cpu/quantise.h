#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace specrt::cpu {

/// Inputs that share a scale and a minimum in int4.
inline constexpr std::int64_t kGroup = packed::kStep;

/// One output's k weights as int8 with one scale: q = round(w / scale), scale = max |w| / 127.
/// False where a weight is not finite.
bool quantise_int8(const float* weights, std::int64_t k, std::int8_t* codes, float& scale);

/// One output's k weights as int4: for each group the fp16 scale and minimum, of several tried,
/// whose codes leave the least squared error. `importance` [k] weighs errors, by what the input is
/// like that meets them; null: all alike. False where a weight is not finite or a minimum is beyond
/// fp16.
bool quantise_int4(const float* weights, std::int64_t k, const float* importance,
                   std::int8_t* codes, float* scales, float* minima);

/// One output's weights of one group, width at most kGroup, as int4, input by input: each one's
/// error goes into those behind it, and in units of the factor into `errors` [width]. As
/// specrt::quantise_compensated has it. False as quantise_int4.
bool quantise_compensated(const float* weights, std::int64_t width, const float* factor,
                          std::int8_t* codes, float& scale, float& minimum, float* errors);

}  // namespace specrt::cpu
