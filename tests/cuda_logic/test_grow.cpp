// Draft trees that grow on a device, against those that the host grows of the same likely tokens.

#include <cmath>
#include <limits>
#include <map>

#include "decode/candidate_tree.h"
#include "kernels/grow.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;
using specrt::CandidateTree;
using specrt::DraftTree;

struct Setting {
  std::int64_t levels;
  std::int64_t nodes;
};

// What the rows of a level say: random, many of them equal, some of them none.
std::vector<LikelyToken> likely_of(std::int64_t rows, std::int32_t count, std::uint32_t seed,
                                   bool broken) {
  const Floats values = random_floats(static_cast<std::size_t>(rows * count), seed, 2.0f);
  std::vector<LikelyToken> out(static_cast<std::size_t>(rows * count));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int32_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(row * count + i);
      const float value = std::round(-std::fabs(values[at]) * 4.0f) / 4.0f;
      out[at] = {static_cast<std::int32_t>((row * 7 + i * 13) % 101), value};
    }
    if (!broken) continue;
    const auto at = static_cast<std::size_t>(row * count);
    if (row % 3 == 1) {  // a row that is not finite
      for (std::int32_t i = 0; i < count; ++i) {
        out[at + static_cast<std::size_t>(i)] = {-1, -std::numeric_limits<float>::infinity()};
      }
    } else {
      out[at].value = 0x1p-24f;  // what rounding leaves above 0
    }
  }
  return out;
}

