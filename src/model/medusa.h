#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "model/buffer.h"
#include "model/cuda_medusa.h"
#include "model/held_rows.h"
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

  const WeightEntry* find_entry(const std::string& name, const std::byte** at) const;
  Matrix matrix(const std::string& name) const;
  const float* vector(const std::string& name) const;  ///< null where there is none
};

/// Where a head's weights are: a block's, and the projection's.
std::string medusa_block(const MedusaConfig& config, std::int64_t head, std::int64_t block);
std::string medusa_projection(const MedusaConfig& config, std::int64_t head);
std::map<std::string, WeightEntry> medusa_entries(const MedusaConfig& config, Precision precision);

/// Runs Medusa heads over a few rows of hidden states. Each output is the same whatever rows share
/// a call.
class MedusaRunner {
 public:
  /// `counts` are how many alternatives likely() tells of each head, from the first on.
  MedusaRunner(const MedusaHeads& heads, std::int64_t max_rows,
               const std::shared_ptr<ThreadTeam>& team, const std::string& cpu_isa,
               const std::string& device = "cpu", std::span<const std::int32_t> counts = {});

  static std::int64_t workspace_bytes(const MedusaConfig& config, std::int64_t max_rows,
                                      const std::string& device);

  const cpu::Kernels& kernels() const { return *kernels_; }
  std::int64_t max_rows() const { return max_rows_; }
  /// Room for states, where they are read.
  HeldRows hold(std::int64_t rows) const {
    return {rows, heads_.config().hidden_size, cuda_ != nullptr};
  }
  /// Copies token i's features; as Runner::copy_features.
  void copy_features(const FeatureRows& from, std::int64_t i, float* to);
  void settle_states();
  /// The rows of the next pass, [hidden] each.
  void start(std::span<const float* const> states);
  /// Logits of one head for the first `rows` of them, [rows, outputs], valid until the next call.
  std::span<const float> logits(std::int64_t head, std::int64_t rows);
  /// Whether the alternatives are found where the logits are, which need not come to the host then.
  bool finds_likely() const { return cuda_ != nullptr; }
  /// The first heads' outputs that each row's sequence favours, the most likely ones where it is
  /// greedy, with their log-probabilities. False where there is no room for what sequences say.
  bool find_likely(std::span<const CudaFavour::Sequence> rows, std::int64_t heads) {
    return cuda_->find_likely(rows, heads);
  }
  std::span<const std::int32_t> draft_of_target() const {
    return cuda_->favour().draft_of_target();
  }
  /// Of the device, for what sequences say.
  std::int64_t list_bytes() const { return cuda_ == nullptr ? 0 : cuda_->favour().list_bytes(); }
  std::span<const cuda::LikelyToken> likely(std::int64_t head, std::int64_t row) const {
    return cuda_->likely(head, row);
  }

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
  std::unique_ptr<CudaMedusa> cuda_;  // null on the CPU
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
