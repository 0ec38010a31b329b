#pragma once

// Every kernel launch, as functions of plain arguments and a stream; they return at once. What is
// computed, and in which order, is said at the kernels. Without CUDA each throws UnsupportedError.

#include <cstdint>

#include "device.h"
#include "kernels/add_block.h"
#include "kernels/add_silu.h"
#include "kernels/attention.h"
#include "kernels/choose.h"
#include "kernels/commit.h"
#include "kernels/embed.h"
#include "kernels/favour.h"
#include "kernels/finish_logits.h"
#include "kernels/gemm.h"
#include "kernels/grow.h"
#include "kernels/likely.h"
#include "kernels/process_logits.h"
#include "kernels/rms_norm.h"
#include "kernels/rope_kv.h"
#include "kernels/states.h"
#include "kernels/verify.h"

namespace specrt::cuda {

/// What activations, keys and values are in.
enum class Type : std::uint8_t { bf16, fp16 };

void embed(Type type, const EmbedArgs& args, std::int64_t rows, Stream stream);
/// Out of a packed matrix, plain or int8, in place of the table.
void embed_packed(Type type, Stored stored, const EmbedPackedArgs& args, std::int64_t rows,
                  Stream stream);
void rms_norm(Type type, const RmsNormArgs& args, std::int64_t rows, Stream stream);
void states(Type type, const StatesArgs& args, std::int64_t rows, Stream stream);
void rope_kv(Type type, const RopeKvArgs& args, std::int64_t rows, Stream stream);
/// Attention and, where a row may have several segments, their combination. Throws UnsupportedError
/// for heads that no instantiation takes.
void attention(Type type, const AttentionArgs& args, std::int64_t rows, std::int64_t units,
               Stream stream);

/// A matrix on the device.
struct DeviceMatrix {
  const void* data = nullptr;
  const float* scales = nullptr;  ///< as GemmArgs::scales
  std::int64_t n = 0;
  std::int64_t k = 0;
  Stored stored = Stored::plain;
  /// Plain weights on sm_90 stay row-major, [n, padded_columns(k)], as wgmma reads them; all others
  /// are packed (kernels/pack.h).
  bool row_major = false;
};

/// Whether plain weights of [n, k] stay row-major on this architecture.
bool wants_row_major(int architecture, std::int64_t n, std::int64_t k);

struct Product {
  const void* x = nullptr;  ///< [rows, padded_columns(k)] of the type
  std::int64_t rows = 0;
  const float* bias = nullptr;
  void* y = nullptr;          ///< float, or of the type where gated
  std::int64_t y_stride = 0;  ///< for row-major matrices a multiple of 4
  After after = After::store;
  float* workspace = nullptr;  ///< workspace_bytes(matrix, rows)
};

/// Bytes that product() needs beside its arguments.
std::int64_t workspace_bytes(const DeviceMatrix& matrix, std::int64_t rows);

/// y from x and the matrix. int8 and int4 take bf16 only: their weights are bf16 by definition.
void product(Type type, const DeviceMatrix& matrix, const Product& args, Stream stream);

void add_block(const AddBlockArgs& args, std::int64_t rows, Stream stream);
void add_silu(Type type, const AddSiluArgs& args, std::int64_t rows, Stream stream);
void finish_logits(const FinishLogitsArgs& args, std::int64_t rows, Stream stream);

/// ChooseArgs::tops of `rows` rows, of which only what FindTops reads is used.
void find_tops(const ChooseArgs& args, std::int64_t rows, Stream stream);
/// LikelyArgs::out of `rows` rows.
void likely(const LikelyArgs& args, std::int64_t rows, Stream stream);
/// Penalties, biases and masks of `rows` rows.
void process_logits(const ProcessArgs& args, std::int64_t rows, Stream stream);
/// FavourArgs::out and scores of `rows` rows; `filtered`: whether some have filters.
void favour(const FavourArgs& args, std::int64_t rows, bool filtered, Stream stream);
/// Processing, choice and log-probability of `rows` rows.
void choose(const ProcessArgs& process, const ChooseArgs& args, std::int64_t rows, Stream stream);
void verify(const VerifyArgs& args, std::int64_t sequences, Stream stream);
void grow_level(const GrowArgs& args, std::int64_t drafts, Stream stream);
void finish_draft(const FinishDraftArgs& args, std::int64_t drafts, Stream stream);
void commit(const CommitArgs& args, std::int64_t sequences, std::int64_t planes, Stream stream);

}  // namespace specrt::cuda
