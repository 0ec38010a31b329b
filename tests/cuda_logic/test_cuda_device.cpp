// The emulated device itself: as unkind as promised.

#include <csetjmp>
#include <csignal>
#include <cstring>

#include "../native/check.h"
#include "emulated/emulated.h"
#include "ops.h"
#include "specrt/error.h"

namespace {

using namespace specrt::cuda;

std::int32_t first_of(const DeviceBuffer& buffer) {
  std::int32_t value;
  std::memcpy(&value, emulated::look(buffer.data(), 4).data(), 4);
  return value;
}

TEST(cuda_device_does_nothing_until_somebody_waits) {
  emulated::reset();
  const OwnStream stream;
  const DeviceBuffer there(4);
  HostBuffer from(4), to(4);
  auto* value = reinterpret_cast<std::int32_t*>(from.data());
  auto* result = reinterpret_cast<std::int32_t*>(to.data());
  *value = 1;
  copy_to_device(there.data(), from.data(), 4, stream.get());
  Event sent;
  sent.wait();  // never recorded
  sent.record(stream.get());
  copy_to_host(to.data(), there.data(), 4, stream.get());
  CHECK_EQ(first_of(there), 0);
  *value = 2;  // too early: this is what arrives
  sent.wait();
  CHECK_EQ(first_of(there), 2);
  CHECK_EQ(*result, 0);
  synchronize(stream.get());
  CHECK_EQ(*result, 2);
}

TEST(cuda_device_graphs_hold_arguments) {
  emulated::reset();
  const OwnStream stream;
  const DeviceBuffer a(4), b(4);
  HostBuffer from(4);
  begin_capture(stream.get());
  fill(a.data(), 3, 4, stream.get());
  const Graph graph = end_capture(stream.get());
  synchronize(stream.get());
  CHECK_EQ(first_of(a), 0);
  for (int i = 0; i < 2; ++i) {
    fill(a.data(), 0, 4, stream.get());
    graph.launch(stream.get());
    synchronize(stream.get());
    CHECK_EQ(first_of(a), 0x03030303);
  }
  begin_capture(stream.get());
  fill(b.data(), 1, 4, stream.get());
  abandon_capture(stream.get());
  synchronize(stream.get());
  CHECK_EQ(first_of(b), 0);
}

TEST(cuda_device_tells_hosts_memory_from_its_own) {
  emulated::reset();
  const DeviceBuffer there(64);
  HostBuffer here(64);
  CHECK_THROWS(copy_to_device(here.data(), here.data(), 4, nullptr), specrt::InternalError, "");
  CHECK_THROWS(copy_to_host(there.data(), there.data(), 4, nullptr), specrt::InternalError, "");
  CHECK_THROWS(copy_to_device(there.data() + 4096 * 100, here.data(), 4, nullptr),
               specrt::InternalError, "");
  EmbedArgs args;
  args.table = here.data();
  CHECK_THROWS(embed(Type::bf16, args, 1, nullptr), specrt::InternalError, "");
}

TEST(cuda_device_runs_out_of_memory) {
  emulated::reset();
  emulated::settings().memory = 3 * 4096;
  const DeviceBuffer one(4096), two(1);
  CHECK_EQ(device_room().free, 4096);
  CHECK_THROWS(DeviceBuffer(4097), specrt::CapacityError, "");
  const DeviceBuffer three(4096);
  CHECK_EQ(device_room().free, 0);
  emulated::reset();
}

#if !defined(__SANITIZE_ADDRESS__)
std::jmp_buf back;

TEST(cuda_device_memory_is_not_the_hosts) {
  emulated::reset();
  const DeviceBuffer there(4);
  void (*const before)(int) = std::signal(SIGSEGV, [](int) { std::longjmp(back, 1); });
  volatile bool touched = false;
  if (setjmp(back) == 0) {
    touched = *reinterpret_cast<volatile std::int32_t*>(there.data()) == 0;
  }
  std::signal(SIGSEGV, before);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGSEGV);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  CHECK(!touched);
}
#endif

}  // namespace
