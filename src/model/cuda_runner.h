#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "model/cuda_graphs.h"
#include "model/cuda_inputs.h"
#include "model/cuda_weights.h"
#include "model/device_check.h"
#include "model/state_copies.h"
#include "specrt/features.h"
#include "specrt/memory.h"

namespace specrt {

struct RunnerOptions;

/// A Runner's half on a GPU: weights, cache and activations, and a stream on which passes run. All
/// calls return at once but those that say so. How a pass is laid out is the Runner's affair.
class CudaRunner final : public DeviceFeatures {
 public:
  /// Rows of logits that are there at once.
  static constexpr std::int64_t kLogitRows = 64;
  /// Runner::kMaxCandidates.
  static constexpr std::int64_t kMostLikely = 64;

  /// A draft head takes from `target` what it has not of its own.
  CudaRunner(const Model& model, const RunnerOptions& options, const KvLayout& layout, int device,
             const Model& target);

  ~CudaRunner();
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;

  static std::int64_t workspace_bytes(const ModelConfig& config, const RunnerOptions& options,
                                      const KvLayout& layout);
  MemoryUse memory() const;

  /// Of slots, before the next pass.
  void move(std::span<const KvCache::Move> moves);
  /// KvStorage::poison.
  void poison(const KvCache& cache);

  void forward(const PassRows& pass, const KvCache& cache, std::int64_t layers);

  // Hidden states; cuda_features.cpp. Pointers to them are into the device's memory.
  /// Where the features of the last pass that kept any are, [rows, hidden]: the options' layers in
  /// order, then the normed ones.
  const float* features(std::int64_t which) const {
    return features_ + which * max_rows_ * config_.hidden_size;
  }
  const float* on_host(const float* device) override;
  /// Copies that are made before the next pass, or when they are flushed.
  StateCopies& copies() { return copies_; }
  /// Runner::forward_head.
  void forward_head(const PassRows& pass, const KvCache& cache, bool recycled);
  /// Runner::likely; waits. likely_logits() brings the same rows' logits, and waits too.
  void likely(std::span<const std::int64_t> rows, std::int64_t count,
              std::span<cuda::LikelyToken> out);
  std::span<const float> likely_logits();
  /// The same of the first `rows` rows of logits that are there and the first `vocab` tokens, to a
  /// place on the device; does not wait.
  void find_likely(std::int64_t rows, std::int64_t vocab, std::int64_t count,
                   cuda::LikelyToken* out);

  /// Runner::logits; waits. Rows follow each other without a gap.
  std::span<const float> logits(std::span<const std::int64_t> rows);
  /// Runner::best; waits.
  void best(std::span<const std::int64_t> rows, std::span<cpu::ArgMax> out);

  // For whoever chooses on the device.
  /// Puts on the stream what makes logits of `count` <= kLogitRows rows of the pass, whose numbers
  /// are on the device; negative ones are padding.
  void make_logits(const std::int32_t* rows, std::int64_t count);
  void make_logits(std::span<const std::int64_t> rows);
  float* device_logits() const { return logits_; }
  std::int64_t logits_stride() const { return logits_stride_; }
  std::int64_t vocab() const { return config_.vocab_size; }
  cuda::Stream stream() const { return stream_->get(); }
  const std::shared_ptr<cuda::OwnStream>& shared_stream() const { return stream_; }
  int device() const { return device_; }
  const ModelConfig& config() const { return config_; }
  /// To be called before anything that touches the device.
  void enter() const { cuda::use_device(device_); }
  void wait() const { cuda::synchronize(stream()); }

  /// A layer's keys (0) or values (1), [slots, heads, dim].
  std::byte* plane(std::int64_t layer, std::int64_t which) const {
    return planes_[static_cast<std::size_t>(2 * layer + which)];
  }
  /// Of passes, for tests.
  std::size_t graphs() const { return graphs_.size(); }

 private:
  enum class Entry : std::uint8_t { tokens, features, recycled };  // what a pass begins with
  struct Key {
    PassShape shape;
    std::int64_t layers = 0;
    bool captures = false;
    Entry entry = Entry::tokens;
    bool operator==(const Key&) const = default;
  };
  struct Sizes;
  void flush_moves();
  void copy_slots(std::size_t first, std::size_t count);
  void run(const PassRows& pass, const KvCache& cache, std::int64_t layers, Entry entry);
  void run_layers(std::int64_t layers, bool captures, Entry entry);
  void embed(float* out);
  void keep_features(std::int64_t layer);
  void fuse();
  void combine(bool recycled);
  void keep_outputs();
  /// Where these numbers of rows are on the device; those that follow each other are there already.
  const std::int32_t* send_rows(std::span<const std::int64_t> rows);
  std::span<const float> bring_logits(std::int64_t count);
  void layer(std::int64_t index);
  void attend(std::int64_t index);
  void product(const cuda::DeviceMatrix& matrix, const float* bias, const void* x,
               std::int64_t rows, void* y, std::int64_t y_stride, cuda::After after);
  void add_block(const cuda::DeviceMatrix& matrix, const float* bias, const void* x,
                 const float* post_norm);
  void norm(const float* weight);
  void fill_tables(const std::vector<float>& factors, double scale, float* cos, float* sin);

