#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "model/buffer.h"
#include "model/weights.h"
#include "specrt/medusa.h"

namespace specrt {

struct MedusaData {
  MedusaConfig config;
  Precision precision = Precision::f32;
  std::map<std::string, WeightEntry> entries;
  std::int64_t bytes = 0;
  Buffer buffer;
  std::map<std::string, bool> given;  ///< while building: which tensors have come

  Matrix matrix(const std::string& name) const;
  const float* vector(const std::string& name) const;  ///< null where there is none
};

/// Runs Medusa heads over a few rows of hidden states. Each output is the same whatever rows share
/// a call.
class MedusaRunner {
 public:
  MedusaRunner(const MedusaHeads& heads, std::int64_t max_rows,
               const std::shared_ptr<ThreadTeam>& team, const std::string& cpu_isa);

  static std::int64_t workspace_bytes(const MedusaConfig& config, std::int64_t max_rows);

  const cpu::Kernels& kernels() const { return *kernels_; }
  std::int64_t max_rows() const { return max_rows_; }
  /// Where row `row` of the next pass goes, [hidden].
  std::span<float> input(std::int64_t row);
  /// Logits of one head for the first `rows` inputs, [rows, outputs], valid until the next call.
  std::span<const float> logits(std::int64_t head, std::int64_t rows);

 private:
  struct Block {
    Matrix matrix;
    const float* bias = nullptr;
  };
  struct Head {
    std::vector<Block> blocks;
    Matrix projection;
  };
  /// y = x W^T + bias, x in read_.
  void product(const Matrix& matrix, const float* bias, std::int64_t rows, float* y,
               std::int64_t y_stride);
  /// read_ = x as the weights want it.
  void read(const float* x, std::int64_t rows);

  MedusaHeads heads_;
  std::int64_t max_rows_ = 0;
  std::shared_ptr<ThreadTeam> team_;
  cpu::ThreadPool* pool_ = nullptr;
  const cpu::Kernels* kernels_ = nullptr;
  std::vector<Head> parts_;
  Buffer buffer_;
  float* input_ = nullptr;     // [max_rows, hidden]
  float* x_ = nullptr;         // [max_rows, hidden], a head's residual stream
  float* read_ = nullptr;      // [max_rows, hidden]
  float* block_ = nullptr;     // [max_rows, hidden]
  float* prepared_ = nullptr;  // what Kernels::prepare_* make of read_
  float* logits_ = nullptr;    // [max_rows, outputs]
};

}  // namespace specrt
