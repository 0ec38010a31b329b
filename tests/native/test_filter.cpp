// What top_k, top_p and min_p leave, against sorting the whole row.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "decode/choose.h"
#include "decode/filter.h"
#include "specrt/error.h"
#include "test_kernels_support.h"

using namespace kernel_test;
using specrt::Chooser;
using specrt::Filter;
using specrt::SamplingParams;

namespace {

using Ids = std::vector<std::int32_t>;
const float kInf = std::numeric_limits<float>::infinity();

/// Most likely first, equals by id.
Ids ranking(const Floats& logits) {
  Ids ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  return ids;
}

struct Row {
  Floats logits;
  Floats weights;
  float max = 0.0f;
  double sum = 0.0;
};

Row row_of(const Kernels& kernels, const Floats& logits, const SamplingParams& params) {
  Row row{logits, Floats(logits.size()), *std::max_element(logits.begin(), logits.end()), 0.0};
  row.sum = kernels.exp_weights(logits.data(), static_cast<std::int64_t>(logits.size()), row.max,
                                static_cast<float>(1.0 / params.temperature), row.weights.data());
  return row;
}

/// The filters one by one over the sorted row: how many may be left at least and at most, where
/// rounding of sums leaves more than one answer.
struct Bounds {
  std::size_t least, most;
};
Bounds bounds(const Row& row, const Ids& order, const SamplingParams& params) {
  const auto weight = [&](std::size_t i) {
    return double{row.weights[static_cast<std::size_t>(order[i])]};
  };
  std::size_t size = order.size();
  if (params.top_k > 0) size = std::min(size, static_cast<std::size_t>(params.top_k));
  while (size > 1 && weight(size - 1) == 0.0) --size;  // they could never be drawn
  Bounds out{size, size};
  if (params.top_p < 1.0) {
    double total = 0.0;
    for (std::size_t i = 0; i < size; ++i) total += weight(i);
    double before = 0.0;
    out = {0, 0};
    for (std::size_t i = 0; i < size; ++i) {
      if (i == 0 || before < params.top_p * total * (1.0 - 4e-6)) out.least = i + 1;
      if (i == 0 || before < params.top_p * total * (1.0 + 4e-6)) out.most = i + 1;
      before += weight(i);
    }
  }
  const auto likely = [&](std::size_t count) {
    while (count > 0 && weight(count - 1) < params.min_p) --count;
    return count;
  };
  return {likely(out.least), likely(out.most)};
}

/// What is left has to be a head of the ranking, of the right length.
void check_filter(const Kernels& kernels, const Floats& logits, const SamplingParams& params) {
  const Row row = row_of(kernels, logits, params);
  Filter filter(kernels, static_cast<std::int64_t>(logits.size()));
  filter.apply(row.logits, row.weights, row.max, row.sum, params);
  const Ids got(filter.ids().begin(), filter.ids().end());
  CHECK(std::is_sorted(got.begin(), got.end()));
  const Ids order = ranking(logits);
  const Bounds expected = bounds(row, order, params);
  CHECK(got.size() >= expected.least && got.size() <= expected.most);
  Ids head(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(got.size()));
  std::sort(head.begin(), head.end());
  CHECK(got == head);
  for (std::size_t i = 0; i < got.size(); ++i) {
    CHECK_EQ(filter.weights()[i], row.weights[static_cast<std::size_t>(got[i])]);
  }
}

std::vector<Floats> rows(std::size_t n) {
  const auto seed = static_cast<std::uint32_t>(n);
  std::vector<Floats> out = {random_floats(n, seed), random_floats(n, seed, 6.0f),
                             random_floats(n, seed, 200.0f), Floats(n, -1.5f)};
  Floats ties = random_floats(n, seed + 1, 4.0f);
  for (float& x : ties) x = std::round(x);
  out.push_back(ties);
  for (float& x : ties) x = x > 0.0f ? 0.0f : -0.0f;
  out.push_back(ties);
  Floats one(n, -kInf);
  one[n / 2] = 3.0f;
  out.push_back(one);
  Floats masked = random_floats(n, seed + 2, 3.0f);
  for (std::size_t i = 0; i < n; ++i) {
    if (i % 9 != 4 % n) masked[i] = -kInf;
  }
  out.push_back(masked);
  Floats close(n, 100.0f);  // neighbours among floats
  for (std::size_t i = 0; i < n; i += 3) close[i] = std::nextafter(100.0f, kInf);
  out.push_back(close);
  Floats large = random_floats(n, seed + 3, 5e37f);
  out.push_back(large);
  return out;
}

}  // namespace

TEST(filter_is_the_head_of_the_sorted_row) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : {1u, 3u, 15u, 64u, 300u, 1300u}) {
      for (const Floats& logits : rows(n)) {
        for (const double temperature : {1.0, 0.05, 1e-6, 30.0, 1e39}) {
          SamplingParams params;
          params.temperature = temperature;
          for (const std::int64_t k : {0, 1, 2, 7, 40, 4000, 1000000}) {
            for (const double p : {1.0, 1e-9, 0.3, 0.9, 0.999, 1.0 - 1e-12}) {
              for (const double least : {0.0, 0.05, 1.0}) {
                // Every pair of them, and all three once.
                if (k != 0 && p != 1.0 && least != 0.0 && (k != 7 || p != 0.9)) continue;
                params.top_k = k;
                params.top_p = p;
                params.min_p = least;
                if (!Filter::wanted(params, static_cast<std::int64_t>(n))) continue;
                check_filter(kernels, logits, params);
              }
            }
          }
        }
      }
    }
  });
}