  const ModelConfig config_;
  const int device_;
  const cuda::Type type_;  // of what products and attention read
  KvLayout layout_;
  const std::int64_t max_model_len_;
  const std::int64_t max_rows_;  // padded
  const TargetFeatures wanted_;
  const std::shared_ptr<const CudaWeights> weights_;
  const std::shared_ptr<const CudaWeights> target_weights_;  // of what a draft head shares
  const CudaWeights* embedding_of_ = nullptr;
  cuda::DeviceMatrix lm_head_;
  const std::shared_ptr<cuda::OwnStream> stream_;
  cuda::DeviceBuffer cache_;
  std::vector<std::byte*> planes_;         // by layer: keys, values
  std::vector<std::int64_t> group_of_;     // by layer
  std::vector<std::int64_t> plane_begin_;  // by group, into device_planes_
  std::byte** device_planes_ = nullptr;    // all planes, a group's beside each other
  CudaInputs inputs_;
  CudaGraphs<Key> graphs_;

  // Moves on their way.
  static constexpr std::size_t kMostMoves = 1024;
  struct Moving {
    std::int64_t group;
    std::int64_t from;
    std::int64_t to;
    bool scratch;  // out of a draft's slot, which nothing before writes
  };
  std::vector<Moving> moves_;
  cuda::HostBuffer moves_staging_;
  cuda::Event moves_sent_;
  std::int64_t* moves_at_ = nullptr;  // [2, kMostMoves]: from, to
  std::int32_t* identity_ = nullptr;  // [kMostMoves], then their number

  StateCopies copies_;
  cuda::HostBuffer host_features_;  // as features_, once somebody has asked
  bool fetched_ = false;            // of the last pass
  std::int64_t likely_rows_ = 0;    // that likely() was asked for last

  // Workspace, all in one buffer.
  cuda::DeviceBuffer buffer_;
  float* cos_ = nullptr;  // [max_model_len, pairs]
  float* sin_ = nullptr;
  float* local_cos_ = nullptr;
  float* local_sin_ = nullptr;
  float* x_ = nullptr;              // [rows, hidden], the residual stream
  void* normed_ = nullptr;          // [rows, padded hidden], as are all that products read
  float* qkv_ = nullptr;            // [rows, q, k and v]
  void* attended_ = nullptr;        // [rows, padded heads * head_dim]
  void* activated_ = nullptr;       // [rows, padded intermediate]
  float* block_ = nullptr;          // [rows, hidden], where a block is not simply added
  float* partials_ = nullptr;       // of attention
  std::int64_t most_partials_ = 0;  // rows times segments of a launch
  float* workspace_ = nullptr;      // of products
  void* head_in_ = nullptr;         // [kLogitRows, padded hidden]
  float* logits_ = nullptr;         // [kLogitRows, logits_stride_]
  std::int64_t logits_stride_ = 0;
  std::int32_t* logit_rows_ = nullptr;    // [kLogitRows], of logits() and best()
  cuda::LogitRow* plain_rows_ = nullptr;  // [kLogitRows] of one neutral sequence
  cuda::SamplingState* plain_state_ = nullptr;
  cuda::ChunkTop* tops_ = nullptr;  // [kLogitRows, chunks]
  float* features_ = nullptr;       // [what is wanted, rows, hidden]
  // Of draft heads.
  float* embedded_ = nullptr;               // [rows, hidden]
  void* joined_ = nullptr;                  // [rows, padded inputs]: of fc, and of layer 0
  float* parts_ = nullptr;                  // [rows, features], normed together
  cuda::LikelyShare* shares_ = nullptr;     // [kLogitRows, chunks], a draft model's too
  cuda::LikelyToken* found_ = nullptr;      // [kLogitRows, chunks, kMostLikely], the same
  cuda::LikelyToken* likeliest_ = nullptr;  // [kLogitRows, kMostLikely]
  cuda::HostBuffer host_rows_;
  cuda::Event rows_sent_;
  cuda::HostBuffer host_logits_;
};

}  // namespace specrt
