#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/kv_cache.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "model/attention_plan.h"
#include "model/cuda_runner.h"
#include "model/held_rows.h"
#include "model/kv_storage.h"
#include "model/weights.h"
#include "specrt/calibration.h"
#include "specrt/cpu.h"
#include "specrt/draft_tree.h"
#include "specrt/features.h"
#include "specrt/memory.h"
#include "specrt/model.h"

namespace specrt {

struct RunnerOptions {
  std::int64_t kv_cache_bytes = 0;
  std::int64_t max_model_len = 0;  ///< 0: the model's own
  int max_batch_size = 1;
  int max_rows = 512;
  int block_size = 16;
  std::string kv_cache_dtype = "auto";  ///< as kv_dtype_from_name() reads it
  bool prefix_reuse = false;
  TargetFeatures features;         ///< hidden states that capture() may keep
  std::int64_t scratch_slots = 0;  ///< for draft nodes; 0: max_rows, and no fewer
  bool poison = false;             ///< for tests: KV memory that holds nothing is NaN in every pass
  std::shared_ptr<ThreadTeam> team;
  std::string cpu_isa = "auto";
  std::int64_t most_likely =
      0;  ///< that CudaRunner::find_likely() finds in a row, but for draft heads
  std::string device = "cpu";               ///< as cuda_device_of() reads it
  std::shared_ptr<cuda::OwnStream> stream;  ///< of a GPU; null: one of its own
};

/// cos and sin of the rotation at every position, [positions, factors].
void rope_tables(const std::vector<float>& factors, double scale, std::int64_t positions,
                 float* cos, float* sin);

/// A model with its KV cache and workspace: lays out a pass of rows from many sequences, runs
/// it, and gives logits of chosen rows. Target and draft models are both run by one of these.
///
/// A pass: begin(), then for each sequence add_committed() and at most one add_tree() right
/// after it, then forward(), then logits() as often as wanted, then advance/commit in cache().
class Runner {
 public:
  /// Rows whose logits are held at once.
  static constexpr std::int64_t kLogitRows = 64;

  /// A draft head takes from `target` what it has not of its own: embedding, output head.
  Runner(const Model& model, const RunnerOptions& options, const Model& target = {});

  /// The number of blocks is left 0 where `kv_cache_bytes` is 0.
  static KvLayout kv_layout(const ModelConfig& config, DType dtype, const RunnerOptions& options);
  static std::int64_t workspace_bytes(const ModelConfig& config, const RunnerOptions& options);
  static std::int64_t resolve_max_model_len(const ModelConfig& config, std::int64_t asked);
  static std::int64_t longest_in_blocks(const ModelConfig& config, const RunnerOptions& options);

  const ModelConfig& config() const { return model_.config(); }
  const Model& model() const { return model_; }
  const cpu::Kernels& kernels() const { return *kernels_; }
  KvCache& cache() { return cache_; }
  const KvCache& cache() const { return cache_; }
  std::int64_t max_model_len() const { return max_model_len_; }
  std::int64_t max_rows() const { return max_rows_; }
  MemoryUse memory() const;
  int threads() const { return pool_->size(); }
  /// The half of it that is on a GPU; null on the CPU.
  CudaRunner* cuda() const { return cuda_.get(); }
  /// Longest path of a draft.
  std::int64_t max_draft_depth() const {
    return cuda_ == nullptr ? INT64_MAX : CudaInputs::kMostDepth;
  }

  void begin();
  std::int64_t rows() const { return rows_; }

  /// Rows for the sequence's next positions, written in place. Returns the first row. Throws
  /// CapacityError, changing nothing, where blocks or rows run out.
  std::int64_t add_committed(SequenceId id, std::span<const TokenId> tokens);

  /// Rows for the nodes of a draft that continues the last row added, in scratch slots. Returns
  /// the first row; node i has row first + i and scratch index scratch_of(first) + i.
  std::int64_t add_tree(SequenceId id, const DraftTree& tree);

