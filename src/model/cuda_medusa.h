#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/cuda_arena.h"
#include "model/cuda_favour.h"
#include "model/cuda_graphs.h"
#include "model/state_copies.h"
#include "specrt/medusa.h"

namespace specrt {

/// A MedusaRunner's half on a GPU.
class CudaMedusa {
 public:
  /// Alternatives of a token, at most.
  static constexpr std::int64_t kMostLikely = StaticTree::kMostRanks;

  /// `counts`: how many alternatives of each head are asked for, from the first on.
  CudaMedusa(const MedusaHeads& heads, std::int64_t max_rows, std::span<const std::int32_t> counts,
             int device);
  ~CudaMedusa();
  CudaMedusa(const CudaMedusa&) = delete;
  CudaMedusa& operator=(const CudaMedusa&) = delete;

  static std::int64_t weight_bytes(const MedusaConfig& config, Precision precision, int device);
  static std::int64_t workspace_bytes(const MedusaConfig& config, std::int64_t max_rows);
  const CudaFavour& favour() const { return favour_; }

  StateCopies& copies() { return copies_; }
  cuda::Stream stream() const { return stream_.get(); }

  /// As MedusaRunner has them; logits() and find_likely() wait.
  void start(std::span<const float* const> states);
  std::span<const float> logits(std::int64_t head, std::int64_t rows);
  bool find_likely(std::span<const CudaFavour::Sequence> rows, std::int64_t heads);
  std::span<const cuda::LikelyToken> likely(std::int64_t head, std::int64_t row) const;

 private:
  struct Block {
    cuda::DeviceMatrix matrix;
    const float* bias = nullptr;
  };
  struct Head {
    std::vector<Block> blocks;
    cuda::DeviceMatrix projection;
  };
  struct Sizes;
  struct Key {
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    CudaFavour::Kinds kinds;
    bool operator==(const Key&) const = default;
  };
  void run(const Head& head, std::int64_t rows);
  void product(const cuda::DeviceMatrix& matrix, const float* bias, std::int64_t rows, float* y,
               std::int64_t y_stride);
  void rank(std::int64_t rows, std::int64_t head);
  /// Where a head's are among all, with so many rows.
  std::int64_t place_of(std::int64_t head, std::int64_t rows) const;

  const MedusaConfig config_;
  const int device_;
  const cuda::Type type_;
  const CudaArena arena_;
  cuda::OwnStream stream_;
  StateCopies copies_;
  std::vector<Head> heads_;
  CudaGraphs<Key> graphs_;
  const std::vector<std::int32_t> counts_;
  std::int64_t ranked_rows_ = 0;  // that find_likely() ran last, padding included
  cuda::HostBuffer host_;
  CudaFavour favour_;  // a list is a head

  cuda::DeviceBuffer buffer_;
  float* input_ = nullptr;                  // [max_rows, hidden]
  float* x_ = nullptr;                      // [max_rows, hidden], a head's residual stream
  void* read_ = nullptr;                    // [max_rows, padded hidden]
  float* block_ = nullptr;                  // [max_rows, hidden]
  float* logits_ = nullptr;                 // [max_rows, stride_]
  float* workspace_ = nullptr;              // of products
  cuda::LikelyShare* shares_ = nullptr;     // [max_rows, chunks]
  cuda::LikelyToken* found_ = nullptr;      // [max_rows, chunks, kMostLikely]
  cuda::LikelyToken* likeliest_ = nullptr;  // by head: [rows, its count]
  std::int64_t stride_ = 0;
};

}  // namespace specrt