void check_growth(std::int32_t top_k, const std::vector<Setting>& settings, bool mapped,
                  bool broken, Order order) {
  const auto drafts = static_cast<std::int64_t>(settings.size());
  constexpr std::int64_t kTargetVocab = 80, kWidth = 3;
  std::vector<std::int32_t> map;
  for (std::int32_t id = 0; id < 101; ++id) map.push_back(id + id / 4);  // the last ones not there
  std::int64_t depth = 0;
  std::int64_t most_nodes = 0;
  for (const Setting& one : settings) {
    depth = std::max(depth, one.levels);
    most_nodes = std::max(most_nodes, one.nodes);
  }
  const std::int64_t most = top_k + (depth - 1) * top_k * top_k;
  std::vector<GrownCandidate> candidates(static_cast<std::size_t>(drafts * most));
  std::vector<std::int32_t> frontiers(static_cast<std::size_t>(drafts * top_k), 12345);
  std::vector<CandidateTree> trees(settings.size());
  // On the host, a row is a candidate; of the next level's rows, in order.
  std::vector<std::vector<std::int32_t>> rows(settings.size(), {-1});
  std::map<std::pair<std::size_t, std::int32_t>, std::int32_t> scratch_of;
  std::vector<GrowStep> steps(settings.size());
  std::vector<GrownDraft> sizes(settings.size());
  std::int32_t scratch = 0;
  for (std::size_t d = 0; d < settings.size(); ++d) {
    steps[d].rows = 1;
    steps[d].first_row = static_cast<std::int32_t>(d);
  }
  std::int64_t ran = drafts;
  for (std::int64_t level = 0; level < depth; ++level) {
    const std::vector<LikelyToken> likely =
        likely_of(ran, top_k, static_cast<std::uint32_t>(level) + 5, broken);
    const Floats states(static_cast<std::size_t>(ran * kWidth));
    // As a runner lays the next pass out.
    std::int32_t next = 0;
    std::int32_t path = 3;
    for (std::size_t d = 0; d < settings.size(); ++d) {
      GrowStep& step = steps[d];
      const auto frontier =
          static_cast<std::int32_t>(std::min<std::int64_t>(top_k, settings[d].nodes));
      step.begin = level == 0 ? 0 : top_k + static_cast<std::int32_t>(level - 1) * frontier * top_k;
      step.next_rows = level + 1 < settings[d].levels ? frontier : 0;
      step.next_row = next;
      step.scratch = scratch;
      step.path = path;
      step.path_length = static_cast<std::int32_t>(level) + 1;
      next += step.next_rows;
      scratch += step.next_rows;
      path += step.next_rows * step.path_length;
      if (level + 1 == settings[d].levels) {
        sizes[d] = {step.begin + step.rows * top_k, static_cast<std::int32_t>(settings[d].nodes)};
      }
    }
    GrowArgs args;
    args.steps = steps.data();
    args.likely = likely.data();
    args.count = top_k;
    args.target_of_draft = mapped ? map.data() : nullptr;
    args.target_vocab = kTargetVocab;
    args.candidates = candidates.data();
    args.most_candidates = most;
    args.frontiers = frontiers.data();
    args.states = states.data();
    args.state_width = kWidth;
    const auto total = static_cast<std::size_t>(next);
    std::vector<std::int32_t> tokens(total, 777), paths(static_cast<std::size_t>(path), 777);
    std::vector<const float*> hidden(total, states.data() + 1);
    args.tokens = tokens.data();
    args.hidden = hidden.data();
    args.paths = paths.data();
    run_grid<GrowLevel>({drafts}, args, order);
    CHECK_EQ(paths[0] + paths[1] + paths[2], 3 * 777);

    for (std::size_t d = 0; d < settings.size(); ++d) {
      if (level >= settings[d].levels) continue;
      CandidateTree& tree = trees[d];
      std::vector<std::int64_t> row_of;  // of each candidate of the level
      const std::int64_t before = tree.size();
      for (std::size_t r = 0; r < rows[d].size(); ++r) {
        const std::int64_t row = steps[d].first_row + static_cast<std::int64_t>(r);
        for (std::int32_t i = 0; rows[d][r] != -2 && i < top_k; ++i) {
          const LikelyToken& one = likely[static_cast<std::size_t>(row * top_k + i)];
          if (one.id < 0) continue;
          const std::int32_t token = mapped ? map[static_cast<std::size_t>(one.id)] : one.id;
          if (token >= kTargetVocab) continue;
          tree.add(token, rows[d][r], one.value, one.value);
          row_of.push_back(row);
        }
      }
      if (level + 1 == settings[d].levels) {
        rows[d].clear();
        continue;
      }
      const auto frontier = tree.close_level(std::min<std::int64_t>(top_k, settings[d].nodes));
      rows[d].assign(frontier.begin(), frontier.end());
      rows[d].resize(static_cast<std::size_t>(steps[d].next_rows), -2);
      for (std::int32_t n = 0; n < steps[d].next_rows; ++n) {
        const std::int32_t node = rows[d][static_cast<std::size_t>(n)];
        const auto row = static_cast<std::size_t>(steps[d].next_row + n);
        if (node == -2) {
          CHECK_EQ(tokens[row], -1);
          CHECK(hidden[row] == nullptr);
          continue;
        }
        scratch_of[{d, node}] = steps[d].scratch + n;
        CHECK_EQ(tokens[row], tree.token(node));
        CHECK(hidden[row] ==
              states.data() + row_of[static_cast<std::size_t>(node - before)] * kWidth);
        std::int32_t above = node;
        for (std::int32_t at = steps[d].path_length - 1; at >= 0; --at) {
          CHECK_EQ(paths[static_cast<std::size_t>(steps[d].path + n * steps[d].path_length + at)],
                   (scratch_of[{d, above}]));
          above = tree.parent(above);
        }
        CHECK_EQ(above, -1);
      }
    }
    for (GrowStep& step : steps) {
      step.rows = step.next_rows;
      step.first_row = step.next_row;
    }
    ran = std::max(next, 1);
  }

  FinishDraftArgs args;
  args.drafts = sizes.data();
  args.candidates = candidates.data();
  args.most_candidates = most;
  args.most_nodes = most_nodes;
  const std::int64_t values = 1 + 3 * most_nodes;
  std::vector<std::int32_t> out(static_cast<std::size_t>(drafts * values));
  args.out = out.data();
  run_in_all_orders<FinishDraft>({drafts}, args, out);
  for (std::size_t d = 0; d < settings.size(); ++d) {
    DraftTree want;
    trees[d].finish(settings[d].nodes, want);
    const std::int32_t* got = out.data() + static_cast<std::int64_t>(d) * values;
    CHECK_EQ(got[0], static_cast<std::int32_t>(want.size()));
    for (std::size_t n = 0; n < want.size(); ++n) {
      CHECK_EQ(got[1 + 3 * n], want.tokens()[n]);
      CHECK_EQ(got[2 + 3 * n], want.parents()[n]);
      CHECK_EQ(got[3 + 3 * n],
               static_cast<std::int32_t>(specrt::simt::bits_of(want.log_probs()[n])));
    }
  }
}

}  // namespace

TEST(cuda_trees_grow_as_on_the_host) {
  const std::vector<Setting> some = {{3, 12}, {1, 4}, {5, 3}, {4, 200}, {2, 1}};
  for (const Order order : {Order::forward, Order::backward, Order::shuffled}) {
    for (const bool mapped : {false, true}) {
      for (const bool broken : {false, true}) {
        for (const std::int32_t top_k : {1, 2, 5}) check_growth(top_k, some, mapped, broken, order);
      }
    }
    check_growth(10, {{6, 60}, {3, 256}}, true, false, order);
    check_growth(64, {{2, 64}}, false, true, order);
  }
}