  /// A row for one node of a draft that grows level by level behind committed positions, in a
  /// scratch slot; `parent` is the scratch index of a node since begin(), or -1. Returns the row.
  /// Throws CapacityError, changing nothing, where rows, slots or positions run out.
  std::int64_t add_node(SequenceId id, TokenId token, std::int32_t parent);
  /// Rows for `count` such nodes whose tokens, and ancestors, forward_level() fills in; each path
  /// has `depth` nodes. Returns the first row. As add_node() otherwise.
  std::int64_t add_level(SequenceId id, std::int64_t count, std::int64_t depth);
  /// Where a node's path begins among those of all since begin().
  std::int64_t path_begin(std::int64_t row) const {
    return path_begin_[static_cast<std::size_t>(row)];
  }
  /// As begin(), but the nodes since then stay in their slots.
  void begin_level() { rows_ = 0; }
  std::int32_t scratch_of(std::int64_t row) const {
    return scratch_index_[static_cast<std::size_t>(row)];
  }

  /// Keeps the options' features of rows [first, first + count) of this pass.
  void capture(std::int64_t first, std::int64_t count);
  /// Where they are after forward(), [max_rows, hidden]: the stream that enters `layer`, or the
  /// final norm's output. On a GPU in its memory (device_features()).
  const float* captured(std::int64_t layer) const;
  const float* captured_normed() const;
  DeviceFeatures* device_features() const { return cuda_.get(); }

  void forward() { forward(model_.config().num_layers); }
  /// The same of rows whose tokens, added as -1, the growth fills in. On a GPU only.
  void forward_grown(const LevelGrowth& growth);
  /// Only the first layers: logits() then tells what norm and head make of their output.
  void forward(std::int64_t layers);
  /// All of them with these values, [rows, hidden], for the embeddings of the pass's tokens; keeps
  /// what the matrices of every layer read. `trace` was empty.
  void forward_traced(std::span<const float> stream, LayerTrace& trace);

  // Of draft heads; draft_head.cpp. Their states stand where hold() has made room for them.
  HeldRows hold(std::int64_t rows, std::int64_t width) const {
    return {rows, width, cuda_ != nullptr};
  }
  /// Throws InvalidArgument where a head on a device could not copy these.
  void check_features(const FeatureRows& from) const;
  /// Copies token i's features, one behind the other. They may be on their way until
  /// settle_states(), which is due before the target's next pass.
  void copy_features(const FeatureRows& from, std::int64_t i, float* to);
  /// The same with a state of the head's own, [hidden].
  void copy_state(const float* from, float* to);
  void settle_states();
  /// A pass: `hidden` has each row's hidden state, the target's as features() has them, or,
  /// `recycled`, what a pass gave out. Each row's own, which stands for the target's behind it,
  /// goes to `out`, [hidden], unless that is null; there may be fewer of these than rows.
  void forward_head(std::span<const float* const> hidden, std::span<float* const> out,
                    bool recycled);
  /// The same of add_level()'s rows, whose states come out of the growth as well. On a GPU only.
  void forward_level(std::span<float* const> out, const LevelGrowth& growth);

  /// Logits of up to kLogitRows rows, [rows, vocab_size], valid until the next call.
  std::span<const float> logits(std::span<const std::int64_t> rows);

  /// The arg-max of those logits, a row each, without keeping them; valid until the next call. Not
  /// finite where a logit may not be: logits() then tells.
  std::span<const cpu::ArgMax> best(std::span<const std::int64_t> rows);

  /// The `count` largest logits of up to kLogitRows rows, [rows, count], largest first, equal ones
  /// by the lower id; NaN counts as smallest. 1 <= count <= kMaxCandidates and the vocabulary.
  static constexpr std::int64_t kMaxCandidates = 64;
  struct Candidate {
    TokenId token = -1;
    float logit = 0.0f;
  };
  std::span<const Candidate> top(std::span<const std::int64_t> rows, std::int64_t count);

