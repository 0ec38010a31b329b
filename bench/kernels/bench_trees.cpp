// What a draft tree costs beside the models' own work: growing EAGLE-2's tree of 60 nodes and
// laying it out for a pass; and a verification pass over a tree against one over a chain of as many
// rows.

#include <cmath>
#include <random>

#include "bench_model.h"
#include "decode/candidate_tree.h"
#include "model/attention_plan.h"
#include "model/runner.h"
#include "specrt/draft_tree.h"

namespace {

using namespace specrt;

constexpr char kUsage[] =
    "bench_trees [--model NAME] [--isa NAME,...] [--dtype NAME,...] [--threads N] [--context N]\n"
    "            [--nodes N] [--rows N] [--repeat N]\n";
constexpr std::int64_t kTopK = 10;
constexpr std::int64_t kLevels = 8;

/// The likeliest children of each node of a level as a head might give them, best first.
class Proposals {
 public:
  explicit Proposals(std::uint64_t seed) : draw_(seed) {}

  /// Grows a tree of `nodes` nodes into `out`.
  void grow(CandidateTree& tree, std::int64_t nodes, DraftTree& out) {
    tree.clear();
    out.clear();
    next_ = 0;
    add(tree, -1);
    for (std::int64_t level = 2; level <= kLevels; ++level) {
      const std::span<const std::int32_t> best = tree.close_level(kTopK);
      frontier_.assign(best.begin(), best.end());
      for (const std::int32_t node : frontier_) add(tree, node);
    }
    tree.finish(nodes, out);
  }

  /// New numbers, outside the time that is taken.
  void shuffle() {
    std::uniform_real_distribution<float> uniform(0.05f, 1.0f);
    for (float& one : steps_) one = std::log(uniform(draw_));
  }

 private:
  void add(CandidateTree& tree, std::int32_t parent) {
    for (std::int64_t r = 0; r < kTopK; ++r) {
      const float step = steps_[next_++ % steps_.size()] - 0.5f * static_cast<float>(r);
      tree.add(static_cast<TokenId>(r), parent, step, step);
    }
  }

