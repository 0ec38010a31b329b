#include "simt/host.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>

// AddressSanitizer has to be told when the stack under it changes.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SPECRT_FIBRES_TELL_ASAN 1
#else
#define SPECRT_FIBRES_TELL_ASAN 0
#endif

// swapcontext() saves the signal mask too, a system call each time; where it can be had for a few
// lines, a switch is the registers that a call preserves.
#if defined(__x86_64__)
extern "C" void specrt_switch_stack(void** save, void* load);
asm(R"(
.text
.type specrt_switch_stack, @function
specrt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size specrt_switch_stack, .-specrt_switch_stack
)");
#else
#include <ucontext.h>
#endif

namespace specrt::simt {
namespace {

#if defined(__x86_64__)
/// A stack and where it stopped.
class Context {
 public:
  void start(std::byte* stack, std::size_t bytes, void (*entry)()) {
    const auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) / 16 * 16;
    auto* at = reinterpret_cast<void**>(top) - 8;  // six registers, and where to return to
    std::fill(at, at + 8, nullptr);
    at[6] = reinterpret_cast<void*>(entry);
    stopped_ = at;
  }
  void go(Context& to) { specrt_switch_stack(&stopped_, to.stopped_); }

 private:
  void* stopped_ = nullptr;
};
#else
class Context {
 public:
  void start(std::byte* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void go(Context& to) { swapcontext(&context_, &to.context_); }

 private:
  ucontext_t context_;
};
#endif

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kExchangeBytes = 64;

enum class State : std::uint8_t { ready, at_block, at_warp, done };

thread_local Fibres* running = nullptr;

}  // namespace

struct Fibres::Fibre {
  Context context;
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
  State state = State::done;
  void* fake_stack = nullptr;
  // Two places in turn: whoever reads one may do so until all lanes have met twice more.
  alignas(16) std::byte left[2][kExchangeBytes];
  int turn = 0;
  struct Copy {
    void* to;
    const void* from;
    int bytes;
  };
  std::vector<std::vector<Copy>> groups{1};  // the last one is open
};

struct Fibres::Platform {
  Context scheduler;
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  std::mt19937 engine{1};
};

Fibres::Fibres(int threads) : platform_(std::make_unique<Platform>()) {
  for (int i = 0; i < threads; ++i) fibres_.push_back(std::make_unique<Fibre>());
}

Fibres::~Fibres() = default;

void Fibres::enter() {
  Fibres* self = running;
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self->platform_->stack, &self->platform_->stack_bytes);
#endif
  self->body_(self->context_, self->current_);
  Fibre& fibre = *self->fibres_[static_cast<std::size_t>(self->current_)];
  fibre.state = State::done;
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_start_switch_fiber(nullptr, self->platform_->stack, self->platform_->stack_bytes);
#endif
  fibre.context.go(self->platform_->scheduler);
}

void Fibres::switch_out() {
  Fibre& fibre = *fibres_[static_cast<std::size_t>(current_)];
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_start_switch_fiber(&fibre.fake_stack, platform_->stack, platform_->stack_bytes);
#endif
  fibre.context.go(platform_->scheduler);
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_finish_switch_fiber(fibre.fake_stack, &platform_->stack, &platform_->stack_bytes);
#endif
}

void Fibres::wait_block() {
  fibres_[static_cast<std::size_t>(current_)]->state = State::at_block;
  switch_out();
}

void Fibres::wait_warp() {
  fibres_[static_cast<std::size_t>(current_)]->state = State::at_warp;
  switch_out();
}

void* Fibres::exchange(const void* from, std::size_t bytes) {
  Fibre& fibre = *fibres_[static_cast<std::size_t>(current_)];
  fibre.turn = 1 - fibre.turn;
  void* to = fibre.left[fibre.turn];
  std::memcpy(to, from, bytes);
  wait_warp();
  return to;
}

const void* Fibres::left_by(int lane) const {
  const int turn = fibres_[static_cast<std::size_t>(current_)]->turn;
  return fibres_[static_cast<std::size_t>(current_ / kWarp * kWarp + lane)]->left[turn];
}

void Fibres::copy_async(void* to, const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 ||
      (bytes > 0 && reinterpret_cast<std::uintptr_t>(from) % 16 != 0)) {
    throw std::logic_error("copy_async: not aligned to 16 bytes");
  }
  std::memset(to, 0xFF, 16);  // nothing to be read yet
  fibres_[static_cast<std::size_t>(current_)]->groups.back().push_back({to, from, bytes});
}

void Fibres::copy_commit() { fibres_[static_cast<std::size_t>(current_)]->groups.emplace_back(); }

void Fibres::copy_wait(int left) {
  auto& groups = fibres_[static_cast<std::size_t>(current_)]->groups;
  const auto closed = static_cast<int>(groups.size()) - 1;
  const int count = std::max(0, closed - left);
  for (int i = 0; i < count; ++i) {
    for (const Fibre::Copy& copy : groups[static_cast<std::size_t>(i)]) {
      std::memset(copy.to, 0, 16);
      if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
    }
  }
  groups.erase(groups.begin(), groups.begin() + count);
}

// Lets those go on that all others have joined; false where nobody can.
bool Fibres::release() {
  bool any = false;
  bool whole_block = true;
  for (std::size_t first = 0; first < fibres_.size(); first += kWarp) {
    bool whole_warp = true;
    for (std::size_t i = first; i < first + kWarp; ++i) {
      whole_warp = whole_warp && fibres_[i]->state == State::at_warp;
      whole_block = whole_block && fibres_[i]->state == State::at_block;
    }
    if (!whole_warp) continue;
    any = true;
    for (std::size_t i = first; i < first + kWarp; ++i) fibres_[i]->state = State::ready;
  }
  if (!whole_block) return any;
  for (auto& fibre : fibres_) fibre->state = State::ready;
  return true;
}

void Fibres::run(Body body, void* context, Order order) {
  body_ = body;
  context_ = context;
  running = this;
  for (auto& fibre : fibres_) {
    fibre->context.start(fibre->stack.get(), kStackBytes, &Fibres::enter);
    fibre->state = State::ready;
    fibre->groups.assign(1, {});
  }
  std::vector<int> turns(fibres_.size());
  for (std::size_t i = 0; i < turns.size(); ++i) turns[i] = static_cast<int>(i);
  if (order == Order::backward) std::reverse(turns.begin(), turns.end());
  for (;;) {
    if (order == Order::shuffled) std::shuffle(turns.begin(), turns.end(), platform_->engine);
    std::size_t done = 0;
    for (const int turn : turns) {
      Fibre& fibre = *fibres_[static_cast<std::size_t>(turn)];
      if (fibre.state == State::ready) {
        current_ = turn;
#if SPECRT_FIBRES_TELL_ASAN
        __sanitizer_start_switch_fiber(&platform_->fake_stack, fibre.stack.get(), kStackBytes);
#endif
        platform_->scheduler.go(fibre.context);
#if SPECRT_FIBRES_TELL_ASAN
        __sanitizer_finish_switch_fiber(platform_->fake_stack, nullptr, nullptr);
#endif
      }
      if (fibre.state == State::done) ++done;
    }
    if (done == fibres_.size()) return;
    if (!release()) throw std::logic_error("a barrier that not all threads reach");
  }
}

}  // namespace specrt::simt