  /// The `count` most likely of up to kLogitRows rows, [rows, count], as top() orders them,
  /// log-probabilities for logits; tokens of -1 where a row's logits are not finite.
  std::span<const Candidate> likely(std::span<const std::int64_t> rows, std::int64_t count);
  /// The same of the first `rows` that logits() gave last, on the CPU.
  std::span<const Candidate> rank(std::int64_t rows, std::int64_t count);
  /// The logits of likely()'s rows, [rows, vocab_size]; brings them from a GPU.
  std::span<const float> likely_logits();

  /// The sequence's next `count` rows of this pass are committed (their K/V are in place). Where
  /// its `tokens` are given, at least to there, later prompts can share its full blocks.
  void advance(SequenceId id, std::int64_t count, std::span<const TokenId> tokens = {});
  /// The same, where the sequence may yet be cut back to `held` positions.
  void advance_keeping(SequenceId id, std::int64_t count, std::int64_t held);
  /// Moves an accepted path (scratch indices, root side first) behind the committed positions.
  void commit(SequenceId id, std::span<const std::int32_t> path,
              std::span<const TokenId> tokens = {});

 private:
  void find_shared();
  /// Throws UnsupportedError on a GPU, which has not got this.
  void require_cpu(const char* what) const;
  void apply_moves();
  /// A row for a draft node in the next scratch slot, behind the node in that of `parent` or -1.
  std::int64_t place_node(SequenceId id, TokenId token, std::int64_t position, std::int32_t parent);
  /// Throws CapacityError where `count` nodes do not fit, the last at `position`.
  void check_nodes(std::int64_t count, std::int64_t position) const;
  /// The row, once its path is at the end of paths_.
  std::int64_t place_row(SequenceId id, TokenId token, std::int64_t position, std::int64_t path);
  void plan_attention();
  void embed(float* out);
  void fuse(std::span<const float* const> hidden);
  void combine(std::span<const float* const> hidden, bool recycled);
  /// out = x through a norm, or as it is, rounded to bf16 where products of `precision` read it.
  void output_hidden(std::int64_t row, float* out) const;
  PassRows pass_rows() const;
  void normalise(const float* x, std::int64_t width, const float* weight, Precision precision,
                 float* out) const;
  void keep_features(std::int64_t layer);
  /// Appends the pass's rows of a matrix's input where they are asked for.
  void note(std::vector<float> LayerTrace::* which, const float* x, std::int64_t width);
  void layer(std::int64_t index);
  /// normed_ = the residual stream through a norm (or as it is), ready for products of `precision`.
  void norm(const float* weight, Precision precision);
  void rotate_and_store(std::int64_t index);
  void attend(std::int64_t index);
  float* kv_scales(std::int64_t layer, std::int64_t plane) const;  // null but for int8
  void add_block(const Matrix& matrix, const float* bias, const float* x, std::int64_t width,
                 const float* post_norm);
  /// Calls body(begin, end) over rows of so many floats of work.
  template <typename Body>
  void for_rows(std::int64_t rows, std::int64_t width, const Body& body) {
    // Waking the others costs more than a few rows do.
    if (rows * width < 65536) {
      body(std::int64_t{0}, rows);
    } else {
      pool_->parallel(rows, body);
    }
  }
  /// What products read instead of x where the level asks for it, in prepared_. Row numbers go up
  /// to prepared_rows(rows).
  void prepare(Precision precision, const float* x, std::int64_t rows, std::int64_t width,
               std::int64_t begin, std::int64_t end);
  void prepare(Precision precision, const float* x, std::int64_t rows, std::int64_t width);
  enum class Add : bool { no, yes };
  /// One parallel region; x, [rows, matrix.k], was prepared.
  void gemm(const Matrix& matrix, const float* bias, const float* x, std::int64_t rows, float* y,
            std::int64_t y_stride, Add add, cpu::Gate gate);
  void head_input(std::span<const std::int64_t> rows);
  void finish_logits(float* logits, std::int64_t count) const;
  /// Calls body(thread, row, first, logits, count) on every row's logits [first, first + count), a
  /// few at a time.
  template <typename Body>
  void for_logits(std::int64_t rows, const Body& body);
  float* work(std::int64_t floats);