  std::mt19937_64 draw_;
  std::vector<float> steps_ = std::vector<float>(1024, -1.0f);
  std::size_t next_ = 0;
  std::vector<std::int32_t> frontier_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

DraftTree chain(std::int64_t nodes) {
  DraftTree out;
  for (std::int64_t n = 0; n < nodes; ++n) {
    out.add(static_cast<TokenId>(n), static_cast<std::int32_t>(n) - 1, -1.0f);
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  bench::check_options(argc, argv, kUsage,
                       {"model", "isa", "dtype", "threads", "context", "nodes", "rows", "repeat"});
  const auto number = [&](const char* name, const char* otherwise) {
    return std::atoi(bench::option(argc, argv, name, {otherwise})[0].c_str());
  };
  const bench::Shape& shape =
      bench::shape_named(bench::option(argc, argv, "model", {"llama-3.2-1b"})[0]);
  const int threads = number("threads", "2");
  const std::int64_t context = number("context", "512");
  const std::int64_t nodes = number("nodes", "60");
  const std::int64_t rows = number("rows", "32");
  const int repeat = number("repeat", "15");

  for (const std::string& dtype : bench::option(argc, argv, "dtype", {"bfloat16"})) {
    const Model model = bench::random_model(shape, precision_from_name(dtype));
    for (const std::string& isa : bench::option(argc, argv, "isa", bench::fast_isas())) {
      const std::unique_ptr<Runner> prefilled =
          bench::runner_behind(model, shape, isa, threads, context);
      Runner& runner = *prefilled;
      const cpu::FpMode mode;
      const std::vector<TokenId> last = {0};

      // Bookkeeping alone: candidates, levels, rerank; rows, paths and attention's tasks.
      Proposals proposals(7);
      CandidateTree candidates;
      DraftTree tree;
      AttentionPlan::Shape plan_shape;
      plan_shape.q_heads = shape.heads;
      plan_shape.kv_heads = shape.kv_heads;
      plan_shape.head_dim = shape.head_dim;
      plan_shape.max_partials = AttentionPlan::kMostPartials;
      AttentionPlan plan(plan_shape, runner.max_rows(), threads);
      std::vector<std::int32_t> path(static_cast<std::size_t>(kLevels));
      std::vector<std::int32_t> table(static_cast<std::size_t>(context / 16 + 8));
      std::vector<cpu::AttentionRow> attention(static_cast<std::size_t>(nodes + 1));
      std::vector<double> growing, laying_out, planning;
      for (int round = 0; round < 20 * repeat; ++round) {
        proposals.shuffle();
        const double begin = bench::now();
        proposals.grow(candidates, nodes, tree);
        const double grown = bench::now();
        runner.begin();
        runner.add_committed(0, last);
        runner.add_tree(0, tree);
        const double laid_out = bench::now();
        for (std::size_t i = 0; i < attention.size(); ++i) {
          attention[i].table = table.data();
          attention[i].table_positions = context + 1;
          attention[i].path = path.data();
          attention[i].path_length = i == 0 ? 0 : tree.depths()[i - 1];
        }
        plan.make(attention);
        const double planned = bench::now();
        growing.push_back(grown - begin);
        laying_out.push_back(laid_out - grown);
        planning.push_back(planned - laid_out);
      }
      // Ranking, which reads the head's logits: levels of ten rows.
      std::vector<std::int64_t> level(static_cast<std::size_t>(kTopK));
      for (std::size_t i = 0; i < level.size(); ++i) level[i] = static_cast<std::int64_t>(i);
      runner.begin();
      runner.add_committed(0, last);
      runner.add_tree(0, chain(kTopK));
      runner.forward();
      (void)runner.logits(level);
      std::vector<double> ranking;
      for (int round = 0; round < repeat; ++round) {
        const double begin = bench::now();
        for (std::int64_t one = 1; one < kLevels; ++one) (void)runner.rank(kTopK, kTopK);
        (void)runner.rank(1, kTopK);
        ranking.push_back(bench::now() - begin);
      }
      std::printf(
          "%s %s, a tree of %lld nodes: %.3f ms (growing %.3f, laying out %.3f, attention's tasks "
          "%.3f); ranking %lld rows of %lld logits %.3f ms\n",
          shape.name, isa.c_str(), static_cast<long long>(nodes),
          1e3 * (median(growing) + median(laying_out) + median(planning)), 1e3 * median(growing),
          1e3 * median(laying_out), 1e3 * median(planning),
          static_cast<long long>(1 + kTopK * (kLevels - 1)), static_cast<long long>(shape.vocab),
          1e3 * median(ranking));

      // A tree's pass against a chain's, by turns.
      std::vector<std::int64_t> all;
      for (std::int64_t row = 0; row < rows; ++row) all.push_back(row);
      const DraftTree straight = chain(rows - 1);
      std::vector<double> of_tree, of_chain, ratio;
      const auto pass = [&](const DraftTree& draft) {
        const double begin = bench::now();
        runner.begin();
        runner.add_committed(0, last);
        runner.add_tree(0, draft);
        runner.forward();
        (void)runner.best(all);
        return bench::now() - begin;
      };
      for (int round = 0; round < repeat; ++round) {
        proposals.shuffle();
        proposals.grow(candidates, rows - 1, tree);
        if (round % 2 == 0) of_tree.push_back(pass(tree));
        of_chain.push_back(pass(straight));
        if (round % 2 != 0) of_tree.push_back(pass(tree));
        ratio.push_back(of_tree.back() / of_chain.back());
      }
      std::printf(
          "%s %s %s, %d threads, context %lld: a tree of %lld rows %.2f ms, a chain %.2f ms, ratio "
          "%.3f (median of neighbours)\n",
          shape.name, isa.c_str(), dtype.c_str(), threads, static_cast<long long>(context),
          static_cast<long long>(rows), 1e3 * median(of_tree), 1e3 * median(of_chain),
          median(ratio));
      std::fflush(stdout);
    }
  }
  return 0;
}
