#pragma once

// Blocks on the host: every thread of a block is a fibre, and barriers switch between them. For
// tests, so it is strict where a GPU would go on with garbage:
//   - shared memory starts as NaN, and what copy_async() brings is there only after copy_wait();
//   - a barrier that some thread never reaches throws;
//   - run_grid() takes the order in which threads run between barriers, and a kernel whose result
//     depends on it has a race.

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "simt/block.h"
#include "simt/order.h"

namespace specrt::simt {

/// Runs `threads` fibres of one block to their ends.
class Fibres {
 public:
  using Body = void (*)(void* context, int thread);

  explicit Fibres(int threads);
  ~Fibres();
  Fibres(const Fibres&) = delete;
  Fibres& operator=(const Fibres&) = delete;

  /// Throws std::logic_error where threads wait for each other in vain.
  void run(Body body, void* context, Order order);

  // For the running fibre:
  void wait_block();
  void wait_warp();
  /// Leaves `bytes` for the other lanes to read, until the second exchange from now.
  void* exchange(const void* from, std::size_t bytes);
  /// What `lane` of this warp left at the last exchange, which all have reached.
  const void* left_by(int lane) const;
  void copy_async(void* to, const void* from, int bytes);
  void copy_commit();
  void copy_wait(int left);
  int thread() const { return current_; }

 private:
  struct Fibre;
  struct Platform;
  static void enter();
  void switch_out();
  bool release();

  std::unique_ptr<Platform> platform_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  int current_ = -1;
  Body body_ = nullptr;
  void* context_ = nullptr;
};

class HostBlock {
 public:
  HostBlock(Fibres& fibres, Grid at) : fibres_(&fibres), at_(at) {}
  int thread() const { return fibres_->thread(); }
  std::int64_t x() const { return at_.x; }
  std::int64_t y() const { return at_.y; }
  std::int64_t z() const { return at_.z; }
  void sync() const { fibres_->wait_block(); }
  void sync_warp() const { fibres_->wait_warp(); }

  template <typename T>
  T shuffle_xor(T value, int mask) const {
    return shuffle(value, thread() % kWarp ^ mask);
  }
  template <typename T>
  T shuffle(T value, int lane) const {
    fibres_->exchange(&value, sizeof value);
    T out;
    std::memcpy(&out, fibres_->left_by(lane % kWarp), sizeof out);
    return out;
  }
  bool any(bool value) const {
    const unsigned own = value ? 1u : 0u;
    fibres_->exchange(&own, sizeof own);
    for (int lane = 0; lane < kWarp; ++lane) {
      unsigned other;
      std::memcpy(&other, fibres_->left_by(lane), sizeof other);
      if (other != 0) return true;
    }
    return false;
  }

  void copy_async(void* to, const void* from, int bytes) const {
    fibres_->copy_async(to, from, bytes);
  }
  void copy_commit() const { fibres_->copy_commit(); }
  template <int kLeft>
  void copy_wait() const {
    fibres_->copy_wait(kLeft);
  }

  template <typename T>
  void mma(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) const {
    std::uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    fibres_->exchange(own, sizeof own);
    // Lane 4 g + c has rows g and g + 8 of a and d, column g of b; see PTX, "mma.m16n8k16".
    const int g = thread() % kWarp / 4;
    const int c = thread() % kWarp % 4;
    float x[2][16];
    float y[2][16];
    const auto take = [&](float* to, int lane, int at) {
      std::uint32_t value;
      std::memcpy(&value, static_cast<const std::uint32_t*>(fibres_->left_by(lane)) + at,
                  sizeof value);
      to[0] = to_float(T{static_cast<std::uint16_t>(value)});
      to[1] = to_float(T{static_cast<std::uint16_t>(value >> 16)});
    };
    for (int i = 0; i < 2; ++i) {
      for (int half = 0; half < 2; ++half) {
        for (int lane = 0; lane < 4; ++lane) {
          take(x[i] + 8 * half + 2 * lane, 4 * g + lane, i + 2 * half);
          take(y[i] + 8 * half + 2 * lane, 4 * (2 * c + i) + lane, 4 + half);
        }
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 16; ++k) d[i] = __builtin_fmaf(x[i / 2][k], y[i % 2][k], d[i]);
    }
  }
  void load_transposed(std::uint32_t (&r)[4], const void* row) const {
    fibres_->exchange(&row, sizeof row);
    const int lane = thread() % kWarp;
    for (int m = 0; m < 4; ++m) {
      std::uint32_t value = 0;
      for (int half = 0; half < 2; ++half) {
        const void* from = nullptr;
        std::memcpy(&from, fibres_->left_by(8 * m + 2 * (lane % 4) + half), sizeof from);
        std::uint16_t bits;
        std::memcpy(&bits, static_cast<const std::uint16_t*>(from) + lane / 4, sizeof bits);
        value |= std::uint32_t{bits} << (16 * half);
      }
      r[m] = value;
    }
  }

 private:
  Fibres* fibres_;
  Grid at_;
};

/// Runs every block of `grid`, one after the other.
template <class Kernel>
void run_grid(Grid grid, const typename Kernel::Args& args, Order order = Order::forward) {
  static_assert(Kernel::kThreads % kWarp == 0);
  struct Context {
    Fibres* fibres;
    Grid at;
    const typename Kernel::Args* args;
    typename Kernel::Shared* shared;
  };
  Fibres fibres(Kernel::kThreads);
  using Shared = typename Kernel::Shared;
  const std::unique_ptr<std::byte[]> memory(new std::byte[sizeof(Shared) + 128]);
  auto at = reinterpret_cast<std::uintptr_t>(memory.get());
  at = (at + 127) / 128 * 128;
  Context context{&fibres, {}, &args, reinterpret_cast<Shared*>(at)};
  const std::int64_t blocks = grid.x * grid.y * grid.z;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t block = order == Order::forward ? i : blocks - 1 - i;
    context.at = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    std::memset(context.shared, 0xFF, sizeof(Shared));
    fibres.run(
        [](void* opaque, int) {
          const auto& c = *static_cast<Context*>(opaque);
          Kernel::run(HostBlock(*c.fibres, c.at), *c.shared, *c.args);
        },
        &context, order);
  }
}

}  // namespace specrt::simt
