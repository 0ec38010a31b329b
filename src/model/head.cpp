#include <algorithm>
#include <cmath>
#include <limits>

#include "model/runner.h"
#include "specrt/error.h"

// From the residual stream to logits, or only to the best of them.

namespace specrt {
namespace {

// Outputs whose logits a thread holds at once: they stay near while they are looked through.
constexpr std::int64_t kPanelsHeld = 8;

bool before(const Runner::Candidate& a, const Runner::Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

/// Puts a candidate into a sorted list of `count`, whose last one it may push out.
void insert(Runner::Candidate* list, std::int64_t count, Runner::Candidate one) {
  std::int64_t at = count - 1;
  if (!before(one, list[at])) return;
  for (; at > 0 && before(one, list[at - 1]); --at) list[at] = list[at - 1];
  list[at] = one;
}

}  // namespace

void Runner::head_input(std::span<const std::int64_t> rows) {
  const std::int64_t hidden = model_.config().hidden_size;
  const auto count = static_cast<std::int64_t>(rows.size());
  if (count > kLogitRows) {
    throw InternalError(expected_got("logits", "at most " + std::to_string(kLogitRows) + " rows",
                                     std::to_string(count)));
  }
  const Precision precision = lm_head_->precision;
  for_rows(cpu::prepared_rows(count), hidden, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < std::min(end, count); ++i) {
      normalise(x_ + rows[static_cast<std::size_t>(i)] * hidden, hidden, model_.data().norm,
                precision, head_in_ + i * hidden);
    }
    prepare(precision, head_in_, count, hidden, begin, end);
  });
}

void Runner::finish_logits(float* logits, std::int64_t count) const {
  const auto scale = static_cast<float>(model_.config().logits_scale);
  const auto cap = static_cast<float>(model_.config().final_softcap);
  if (scale != 1.0f) kernels_->scale(logits, count, scale);
  if (cap > 0.0f) kernels_->softcap(logits, count, cap);
}

std::span<const float> Runner::logits(std::span<const std::int64_t> rows) {
  const auto count = static_cast<std::int64_t>(rows.size());
  const std::int64_t vocab = model_.config().vocab_size;
  if (cuda_ != nullptr) return host_logits_ = cuda_->logits(rows);
  head_input(rows);
  gemm(*lm_head_, nullptr, head_in_, count, logits_, vocab, Add::no, cpu::Gate::none);
  if (model_.config().logits_scale != 1.0 || model_.config().final_softcap > 0.0) {
    pool_->parallel(count, [&](std::int64_t begin, std::int64_t end) {
      finish_logits(logits_ + begin * vocab, (end - begin) * vocab);
    });
  }
  return host_logits_ = {logits_, static_cast<std::size_t>(count * vocab)};
}

template <typename Body>
void Runner::for_logits(std::int64_t rows, const Body& body) {
  const Matrix& head = *lm_head_;
  const cpu::GemmArgs all = product_of(head, head_in_, rows, prepared_);
  const cpu::Gemm product = kernels_->gemm[static_cast<int>(head.precision)];
  const std::int64_t panels = (head.n + cpu::kPanel - 1) / cpu::kPanel;
  pool_->parallel_balanced(
      panels, kPanelsHeld, [&](int thread, std::int64_t begin, std::int64_t end) {
        // As many columns of logits_ as this thread's share has, so nobody else's.
        float* held = logits_ + begin * cpu::kPanel * kLogitRows;
        const std::int64_t stride = std::min(kPanelsHeld, end - begin) * cpu::kPanel;
        for (std::int64_t panel = begin; panel < end; panel += kPanelsHeld) {
          const std::int64_t last = std::min(end, panel + kPanelsHeld);
          const std::int64_t first = panel * cpu::kPanel;
          cpu::GemmArgs args = all;
          args.y = held - first;  // output n goes to column n - first
          args.y_stride = stride;
          product(args, panel, last);
          const std::int64_t count = std::min(last * cpu::kPanel, head.n) - first;
          for (std::int64_t row = 0; row < rows; ++row) {
            finish_logits(held + row * stride, count);
            body(thread, row, first, held + row * stride, count);
          }
        }
      });
}

std::span<const cpu::ArgMax> Runner::best(std::span<const std::int64_t> rows) {
  const auto count = static_cast<std::int64_t>(rows.size());
  if (cuda_ != nullptr) {
    const std::span out = std::span(best_).first(rows.size());
    cuda_->best(rows, out);
    return out;
  }
  head_input(rows);
  const int threads = pool_->size();
  for (cpu::ArgMax& one : best_) one = {-1, 0.0f, true};
  const auto merge = [](cpu::ArgMax& into, const cpu::ArgMax& one) {
    if (!one.finite) into.finite = false;
    if (one.index < 0 || !one.finite) return;
    const bool better =
        one.value > into.value || (one.value == into.value && one.index < into.index);
    if (into.index < 0 || better) {
      into.index = one.index;
      into.value = one.value;
    }
  };
  for_logits(count, [&](int thread, std::int64_t row, std::int64_t first, const float* logits,
                        std::int64_t columns) {
    cpu::ArgMax here = kernels_->arg_max(logits, columns);
    here.index += first;
    merge(best_[static_cast<std::size_t>(thread * kLogitRows + row)], here);
  });
  const std::span result = std::span(best_).last(static_cast<std::size_t>(kLogitRows));
  for (int thread = 0; thread < threads; ++thread) {
    for (std::int64_t row = 0; row < count; ++row) {
      merge(result[static_cast<std::size_t>(row)],
            best_[static_cast<std::size_t>(thread * kLogitRows + row)]);
    }
  }
  return result.first(static_cast<std::size_t>(count));
}

