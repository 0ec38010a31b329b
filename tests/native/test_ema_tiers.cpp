#include <vector>

#include "check.h"
#include "decode/ema_tiers.h"

using specrt::EmaTiers;

TEST(ema_tiers_start_near_what_was_asked) {
  const EmaTiers tiers;
  CHECK_EQ(tiers.steps(1, -1), 5);  // the middle candidate
  CHECK_EQ(tiers.steps(1, 8), 7);
  CHECK_EQ(tiers.steps(1, 4), 3);  // the lower of two
  CHECK_EQ(tiers.steps(7, 1), 1);
  CHECK_EQ(tiers.steps(8, 8), 3);
  CHECK_EQ(tiers.steps(32, 8), 1);
  CHECK_EQ(tiers.steps(64, 8), 0);
  CHECK_EQ(tiers.steps(1000, 8), 0);
}

TEST(ema_tiers_move_after_the_warmup) {
  EmaTiers tiers;
  for (int batch = 0; batch < 14; ++batch) {
    tiers.observe(1, 7, 0.0);
    CHECK_EQ(tiers.steps(1, 7), 7);
  }
  tiers.observe(1, 7, 0.0);  // the 15th: five after the warm-up of ten
  CHECK_EQ(tiers.steps(1, 7), 1);
  for (int batch = 0; batch < 20; ++batch) tiers.observe(1, 7, 7.0);
  CHECK_EQ(tiers.steps(1, 7), 7);
}

// From 0 steps the next move goes up again; tiers keep their own state.
TEST(ema_tiers_probe_from_nothing) {
  EmaTiers tiers;
  for (int batch = 0; batch < 15; ++batch) tiers.observe(8, 1, 0.0);
  CHECK_EQ(tiers.steps(8, 1), 0);
  CHECK_EQ(tiers.steps(1, 1), 1);
  for (int batch = 0; batch < 5; ++batch) {
    CHECK_EQ(tiers.steps(8, 1), 0);
    tiers.observe(8, 1, 0.0);
  }
  CHECK_EQ(tiers.steps(8, 1), 1);
}
