#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "specrt/cpu.h"
#include "specrt/drafter.h"
#include "specrt/export.h"
#include "specrt/memory.h"
#include "specrt/model.h"
#include "specrt/static_tree.h"
#include "specrt/types.h"

namespace specrt {

/// Medusa heads (Cai et al. 2401.10774): head i reads the target's last hidden state, after the
/// final norm, and says what comes i + 1 tokens behind the token that the target itself says there.
///
///   for each residual block: x += silu(W x + b)
///   logits = logits_scale * P x
struct SPECRT_API MedusaConfig {
  std::int64_t vocab_size = 0;  ///< the target's
  std::int64_t hidden_size = 0;
  std::int64_t num_heads = 0;      ///< of the checkpoint's, those that draft
  std::int64_t num_blocks = 1;     ///< residual blocks of a head, >= 0
  std::int64_t outputs = 0;        ///< of a projection: at most vocab_size
  bool bias = true;                ///< of the blocks
  bool shared_blocks = false;      ///< the blocks of a head are one and the same
  bool shared_projection = false;  ///< one projection for all heads
  double logits_scale = 1.0;
  std::vector<TokenId> token_map;  ///< the tokens of the outputs; empty: output i is token i

  /// Throws InvalidArgument naming the first field that does not fit the others.
  void check() const;
};

/// The canonical tensors: heads.{i}.blocks.{j} [hidden, hidden] (and .bias [hidden]),
/// heads.{i}.projection or projection [outputs, hidden]. Shared blocks are blocks.0.
SPECRT_API std::vector<TensorSpec> tensors_of(const MedusaConfig& config);

/// Bytes of packed weights: exactly what MedusaBuilder allocates.
SPECRT_API std::int64_t weight_bytes(const MedusaConfig& config, Precision precision);

struct MedusaData;

/// Packed, immutable heads. Copies share them.
class SPECRT_API MedusaHeads {
 public:
  MedusaHeads() = default;
  explicit MedusaHeads(std::shared_ptr<const MedusaData> data);
  bool valid() const { return data_ != nullptr; }
  const MedusaConfig& config() const;
  Precision precision() const;
  std::int64_t weight_bytes() const;
  const MedusaData& data() const { return *data_; }

 private:
  std::shared_ptr<const MedusaData> data_;
};

/// Takes the tensors one at a time, packing each as it comes.
class SPECRT_API MedusaBuilder {
 public:
  MedusaBuilder(const MedusaConfig& config, Precision precision);
  ~MedusaBuilder();
  MedusaBuilder(MedusaBuilder&&) noexcept;
  MedusaBuilder& operator=(MedusaBuilder&&) noexcept;

  /// Row-major data. Throws InvalidArgument for an unknown or repeated name, a wrong shape, or
  /// weights that the precision cannot hold.
  void set(const std::string& name, std::span<const std::int64_t> shape, DType dtype,
           const void* data);
  /// Throws LoadError naming every tensor that is still missing. Leaves the builder empty.
  MedusaHeads build();

 private:
  std::unique_ptr<MedusaData> data_;
};

/// What every head says of these hidden states [rows, hidden]: [heads, rows, outputs] logits.
SPECRT_API std::vector<float> medusa_logits(const MedusaHeads& heads, std::span<const float> hidden,
                                            const std::shared_ptr<ThreadTeam>& team = nullptr,
                                            const std::string& cpu_isa = "auto");

struct SPECRT_API MedusaOptions {
  StaticTree tree;          ///< at most as deep as there are heads
  int max_batch_size = 32;  ///< sequences beyond get no drafts
  int threads = 0;
  std::shared_ptr<ThreadTeam> team;  ///< null: one of its own; the decoder's is best
  std::string cpu_isa = "auto";
  std::string device = "cpu";  ///< as DecoderOptions has it
};

/// Drafts trees of the heads' alternatives: those of rank r at depth d are head d - 1's. Greedy
/// requests, and those with a verification other than `coupled`, rank by probability; sampled ones
/// with `coupled` by log-probability plus the target's own noise at that position. The decoder has
/// to be made with the final norm's output among its features.
SPECRT_API std::shared_ptr<Drafter> make_medusa_drafter(const MedusaHeads& heads,
                                                        const MedusaOptions& options);

/// What it takes, before it is made.
SPECRT_API MemoryUse memory_of_medusa(const MedusaConfig& config, Precision precision,
                                      int max_batch_size, const std::string& device = "cpu");

}  // namespace specrt
