// Kernels put on emulated streams: the launches of cuda/launch and cuda/gemm, over the same
// sources.

#include <string>
#include <type_traits>

#include "emulated/stream.h"
#include "grids.h"
#include "specrt/error.h"

namespace specrt::cuda {
namespace {

using emulated::require_on_device;

template <class Kernel>
void launch(simt::Grid grid, const typename Kernel::Args& args, Stream stream) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  emulated::put(stream, [=] { simt::run_grid<Kernel>(grid, args, emulated::settings().order); });
}

/// A stream of the emulated device, as grids.h takes it.
struct OnHost {
  Stream stream;
  template <class Kernel>
  void launch(simt::Grid grid, const typename Kernel::Args& args) const {
    cuda::launch<Kernel>(grid, args, stream);
  }
};

template <typename Use>
void by_type(Type type, const Use& use) {
  if (type == Type::bf16) {
    use(simt::Bf16{});
  } else {
    use(simt::Half{});
  }
}

void finish(Type type, const FinishArgs& args, Stream stream) {
  by_type(type, [&](auto t) { finish_product<decltype(t)>(OnHost{stream}, args); });
}

// In place of wgmma: one accumulator over k in order. What it shows is that weights and activations
// lie where wgmma would read them.
template <typename T>
struct RowMajorProduct {
  static constexpr int kThreads = 64;
  struct Args {
    const T* weight;
    const T* x;
    float* y;
    std::int64_t n;
    std::int64_t k_stride;
    std::int64_t y_stride;
    bool onto;
  };
  struct Shared {};
  template <class Block>
  static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t n = block.x() * kThreads + block.thread();
    if (n >= args.n) return;
    float* y = args.y + block.y() * args.y_stride + n;
    float sum = args.onto ? *y : 0.0f;
    for (std::int64_t k = 0; k < args.k_stride; ++k) {
      sum = fused(to_float(args.weight[n * args.k_stride + k]),
                  to_float(args.x[block.y() * args.k_stride + k]), sum);
    }
    *y = sum;
  }
};

template <typename T>
void row_major_product(Type type, const DeviceMatrix& matrix, const Product& p, Stream stream) {
  const bool gated = is_gated(p.after);
  typename RowMajorProduct<T>::Args args;
  args.weight = static_cast<const T*>(matrix.data);
  args.x = static_cast<const T*>(p.x);
  args.y = gated ? p.workspace : static_cast<float*>(p.y);
  args.n = matrix.n;
  args.k_stride = padded_columns(matrix.k);
  args.y_stride = gated ? matrix.n : p.y_stride;
  args.onto = p.after == After::add;
  if (args.y_stride % 4 != 0) {
    throw InternalError(expected_got("product", "rows of y of whole 16 bytes",
                                     std::to_string(args.y_stride) + " floats"));
  }
  launch<RowMajorProduct<T>>({(matrix.n + 63) / 64, p.rows}, args, stream);
  if (gated) {
    finish(type, {p.workspace, p.bias, p.y, p.rows, matrix.n, p.y_stride, 1, p.after}, stream);
  } else if (p.bias != nullptr) {
    finish(type, {nullptr, p.bias, p.y, p.rows, matrix.n, p.y_stride, 0, After::add}, stream);
  }
}

}  // namespace

void embed(Type type, const EmbedArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at :
       {args.table, static_cast<const void*>(args.tokens), static_cast<const void*>(args.out)}) {
    require_on_device(at, "embed");
  }
  by_type(type, [&](auto t) { launch<Embed<decltype(t)>>({rows}, args, stream); });
}

void embed_packed(Type type, Stored stored, const EmbedPackedArgs& args, std::int64_t rows,
                  Stream stream) {
  require_on_device(args.table, "embed");
  by_type(type, [&](auto t) {
    using T = decltype(t);
    if (stored == Stored::plain) {
      launch<EmbedPacked<T, Stored::plain>>({rows}, args, stream);
    } else {
      launch<EmbedPacked<T, Stored::int8>>({rows}, args, stream);
    }
  });
}

void rms_norm(Type type, const RmsNormArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.x), static_cast<const void*>(args.rows),
        static_cast<const void*>(args.weight), static_cast<const void*>(args.out)}) {
    require_on_device(at, "rms_norm");
  }
  by_type(type, [&](auto t) { launch<RmsNorm<decltype(t)>>({rows}, args, stream); });
}

void states(Type type, const StatesArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.from), static_cast<const void*>(args.x),
        static_cast<const void*>(args.positions), static_cast<const void*>(args.weight),
        static_cast<const void*>(args.rounded), static_cast<const void*>(args.kept),
        static_cast<const void*>(args.to)}) {
    require_on_device(at, "states");
  }
  by_type(type, [&](auto t) {
    using Kernel = States<decltype(t)>;
    emulated::put(stream, [=] {
      for (std::int64_t row = 0; row < rows; ++row) {
        if (args.from != nullptr) require_on_device(args.from[row], "states");
        if (args.to != nullptr) require_on_device(args.to[row], "states");
      }
      simt::run_grid<Kernel>({rows}, args, emulated::settings().order);
    });
  });
}

void rope_kv(Type type, const RopeKvArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at : {static_cast<const void*>(args.qkv), static_cast<const void*>(args.slots),
                         static_cast<const void*>(args.cos), static_cast<const void*>(args.k),
                         static_cast<const void*>(args.v)}) {
    require_on_device(at, "rope_kv");
  }
  by_type(type, [&](auto t) { launch<RopeKv<decltype(t)>>({rows, 2}, args, stream); });
}