TEST(filter_of_a_large_vocabulary) {
  on_every_isa([](const Kernels& kernels) {
    for (const float spread : {0.5f, 3.0f}) {
      Floats logits = random_floats(151936, 3, spread);
      for (std::size_t i = 0; i < 3000; ++i) logits[i * 50 + 7] = 2.0f;  // a tie in the way
      SamplingParams params;
      params.temperature = 0.9;
      for (const std::int64_t k : {50, 5000, 100000}) {
        params.top_k = k;
        check_filter(kernels, logits, params);
      }
      for (const std::int64_t k : {0, 50}) {
        params.top_k = k;
        for (const double p : {0.1, 0.9, 0.99}) {
          params.top_p = p;
          check_filter(kernels, logits, params);
        }
      }
    }
  });
}

TEST(filter_top_k_does_not_depend_on_the_isa) {
  SamplingParams params;
  params.temperature = 1.0;
  Floats logits = random_floats(20000, 8, 2.0f);
  for (float& x : logits) x = std::round(x * 64.0f) / 64.0f;
  for (const std::int64_t k : {1, 50, 777, 12000}) {
    params.top_k = k;
    std::set<Ids> seen;
    on_every_isa([&](const Kernels& kernels) {
      const Row row = row_of(kernels, logits, params);
      Filter filter(kernels, 20000);
      filter.apply(row.logits, row.weights, row.max, row.sum, params);
      CHECK_EQ(filter.ids().size(), static_cast<std::size_t>(k));
      seen.insert(Ids(filter.ids().begin(), filter.ids().end()));
    });
    CHECK_EQ(seen.size(), 1u);
  }
}

TEST(filter_leaves_the_choice_to_the_race) {
  // Choosing among what is left by its ids is the dense race with the rest taken out, and the law
  // is the same set's.
  on_every_isa([](const Kernels& kernels) {
    const std::int64_t n = 3001;
    const Floats logits = random_floats(static_cast<std::size_t>(n), 12, 2.0f);
    Chooser chooser(kernels, n);
    SamplingParams params;
    params.temperature = 0.8;
    for (int setting = 0; setting < 4; ++setting) {
      params.top_k = setting == 0 ? 50 : 0;
      params.top_p = setting == 1 || setting == 3 ? 0.95 : 1.0;
      params.min_p = setting >= 2 ? 0.01 : 0.0;
      const std::span<const float> law = chooser.distribution(logits, params);
      CHECK_NEAR(std::accumulate(law.begin(), law.end(), 0.0), 1.0, 1e-5);
      const Row row = row_of(kernels, logits, params);
      Floats dense(row.weights.size());
      for (std::size_t id = 0; id < dense.size(); ++id) {
        if (law[id] > 0.0f) dense[id] = row.weights[id];
      }
      for (std::int64_t position = 0; position < 200; ++position) {
        CHECK_EQ(chooser.choose(logits, params, position),
                 chooser.draw(dense, params, position,
                              specrt::purpose_word(specrt::Purpose::target_choice)));
      }
    }
  });
}

TEST(filter_of_one_is_greedy) {
  on_every_isa([](const Kernels& kernels) {
    // The second differs from the first by less than a weight can show.
    const Floats logits = {0.5f, 1.0f, std::nextafter(1.0f, 2.0f), -kInf, 1.0f};
    Chooser chooser(kernels, 5);
    for (int which = 0; which < 3; ++which) {
      SamplingParams params;
      params.temperature = 1e6;
      params.top_k = which == 0 ? 1 : 0;
      if (which == 1) params.top_p = DBL_MIN;
      if (which == 2) params.top_p = 1e-300;
      for (std::int64_t position = 0; position < 50; ++position) {
        CHECK_EQ(chooser.choose(logits, params, position), 2);
        CHECK_EQ(chooser.distribution(logits, params)[2], 1.0f);
      }
    }
  });
}

TEST(filter_refuses_nan) {
  on_every_isa([](const Kernels& kernels) {
    Floats logits = random_floats(100, 1);
    logits[57] = std::numeric_limits<float>::quiet_NaN();
    Chooser chooser(kernels, 100);
    SamplingParams params;
    params.temperature = 1.0;
    params.top_k = 5;
    CHECK_THROWS(chooser.choose(logits, params, 0), specrt::NumericError, "finite");
    CHECK_THROWS(chooser.distribution(logits, params), specrt::NumericError, "finite");
  });
}

TEST(logprobs_rank_and_the_most_likely) {
  on_every_isa([](const Kernels& kernels) {
    for (const std::size_t n : {1u, 7u, 300u, 5000u}) {
      for (const Floats& logits : rows(n)) {
        const Ids order = ranking(logits);
        Chooser chooser(kernels, static_cast<std::int64_t>(n));
        for (const std::int32_t top : {0, 1, 5, 300}) {
          for (std::size_t at = 0; at < n; at += 1 + n / 11) {
            specrt::TokenLogprobs told;
            chooser.logprobs(logits, order[at], top, told);
            CHECK_EQ(told.rank, static_cast<std::int64_t>(at) + 1);
            CHECK_EQ(told.top.size(), std::min(n, static_cast<std::size_t>(top)));
            for (std::size_t i = 0; i < told.top.size(); ++i) {
              CHECK_EQ(told.top[i].first, order[i]);
            }
          }
        }
      }
    }
  });
}
