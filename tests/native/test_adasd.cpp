#include <cmath>
#include <vector>

#include "check.h"
#include "decode/adasd.h"

using specrt::AdaptiveThresholds;

TEST(adasd_distance) {
  const std::vector<float> a{1.0f, 0.0f};
  const std::vector<float> b{0.0f, 1.0f};
  const std::vector<float> half{0.5f, 0.5f};
  CHECK_EQ(specrt::js_distance(a, a), 0.0);
  CHECK_NEAR(specrt::js_distance(a, b), 1.0, 1e-12);
  CHECK_NEAR(specrt::js_distance(b, a), 1.0, 1e-12);
  // m = (3/4, 1/4): 1/2 * log2(4/3) + 1/2 * (1/2 * log2(2/3) + 1/2 * log2(2))
  const double expected = 0.5 * std::log2(4.0 / 3.0) + 0.25 * std::log2(2.0 / 3.0) + 0.25;
  CHECK_NEAR(specrt::js_distance(a, half), std::sqrt(expected), 1e-7);
  CHECK_NEAR(specrt::js_distance(half, std::vector<float>{1.0f}), std::sqrt(expected), 1e-7);
  CHECK_NEAR(specrt::entropy(half), std::log(2.0), 1e-7);
  CHECK_EQ(specrt::entropy(a), 0.0);
}

TEST(adasd_thresholds_need_sixteen_of_each) {
  AdaptiveThresholds thresholds;
  CHECK(std::isinf(thresholds.stop_above()));
  for (int i = 0; i < 15; ++i) {
    thresholds.observe(0.1 + 0.01 * i, true);
    thresholds.observe(0.7 + 0.01 * i, false);
  }
  thresholds.observe(0.25, true);
  thresholds.settle();
  CHECK_EQ(thresholds.accept_within(), -1.0);
  thresholds.observe(0.85, false);
  thresholds.settle();
  // Alike but for their place: half-way between the means.
  CHECK_NEAR(thresholds.accept_within(), 0.5 * (0.175 + 0.775), 1e-3);
  thresholds.observe_rejected(1.0);
  thresholds.observe_rejected(3.0);
  CHECK_NEAR(thresholds.stop_above(), 2.0, 1e-12);
}

TEST(adasd_distances_that_tell_nothing_accept_nothing) {
  const std::vector<double> low{0.1, 0.2, 0.3};
  const std::vector<double> high{0.6, 0.7, 0.8};
  CHECK_EQ(AdaptiveThresholds::crossing(high, low), -1.0);
  CHECK_EQ(AdaptiveThresholds::crossing(low, low), -1.0);
  const double at = AdaptiveThresholds::crossing(low, high);
  CHECK_NEAR(at, 0.45, 1e-3);
  const std::vector<double> same(20, 0.4);  // no spread at all
  const double narrow = AdaptiveThresholds::crossing(same, high);
  CHECK(narrow > 0.4 && narrow < 0.5);
}
