// What a whole forward pass of M rows costs against one row, head included, for a model of a known
// shape with random weights.

#include "bench_model.h"
#include "model/runner.h"
#include "specrt/draft_tree.h"
#include "specrt/model.h"

namespace {

using namespace specrt;

constexpr char kUsage[] =
    "bench_forward [--model NAME] [--isa NAME,...] [--dtype NAME,...] [--threads N]\n"
    "              [--context N] [--rows M,...] [--repeat N]\n";

}  // namespace

int main(int argc, char** argv) {
  bench::check_options(argc, argv, kUsage,
                       {"model", "isa", "dtype", "threads", "context", "rows", "repeat"});
  const auto number = [&](const char* name, const char* otherwise) {
    return std::atoi(bench::option(argc, argv, name, {otherwise})[0].c_str());
  };
  const bench::Shape& shape =
      bench::shape_named(bench::option(argc, argv, "model", {"llama-3.2-1b"})[0]);
  const int threads = number("threads", "2");
  const std::int64_t context = number("context", "512");
  const int repeat = number("repeat", "12");
  std::vector<std::int64_t> row_counts;
  for (const std::string& one :
       bench::option(argc, argv, "rows", {"1", "2", "4", "8", "16", "32", "64"})) {
    row_counts.push_back(std::atoi(one.c_str()));
  }
  for (const std::string& dtype :
       bench::option(argc, argv, "dtype", {"bfloat16", "int8", "int4", "w8a8"})) {
    const Model model = bench::random_model(shape, precision_from_name(dtype));
    for (const std::string& isa : bench::option(argc, argv, "isa", bench::fast_isas())) {
      const std::unique_ptr<Runner> prefilled =
          bench::runner_behind(model, shape, isa, threads, context);
      Runner& runner = *prefilled;
      const cpu::FpMode mode;
      const std::vector<TokenId> last = {0};
      // One committed row, the others a draft behind it, as verification has them. Row counts
      // alternate, so that all of them meet the same machine.
      std::vector<std::vector<double>> times(row_counts.size());
      std::vector<std::int64_t> rows;
      for (int round = 0; round < repeat; ++round) {
        for (std::size_t i = 0; i < row_counts.size(); ++i) {
          DraftTree tree;
          for (std::int64_t n = 1; n < row_counts[i]; ++n) {
            tree.add(static_cast<TokenId>(n), static_cast<std::int32_t>(n) - 2, -1.0f);
          }
          rows.clear();
          for (std::int64_t n = 0; n < row_counts[i]; ++n) rows.push_back(n);
          const double begin = bench::now();
          runner.begin();
          runner.add_committed(0, last);
          if (!tree.empty()) runner.add_tree(0, tree);
          runner.forward();
          (void)runner.best(rows);
          times[i].push_back(bench::now() - begin);
        }
      }
      const bench::Memory memory(std::int64_t{512} << 20);
      cpu::ThreadPool pool(threads);
      const double bandwidth = bench::read_bandwidth(pool, memory);
      const double one = bench::quartile(times[0]);
      // Embedding rows are looked up, the head's are all read.
      const std::int64_t read = weight_bytes(model.config(), model.precision()) -
                                (shape.tied ? 0 : shape.vocab * shape.hidden * 2);
      std::printf(
          "%s %-7s %-8s %d threads, context %lld: t(1) %.2f ms, %.1f GB/s of %.1f, t(1) is %.2f "
          "times reading;  t(M)/t(1):",
          shape.name, isa.c_str(), dtype.c_str(), threads, static_cast<long long>(context),
          one * 1e3, static_cast<double>(read) / one * 1e-9, bandwidth,
          one * bandwidth * 1e9 / static_cast<double>(read));
      for (std::size_t i = 1; i < times.size(); ++i) {
        std::printf("  %lld: %.2f", static_cast<long long>(row_counts[i]),
                    bench::quartile(times[i]) / one);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}