std::span<const Runner::Candidate> Runner::top(std::span<const std::int64_t> rows,
                                               std::int64_t count) {
  if (count < 1 || count > std::min(kMaxCandidates, model_.config().vocab_size)) {
    throw InternalError(expected_got("candidates", "from 1 to " + std::to_string(kMaxCandidates),
                                     std::to_string(count)));
  }
  const auto row_count = static_cast<std::int64_t>(rows.size());
  require_cpu("draft heads");
  head_input(rows);
  const float infinity = std::numeric_limits<float>::infinity();
  std::fill(candidates_.begin(), candidates_.end(),
            Candidate{static_cast<TokenId>(model_.config().vocab_size), -infinity});
  const auto list = [&](int thread, std::int64_t row) {
    return candidates_.data() + (thread * kLogitRows + row) * count;
  };
  for_logits(row_count, [&](int thread, std::int64_t row, std::int64_t first, const float* logits,
                            std::int64_t columns) {
    Candidate* mine = list(thread, row);
    for (std::int64_t i = 0; i < columns; ++i) {
      // Most do not pass: one comparison each.
      if (!(logits[i] > mine[count - 1].logit) && mine[count - 1].token < lm_head_->n) {
        continue;
      }
      insert(mine, count, {static_cast<TokenId>(first + i), logits[i]});
    }
  });
  const int threads = pool_->size();
  for (int thread = 0; thread < threads; ++thread) {
    for (std::int64_t row = 0; row < row_count; ++row) {
      for (std::int64_t i = 0; i < count; ++i) {
        insert(list(threads, row), count, list(thread, row)[i]);
      }
    }
  }
  return {list(threads, 0), static_cast<std::size_t>(row_count * count)};
}

std::span<const float> Runner::likely_logits() {
  return cuda_ != nullptr ? cuda_->likely_logits() : host_logits_;
}

std::span<const Runner::Candidate> Runner::likely(std::span<const std::int64_t> wanted,
                                                  std::int64_t count) {
  const std::int64_t vocab = model_.config().vocab_size;
  const std::int64_t rows = std::ssize(wanted);
  if (count < 1 || count > std::min(kMaxCandidates, vocab) || rows > kLogitRows) {
    throw InternalError(expected_got("candidates", "from 1 to " + std::to_string(kMaxCandidates),
                                     std::to_string(count)));
  }
  if (cuda_ != nullptr) {
    const auto found = std::span(found_).first(static_cast<std::size_t>(rows * count));
    cuda_->likely(wanted, count, found);
    std::transform(found.begin(), found.end(), candidates_.begin(),
                   [](const cuda::LikelyToken& one) { return Candidate{one.id, one.value}; });
    return {candidates_.data(), found.size()};
  }
  (void)logits(wanted);
  return rank(rows, count);
}

std::span<const Runner::Candidate> Runner::rank(std::int64_t rows, std::int64_t count) {
  const std::int64_t vocab = model_.config().vocab_size;
  const float infinity = std::numeric_limits<float>::infinity();
  pool_->parallel(rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* logits = host_logits_.data() + row * vocab;
      Candidate* list = candidates_.data() + row * count;
      std::fill(list, list + count, Candidate{-1, -infinity});
      const cpu::ArgMax best = kernels_->arg_max(logits, vocab);
      if (!best.finite) continue;
      const double sum = kernels_->exp_sum(logits, vocab, best.value, 1.0f);
      const auto lse = static_cast<float>(double{best.value} + std::log(sum));
      constexpr std::int64_t kBlock = 64;
      for (std::int64_t first = 0; first < vocab; first += kBlock) {
        const std::int64_t last = std::min(first + kBlock, vocab);
        // Few blocks have anything that passes.
        float most = -infinity;
        for (std::int64_t i = first; i < last; ++i) most = logits[i] > most ? logits[i] : most;
        if (!(most > list[count - 1].logit)) continue;
        for (std::int64_t i = first; i < last; ++i) {
          if (!(logits[i] > list[count - 1].logit)) continue;
          insert(list, count, {static_cast<TokenId>(i), logits[i]});
        }
      }
      for (std::int64_t i = 0; i < count; ++i) list[i].logit -= lse;
    }
  });
  return {candidates_.data(), static_cast<std::size_t>(rows * count)};
}

}  // namespace specrt
