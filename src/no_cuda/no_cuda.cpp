// The CUDA entry points of a library that was built without CUDA.

#include "ops.h"
#include "specrt/cuda.h"
#include "specrt/error.h"

namespace specrt {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError(
      "[device] expected a build with CUDA (SPECRT_CUDA=ON), got this one, which was built without "
      "CUDA: use device='cpu'");
}

}  // namespace

bool cuda_built() { return false; }
CudaCounts cuda_counts() { return {}; }
std::vector<CudaDevice> cuda_devices() { refuse(); }

namespace cuda {

int architecture_of(int) { refuse(); }
void use_device(int) { refuse(); }
DeviceRoom device_room() { refuse(); }
DeviceBuffer::DeviceBuffer(std::size_t) { refuse(); }
DeviceBuffer::~DeviceBuffer() = default;
DeviceBuffer::DeviceBuffer(DeviceBuffer&&) noexcept = default;
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&&) noexcept = default;
HostBuffer::HostBuffer(std::size_t) { refuse(); }
HostBuffer::~HostBuffer() = default;
HostBuffer::HostBuffer(HostBuffer&&) noexcept = default;
HostBuffer& HostBuffer::operator=(HostBuffer&&) noexcept = default;
OwnStream::OwnStream() { refuse(); }
OwnStream::~OwnStream() = default;
Event::Event() { refuse(); }
Event::~Event() = default;
void Event::record(Stream) { refuse(); }
void Event::wait() { refuse(); }
void Event::hold(Stream) { refuse(); }
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
void Graph::launch(Stream) const { refuse(); }
void begin_capture(Stream) { refuse(); }
Graph end_capture(Stream) { refuse(); }
void abandon_capture(Stream) noexcept {}
void copy_to_device(void*, const void*, std::size_t, Stream) { refuse(); }
void copy_to_host(void*, const void*, std::size_t, Stream) { refuse(); }
void fill(void*, int, std::size_t, Stream) { refuse(); }
void synchronize(Stream) { refuse(); }

void embed(Type, const EmbedArgs&, std::int64_t, Stream) { refuse(); }
void embed_packed(Type, Stored, const EmbedPackedArgs&, std::int64_t, Stream) { refuse(); }
void rms_norm(Type, const RmsNormArgs&, std::int64_t, Stream) { refuse(); }
void states(Type, const StatesArgs&, std::int64_t, Stream) { refuse(); }
void rope_kv(Type, const RopeKvArgs&, std::int64_t, Stream) { refuse(); }
void attention(Type, const AttentionArgs&, std::int64_t, std::int64_t, Stream) { refuse(); }
bool wants_row_major(int, std::int64_t, std::int64_t) { refuse(); }
std::int64_t workspace_bytes(const DeviceMatrix&, std::int64_t) { refuse(); }
void product(Type, const DeviceMatrix&, const Product&, Stream) { refuse(); }
void add_block(const AddBlockArgs&, std::int64_t, Stream) { refuse(); }
void add_silu(Type, const AddSiluArgs&, std::int64_t, Stream) { refuse(); }
void finish_logits(const FinishLogitsArgs&, std::int64_t, Stream) { refuse(); }
void find_tops(const ChooseArgs&, std::int64_t, Stream) { refuse(); }
void likely(const LikelyArgs&, std::int64_t, Stream) { refuse(); }
void choose(const ProcessArgs&, const ChooseArgs&, std::int64_t, Stream) { refuse(); }
void verify(const VerifyArgs&, std::int64_t, Stream) { refuse(); }
void process_logits(const ProcessArgs&, std::int64_t, Stream) { refuse(); }
void favour(const FavourArgs&, std::int64_t, bool, Stream) { refuse(); }
void grow_level(const GrowArgs&, std::int64_t, Stream) { refuse(); }
void finish_draft(const FinishDraftArgs&, std::int64_t, Stream) { refuse(); }
void commit(const CommitArgs&, std::int64_t, std::int64_t, Stream) { refuse(); }

}  // namespace cuda
}  // namespace specrt
