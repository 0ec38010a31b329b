// Captured graphs: what is replayed has the bits of what is launched, its inputs are read anew each
// time, and padding rows leave all pages alone.

#include <cuda_runtime_api.h>

#include "../cuda_logic/pass.h"
#include "kernels/pack.h"
#include "on_device.h"
#include "ops.h"
#include "specrt/error.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;

void good(cudaError_t status) {
  if (status != cudaSuccess) check::fail(__FILE__, __LINE__, cudaGetErrorString(status));
}

struct Captured {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;

  template <class Launch>
  explicit Captured(const Launch& launch) {
    good(cudaStreamCreate(&stream));
    good(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch(stream);
    good(cudaStreamEndCapture(stream, &graph));
    good(cudaGraphInstantiate(&exec, graph, 0));
  }
  ~Captured() {
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  void replay() const {
    good(cudaGraphLaunch(exec, stream));
    good(cudaStreamSynchronize(stream));
  }
};

void launch_pass(PaddedPass& pass, Stream stream) {
  rope_kv(Type::bf16, pass.rope(), pass.padded_rows, stream);
  attention(Type::bf16, pass.attention(), pass.padded_rows, pass.padded_units, stream);
  commit(pass.commit(), pass.sequences, 2, stream);
}

TEST(device_graph_of_padded_rows) {
  PaddedPass plain(0);
  launch_pass(plain, nullptr);
  synchronize(nullptr);
  PaddedPass padded(1);  // three rows in a graph of four
  const std::uint64_t before = padded.others();
  const Captured graph([&](cudaStream_t stream) { launch_pass(padded, stream); });
  const Floats qkv = padded.qkv;
  CHECK_EQ(padded.others(), before);
  for (int i = 0; i < 3; ++i) {
    padded.qkv.assign(qkv.begin(), qkv.end());  // rotated in place
    graph.replay();
    CHECK_EQ(padded.others(), before);
    CHECK(same_bits(padded.results(), plain.results()));
  }
  // Another round: other inputs in the same graph.
  const Floats other = random_floats(qkv.size(), 99);
  padded.qkv.assign(other.begin(), other.end());
  graph.replay();
  CHECK(!same_bits(padded.results(), plain.results()));
  CHECK_EQ(padded.others(), before);
}

TEST(device_graph_of_products) {
  constexpr std::int64_t kRows = 5, kWidth = 256;
  const auto values = as<Bf16>(random_floats(kWidth * kWidth, 1));
  std::vector<std::uint16_t> bits;
  for (const Bf16 value : values) bits.push_back(value.bits);
  DeviceMatrix matrix;
  matrix.n = matrix.k = kWidth;
  matrix.row_major = wants_row_major(architecture_of(0), kWidth, kWidth);
  std::vector<std::byte> packed(packed_bytes(kWidth, kWidth, Stored::plain));
  pack_plain(bits, 0, kWidth, kWidth, packed);
  const DeviceBuffer weight = matrix.row_major ? on_device(bits) : on_device(packed);
  matrix.data = weight.data();
  const DeviceBuffer x = on_device(as<Bf16>(random_floats(kRows * kWidth, 2)));
  const DeviceBuffer y = on_device(Floats(kRows * kWidth, NAN));
  const DeviceBuffer workspace(workspace_bytes(matrix, kRows));
  Product args;
  args.x = x.data();
  args.rows = kRows;
  args.y = y.data();
  args.y_stride = kWidth;
  args.workspace = reinterpret_cast<float*>(workspace.data());
  product(Type::bf16, matrix, args, nullptr);
  const Floats launched = from_device<float>(y);
  const Captured graph([&](cudaStream_t stream) { product(Type::bf16, matrix, args, stream); });
  graph.replay();
  CHECK(same_bits(from_device<float>(y), launched));
  copy_to_device(x.data(), as<Bf16>(random_floats(kRows * kWidth, 3)).data(), x.size(), nullptr);
  synchronize(nullptr);
  graph.replay();
  CHECK(!same_bits(from_device<float>(y), launched));
}

// Too much memory is refused and leaves the device usable.
TEST(device_memory_that_is_not_there) {
  CHECK_THROWS(DeviceBuffer(std::size_t{1} << 50), specrt::CapacityError, "the engine can go on");
  const DeviceBuffer still(1024);
  CHECK(still.data() != nullptr);
}

}  // namespace
