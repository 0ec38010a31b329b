#include "simt/host.h"

#include <ucontext.h>

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

namespace specrt::simt {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kExchangeBytes = 64;

enum class State : std::uint8_t { ready, at_block, at_warp, done };

}  // namespace

struct Fibres::Fibre {
  ucontext_t context;
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
  ucontext_t scheduler;
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  std::mt19937 engine{1};
};

Fibres::Fibres(int threads) : platform_(std::make_unique<Platform>()) {
  for (int i = 0; i < threads; ++i) fibres_.push_back(std::make_unique<Fibre>());
}

Fibres::~Fibres() = default;

void Fibres::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Fibres*>(static_cast<std::uintptr_t>(high) << 32 | low);
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self->platform_->stack, &self->platform_->stack_bytes);
#endif
  self->body_(self->context_, self->current_);
  Fibre& fibre = *self->fibres_[static_cast<std::size_t>(self->current_)];
  fibre.state = State::done;
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_start_switch_fiber(nullptr, self->platform_->stack, self->platform_->stack_bytes);
#endif
  setcontext(&self->platform_->scheduler);
}

void Fibres::switch_out() {
  Fibre& fibre = *fibres_[static_cast<std::size_t>(current_)];
#if SPECRT_FIBRES_TELL_ASAN
  __sanitizer_start_switch_fiber(&fibre.fake_stack, platform_->stack, platform_->stack_bytes);
#endif
  swapcontext(&fibre.context, &platform_->scheduler);
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
  const auto address = reinterpret_cast<std::uintptr_t>(this);
  for (auto& fibre : fibres_) {
    getcontext(&fibre->context);
    fibre->context.uc_stack.ss_sp = fibre->stack.get();
    fibre->context.uc_stack.ss_size = kStackBytes;
    fibre->context.uc_link = nullptr;
    makecontext(&fibre->context, reinterpret_cast<void (*)()>(&Fibres::enter), 2,
                static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
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
        swapcontext(&platform_->scheduler, &fibre.context);
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