  Model model_;
  Model target_;                               // empty but for draft heads
  const ModelData* embedding_data_ = nullptr;  // whose embedding
  const Matrix* lm_head_ = nullptr;
  std::int64_t max_model_len_ = 0;
  std::int64_t max_rows_ = 0;
  TargetFeatures wanted_;
  bool poison_ = false;
  std::shared_ptr<ThreadTeam> team_;
  cpu::ThreadPool* pool_ = nullptr;
  const cpu::Kernels* kernels_ = nullptr;
  KvDType kv_dtype_ = KvDType::f32;
  KvCache cache_;
  KvStorage storage_;
  std::vector<KvCache::Move> moves_;
  std::unique_ptr<CudaRunner> cuda_;  // null on the CPU

  // The pass.
  std::int64_t rows_ = 0;
  std::int64_t scratch_used_ = 0;
  std::vector<TokenId> tokens_;
  std::vector<std::int32_t> positions_;
  std::vector<std::vector<std::int32_t>> slots_;  // where the row's K/V go, a group each
  std::vector<std::int32_t> scratch_index_;       // -1 for committed rows
  std::vector<SequenceId> owners_;
  std::vector<std::int64_t> path_begin_;  // into paths_, for rows of a tree
  std::vector<std::int64_t> path_length_;
  std::vector<std::int32_t> paths_;            // scratch indices
  std::vector<std::int64_t> node_path_begin_;  // by scratch index, for add_node()
  std::vector<std::int64_t> node_path_length_;
  std::vector<std::vector<cpu::AttentionRow>> attention_rows_;  // a group each
  std::vector<AttentionPlan> attention_plans_;                  // a group each
  std::vector<std::int64_t> captured_rows_;
  LayerTrace* trace_ = nullptr;         // of this pass, nearly always null
  std::vector<std::int64_t> group_of_;  // by layer

  // Workspace, all in one buffer.
  Buffer buffer_;
  std::int64_t used_ = 0;
  // Position tables, [max_model_len, rotated pairs]; those of layers with a window may differ.
  float* cos_ = nullptr;
  float* sin_ = nullptr;
  float* local_cos_ = nullptr;
  float* local_sin_ = nullptr;
  float* x_ = nullptr;            // [max_rows, hidden], the residual stream
  float* normed_ = nullptr;       // [max_rows, hidden]
  float* embedded_ = nullptr;     // [max_rows, hidden], where it stands beside the hidden state
  float* qkv_ = nullptr;          // [max_rows, (heads + 2 kv_heads) * head_dim]
  float* attended_ = nullptr;     // [max_rows, heads * head_dim]
  float* partials_ = nullptr;     // what segments of long contexts come to, see AttentionPlan
  float* activated_ = nullptr;    // [max_rows, intermediate]
  float* block_out_ = nullptr;    // [max_rows, hidden], where a block's output is not simply added
  float* prepared_ = nullptr;     // what Kernels::prepare_* make of a product's input
  std::vector<float*> features_;  // [max_rows, hidden], one for each of wanted_.layers
  float* normed_features_ = nullptr;
  float* head_in_ = nullptr;              // [kLogitRows, hidden]
  float* logits_ = nullptr;               // [kLogitRows, vocab] and room for whole panels
  std::span<const float> host_logits_;    // what logits() gave last
  std::vector<cpu::ArgMax> best_;         // [threads + 1][kLogitRows], the last ones the result
  std::vector<Candidate> candidates_;     // [threads + 1][kLogitRows][kMaxCandidates], the same way
  std::vector<cuda::LikelyToken> found_;  // [kLogitRows][kMaxCandidates], of a GPU's draft head
};

}  // namespace specrt
