#pragma once

// Keys and values of accepted draft nodes move from scratch slots behind the committed ones.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct CommitArgs {
  void* const* planes = nullptr;  ///< [planes]: each [slots, bytes_of_slot]
  /// [sequences, most_nodes]: the slot of each accepted node, in order of the path; the walk's
  const std::int32_t* path = nullptr;         ///< nodes, see verify.h
  const std::int32_t* path_length = nullptr;  ///< [sequences]
  const std::int64_t* node_slots = nullptr;   ///< [sequences, most_nodes]: where a node's K/V are
  const std::int64_t* next_slots =
      nullptr;  ///< [sequences, most_nodes]: where position i of the path goes
  std::int64_t most_nodes = 0;
  std::int64_t bytes_of_slot = 0;  ///< a multiple of 16
};

/// Grid: most_nodes by sequences by planes. Scratch and committed slots are never the same, so no
/// move reads what another writes.
struct Commit {
  static constexpr int kThreads = 128;
  using Args = CommitArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    if (block.x() >= args.path_length[block.y()]) return;
    const std::int64_t first = block.y() * args.most_nodes;
    const std::int64_t from = args.node_slots[first + args.path[first + block.x()]];
    const std::int64_t to = args.next_slots[first + block.x()];
    char* plane = static_cast<char*>(args.planes[block.z()]);
    const auto* source = reinterpret_cast<const Words*>(plane + from * args.bytes_of_slot);
    auto* target = reinterpret_cast<Words*>(plane + to * args.bytes_of_slot);
    const std::int64_t count = args.bytes_of_slot / static_cast<std::int64_t>(sizeof(Words));
    for (std::int64_t i = block.thread(); i < count; i += kThreads) target[i] = source[i];
  }

 private:
  struct alignas(16) Words {
    std::uint32_t words[4];
  };
};

}  // namespace specrt::cuda
