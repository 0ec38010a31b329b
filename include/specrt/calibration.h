#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "specrt/cpu.h"
#include "specrt/export.h"
#include "specrt/model.h"

namespace specrt {

/// What the matrices of a layer read while a text runs through it, [positions, inputs] each.
struct LayerTrace {
  std::vector<float> attention;  ///< q, k and v
  std::vector<float> output;     ///< o
  std::vector<float> mlp;        ///< gate and up
  std::vector<float> down;       ///< down
  std::vector<float> stream;     ///< [positions, hidden], the residual stream behind the layer
};

/// Runs one text, from position 0, through a model of a single layer; `stream` [positions, hidden]
/// takes the place of embeddings. `team` null: all cores. Throws InvalidArgument for a model of
/// more layers, a stream of another width and a text longer than the model's positions.
SPECRT_API LayerTrace trace_layer(const Model& layer, std::span<const float> stream,
                                  const std::shared_ptr<ThreadTeam>& team = nullptr,
                                  const std::string& cpu_isa = "auto");

/// A group's share of a matrix [n, width] in int4, width at most 32.
struct CompensatedGroup {
  std::vector<std::int8_t> codes;  ///< [n, width]
  std::vector<float> scales;       ///< [n], fp16 values
  std::vector<float> minima;       ///< [n], fp16 values
  std::vector<float> errors;       ///< [n, width], what inputs behind the group have to make up for
};

/// Rounds `weights` [n, width] input by input, and makes up for each one's error with the group's
/// inputs behind it (GPTQ). `factor` [width, width] is the group's block of the upper Cholesky
/// factor U of the inverse of the inputs' second moments, U' U. Weights of inputs behind the group
/// have to change by -errors * U[group, behind]. Scale and minimum are the best for the weights as
/// they come in, each input counting as much as its error would cost after that. On all cores.
/// Throws InvalidArgument for wrong sizes, a diagonal that is not positive, and weights that int4
/// cannot hold.
SPECRT_API CompensatedGroup quantise_compensated(std::span<const float> weights,
                                                 std::span<const float> factor);

}  // namespace specrt
