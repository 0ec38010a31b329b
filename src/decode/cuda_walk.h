#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "decode/sequence.h"
#include "model/cuda_runner.h"
#include "model/logit_lists.h"

namespace specrt {

/// Choice and coupled verification of a round's sequences on the GPU: parameters, histories and
/// drafts go there in one copy, the logits stay there, and one array of verdicts comes back.
class CudaWalk {
 public:
  CudaWalk(CudaRunner& runner, std::int64_t max_batch_size, std::int64_t max_rows);

  /// Of the device, before any sequence is there; penalties, biases and masks take more.
  static std::int64_t bytes(std::int64_t vocab, std::int64_t max_batch_size, std::int64_t max_rows);
  std::int64_t device_bytes() const;

  /// Room for all that sequences may come to say of themselves, so that no round takes any. Throws
  /// CapacityError where there is none left.
  using Sequences = std::span<const std::unique_ptr<Sequence>>;
  void make_room(Sequences live, Sequences preempted, const Sequence& added);

  /// A round: begin(), add() of each, launch() behind the pass, wait(), verdict() in order.
  void begin();
  void add(const Sequence& sequence);
  bool empty() const { return states_.empty(); }
  void launch();
  void wait() const { runner_.wait(); }
  struct Verdict {
    cuda::Walked end = cuda::Walked::failed;
    std::span<const std::int32_t> tokens;  ///< as TreeWalk::emitted
    std::span<const std::int32_t> path;    ///< as TreeWalk::path
  };
  Verdict verdict(std::size_t index) const;

  /// Of rounds, for tests.
  std::size_t graphs() const { return graphs_->size(); }

 private:
  struct Shape {
    std::int64_t sequences = 0;
    std::int64_t rows = 0;
    std::int64_t nodes = 1;  ///< of a tree
    bool operator==(const Shape&) const = default;
  };
  /// Where the sections of what goes to the device lie, by shape.
  struct Places {
    explicit Places(const Shape& shape);
    std::int64_t rows, pass_rows, tokens, parents, pool;
  };
  struct Sizes;
  static Shape largest(std::int64_t max_batch_size, std::int64_t max_rows);
  void run(const Shape& shape);
  std::byte* append(const void* from, std::size_t bytes);

  CudaRunner& runner_;
  const Shape largest_;
  std::int64_t pool_room_ = 0;
  cuda::DeviceBuffer inputs_;
  cuda::HostBuffer staging_;
  cuda::DeviceBuffer buffer_;
  cuda::HostBuffer verdicts_;
  // In the buffer.
  float* processed_ = nullptr;
  std::int32_t* found_ = nullptr;
  cuda::ChunkTop* tops_ = nullptr;
  cuda::ChunkShare* shares_ = nullptr;
  std::int32_t* choices_ = nullptr;
  float* logprobs_ = nullptr;
  std::int32_t* device_verdicts_ = nullptr;
  std::int32_t* path_ = nullptr;
  std::int32_t* path_length_ = nullptr;

  // The round's.
  std::vector<const Sequence*> sequences_;
  std::vector<cuda::SamplingState> states_;
  std::vector<cuda::LogitRow> rows_;
  std::vector<std::int32_t> pass_rows_;
  LogitLists lists_;
  Shape shape_;
  std::int64_t pool_used_ = 0;
  std::unique_ptr<CudaGraphs<Shape>> graphs_;
};

}  // namespace specrt