void attention(Type type, const AttentionArgs& args, std::int64_t rows, std::int64_t units,
               Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.q), static_cast<const void*>(args.out),
        static_cast<const void*>(args.rows), static_cast<const void*>(args.units),
        static_cast<const void*>(args.tables), static_cast<const void*>(args.paths),
        static_cast<const void*>(args.partials)}) {
    require_on_device(at, "attention");
  }
  by_type(type, [&](auto t) { attention<decltype(t)>(OnHost{stream}, args, rows, units); });
}

bool wants_row_major(int architecture, std::int64_t n, std::int64_t) {
  return architecture == 90 && n % 4 == 0;
}

std::int64_t workspace_bytes(const DeviceMatrix& matrix, std::int64_t rows) {
  return bytes_of_sums(matrix, rows);
}

void product(Type type, const DeviceMatrix& matrix, const Product& args, Stream stream) {
  if (args.rows == 0) return;
  for (const void* at : {matrix.data, static_cast<const void*>(matrix.scales), args.x,
                         static_cast<const void*>(args.bias), static_cast<const void*>(args.y),
                         static_cast<const void*>(args.workspace)}) {
    require_on_device(at, "product");
  }
  if (matrix.row_major) {
    by_type(type, [&](auto t) { row_major_product<decltype(t)>(type, matrix, args, stream); });
    return;
  }
  const OnHost on{stream};
  const GemmArgs gemm = gemm_args(matrix, args);
  if (matrix.stored == Stored::plain) {
    by_type(type,
            [&](auto t) { mma_product<decltype(t), Stored::plain>(on, gemm, args.workspace); });
  } else if (type != Type::bf16) {
    throw UnsupportedError(
        expected_got("product", "bfloat16 activations for int8 and int4 weights", "float16"));
  } else if (matrix.stored == Stored::int8) {
    mma_product<simt::Bf16, Stored::int8>(on, gemm, args.workspace);
  } else {
    mma_product<simt::Bf16, Stored::int4>(on, gemm, args.workspace);
  }
}

void add_block(const AddBlockArgs& args, std::int64_t rows, Stream stream) {
  launch<AddBlock>({rows}, args, stream);
}

void add_silu(Type type, const AddSiluArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at : {static_cast<const void*>(args.x), static_cast<const void*>(args.block),
                         static_cast<const void*>(args.rounded)}) {
    require_on_device(at, "add_silu");
  }
  by_type(type, [&](auto t) { add_silu<decltype(t)>(OnHost{stream}, args, rows); });
}

void finish_logits(const FinishLogitsArgs& args, std::int64_t rows, Stream stream) {
  finish_logits(OnHost{stream}, args, rows);
}

void find_tops(const ChooseArgs& args, std::int64_t rows, Stream stream) {
  launch<FindTops>({args.chunks, rows}, args, stream);
}

void likely(const LikelyArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.logits), static_cast<const void*>(args.out)}) {
    require_on_device(at, "likely");
  }
  likely(OnHost{stream}, args, rows);
}

void process_logits(const ProcessArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.logits), static_cast<const void*>(args.processed),
        static_cast<const void*>(args.rows), static_cast<const void*>(args.states),
        static_cast<const void*>(args.trees.tokens),
        static_cast<const void*>(args.draft_of_target)}) {
    require_on_device(at, "process_logits");
  }
  launch<ProcessLogits>({rows}, args, stream);
}

void favour(const FavourArgs& args, std::int64_t rows, bool filtered, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.choose.logits), static_cast<const void*>(args.choose.rows),
        static_cast<const void*>(args.choose.states),
        static_cast<const void*>(args.target_of_draft), static_cast<const void*>(args.out),
        static_cast<const void*>(args.scores)}) {
    require_on_device(at, "favour");
  }
  favour(OnHost{stream}, args, rows, filtered);
}

void choose(const ProcessArgs& process, const ChooseArgs& args, std::int64_t rows, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.logits), static_cast<const void*>(args.rows),
        static_cast<const void*>(args.states), static_cast<const void*>(args.choices),
        static_cast<const void*>(process.trees.tokens)}) {
    require_on_device(at, "choose");
  }
  choose(OnHost{stream}, process, args, rows);
}

void verify(const VerifyArgs& args, std::int64_t sequences, Stream stream) {
  launch<Verify>({sequences}, args, stream);
}

void grow_level(const GrowArgs& args, std::int64_t drafts, Stream stream) {
  for (const void* at :
       {static_cast<const void*>(args.steps), static_cast<const void*>(args.likely),
        static_cast<const void*>(args.candidates), static_cast<const void*>(args.frontiers)}) {
    require_on_device(at, "grow_level");
  }
  if (args.hidden != nullptr) require_on_device(args.states, "grow_level");
  launch<GrowLevel>({drafts}, args, stream);
}

void finish_draft(const FinishDraftArgs& args, std::int64_t drafts, Stream stream) {
  require_on_device(args.drafts, "finish_draft");
  require_on_device(args.out, "finish_draft");
  launch<FinishDraft>({drafts}, args, stream);
}

void commit(const CommitArgs& args, std::int64_t sequences, std::int64_t planes, Stream stream) {
  require_on_device(args.planes, "commit");
  commit(OnHost{stream}, args, sequences, planes);
}

}  // namespace specrt::cuda
