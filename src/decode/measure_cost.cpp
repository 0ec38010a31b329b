#include <algorithm>
#include <chrono>
#include <optional>
#include <unordered_set>

#include "specrt/decoder.h"
#include "specrt/error.h"

namespace specrt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPrompt = 8;
constexpr std::int64_t kOutput = 96;
constexpr int kSweeps = 3;  // of all sizes, if there is time
// Passes that have to come behind the sweep: of many sequences with their prompts, and three times
// of a drafter with a prompt, a first draft and one that counts.
constexpr int kLater = 2;
constexpr int kLaterOfDrafts = 9;
constexpr std::int64_t kManyRows = 64;  // beyond, a pass has to be worth its time
constexpr std::ptrdiff_t kFewestOfLine = 4;
// What shapes the staircase first, what fills it in later.
constexpr std::int64_t kRows[] = {1, 8,  32, 2,  16, 64, 4, 128, 17, 33,
                                  3, 12, 24, 48, 65, 96, 6, 256, 512};

/// Drafts as many nodes as it may, whatever they are.
class Bush final : public Drafter {
 public:
  explicit Bush(std::int64_t vocab_size) : vocab_(vocab_size) {}
  const std::string& name() const override { return name_; }
  void admit(SequenceId, std::span<const TokenId>, std::int64_t) override {}
  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      out[i].clear();
      for (std::int64_t node = 0; node < requests[i].max_nodes; ++node) {
        if (node / vocab_ >= requests[i].max_depth) break;
        out[i].add(static_cast<TokenId>(node % vocab_),
                   node < vocab_ ? DraftTree::kRoot : static_cast<std::int32_t>(node - vocab_));
      }
    }
  }
  void observe(SequenceId, std::span<const TokenId>) override {}
  void release(SequenceId) override {}
  MemoryUse memory() const override { return {}; }

 private:
  std::string name_ = "bush";
  std::int64_t vocab_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Sequences that serve for measuring, and the budget.
class Bench {
 public:
  Bench(Decoder& decoder, std::int64_t prompt, double seconds, int passes)
      : decoder_(decoder),
        prompt_(prompt),
        least_seconds_(seconds),
        least_passes_(passes),
        start_(Clock::now()) {}
  ~Bench() {
    clear();
    decoder_.clear_totals();
    decoder_.forget_drafts();  // of texts that say nothing
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// Whether there is, `later` passes aside that have to come yet.
  bool has_time(int later = 0) const {
    return passes_ + later < least_passes_ || spent() < least_seconds_;
  }
  /// How often what comes behind the sweep is looked at.
  int repeats() const { return spent() < least_seconds_ ? kSweeps : 1; }
  /// Whether a pass of so many seconds is worth its place.
  bool affords(double seconds) const { return spent() + 4.0 * seconds < least_seconds_; }

  /// `count` sequences whose prompts are in the cache. False where they do not fit.
  bool set(std::int64_t count, const std::shared_ptr<Drafter>& drafter) {
    if (drafter != drafter_) clear();
    drafter_ = drafter;
    while (std::ssize(ids_) > count) {
      decoder_.cancel(*ids_.begin());
      ids_.erase(ids_.begin());
    }
    SamplingParams params;
    params.max_tokens = std::min(kOutput, decoder_.max_model_len() - prompt_);
    params.speculation.policy = Policy::fixed;
    const std::vector<TokenId> text(static_cast<std::size_t>(prompt_), 0);
    while (std::ssize(ids_) < count) {
      if (!decoder_.can_add(prompt_, params.max_tokens)) return false;
      ids_.insert(decoder_.add(text, params, drafter));
    }
    while (prefilling() > 0) run(0);
    return std::ssize(ids_) == count;
  }

  /// One round in which each drafts so many nodes, or their prompts go on.
  RoundTimes run(std::int64_t nodes) {
    for (const Progress& one : decoder_.round(plan_fixed(decoder_, nodes))) {
      if (one.finish != Finish::none) ids_.erase(one.id);
    }
    ++passes_;
    return decoder_.last_times();
  }

 private:
  double spent() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  std::int64_t prefilling() const {
    const std::vector<SequenceState> states = decoder_.sequences();
    return std::count_if(states.begin(), states.end(),
                         [](const SequenceState& one) { return one.prompt_left > 0; });
  }
  void clear() {
    for (const SequenceId id : ids_) decoder_.cancel(id);
    ids_.clear();
  }

  Decoder& decoder_;
  std::int64_t prompt_;  // tokens
  double least_seconds_;
  int least_passes_;
  Clock::time_point start_;
  int passes_ = 0;
  std::shared_ptr<Drafter> drafter_;
  std::unordered_set<SequenceId> ids_;
};

double pass_seconds(const RoundTimes& times) { return times.verify_seconds + times.sample_seconds; }

struct Sample {
  std::int64_t rows = 0;
  std::vector<double> seconds;
};

// So many rows are bound by products, and cost alike. The line through them for which half of all
// pairs are steeper (Theil-Sen) takes no notice of a pass or two in which somebody else had the
// processor: they are too few to take a median of each.
void straighten(CostModel::Table& table) {
  const auto first = std::find_if(table.begin(), table.end(),
                                  [](const auto& entry) { return entry.first >= kManyRows; });
  if (table.end() - first < kFewestOfLine) return;
  std::vector<double> slopes;
  for (auto a = first; a != table.end(); ++a) {
    for (auto b = a + 1; b != table.end(); ++b) {
      slopes.push_back((b->second - a->second) / static_cast<double>(b->first - a->first));
    }
  }
  const double slope = std::max(0.0, median(std::move(slopes)));
  std::vector<double> starts;
  for (auto a = first; a != table.end(); ++a) {
    starts.push_back(a->second - slope * static_cast<double>(a->first));
  }
  const double start = median(std::move(starts));
  for (auto a = first; a != table.end(); ++a) {
    a->second = std::max(start + slope * static_cast<double>(a->first), 1e-9);
  }
}

CostModel::Table table_of(const std::vector<Sample>& samples) {
  CostModel::Table table;
  for (const Sample& one : samples) {
    if (!one.seconds.empty()) table.emplace_back(one.rows, median(one.seconds));
  }
  std::sort(table.begin(), table.end());
  return table;
}

// Seconds of drafting so deep for so many.
std::optional<double> draft_time(Bench& bench, const std::shared_ptr<Drafter>& drafter,
                                 std::int64_t count, std::int64_t nodes) {
  std::vector<double> seen;
  const int repeats = bench.repeats();
  for (int i = 0; i < repeats; ++i) {
    if (!bench.set(count, drafter)) return std::nullopt;
    if (i == 0) {
      bench.run(nodes);  // the first draft runs the prompt
      if (!bench.set(count, drafter)) return std::nullopt;
    }
    seen.push_back(bench.run(nodes).draft_seconds);
  }
  return median(seen);
}

}  // namespace

CostModel measure_cost(Decoder& decoder, std::shared_ptr<Drafter> drafter,
                       std::int64_t num_speculative_tokens, double seconds, int passes) {
  if (!decoder.idle()) {
    throw InvalidArgument("[measure_cost] expected an idle decoder, got one with sequences");
  }
  CostModel model = CostModel(decoder.cpu_isa());
  const std::int64_t limit = decoder.max_model_len();
  const std::int64_t prompt = std::min<std::int64_t>(kPrompt, limit / 4);
  if (prompt < 1) return model;  // no room for anything to measure
  Bench bench(decoder, prompt, seconds, passes);
  const auto bush = std::make_shared<Bush>(decoder.vocab_size());
  if (!bench.set(1, bush)) return model;
  bench.run(0);  // warms up

  const bool drafts = drafter != nullptr && drafter->step_cost(decoder.memory().weights) > 0.0;
  const int later = drafts ? kLater + kLaterOfDrafts : kLater;
  std::vector<Sample> samples;
  for (const std::int64_t rows : kRows) {
    if (rows <= decoder.max_rows()) samples.push_back({rows, {}});
  }
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (Sample& one : samples) {
      if (!bench.has_time(later)) break;
      const CostModel::Table table = table_of(samples);
      if (one.rows > kManyRows && !table.empty() &&
          !bench.affords(table.back().second * static_cast<double>(one.rows) /
                         static_cast<double>(table.back().first))) {
        continue;
      }
      if (!bench.set(1, bush)) break;
      one.seconds.push_back(pass_seconds(bench.run(one.rows - 1)));
    }
  }
  CostModel::Table table = table_of(samples);
  if (table.empty()) return model;
  straighten(table);
  model.set_pass(table, 0.0, 0.0);

  double per_sequence = 0.0;
  const std::int64_t many = std::min<std::int64_t>(8, decoder.max_batch_size());
  if (many > 1 && bench.set(many, bush)) {
    std::vector<double> seen;
    const int repeats = bench.repeats();
    for (int i = 0; i < repeats && bench.set(many, bush); ++i) {
      seen.push_back(pass_seconds(bench.run(0)));
    }
    per_sequence = std::max(
        0.0, (median(seen) - model.pass_seconds(many, 1, 0)) / static_cast<double>(many - 1));
  }
  // Reading context is too small a part of a pass to be told from noise in the time there is. One
  // row reads all weights, and a token of context is read like them; what passes take does the
  // rest.
  const double per_token = model.pass_seconds(1, 1, 0) *
                           static_cast<double>(decoder.context_bytes()) /
                           static_cast<double>(decoder.memory().weights);
  model.set_pass(std::move(table), per_sequence, per_token);

  // Drafters that cost next to nothing show what they take as they go.
  if (!drafts) return model;
  const std::int64_t deep = std::clamp<std::int64_t>(num_speculative_tokens, 1, 8);
  const std::optional<double> one = draft_time(bench, drafter, 1, 1);
  if (!one) return model;
  CostModel::Draft cost{0.0, *one, 0.0};
  if (deep > 1) {
    const std::optional<double> all = draft_time(bench, drafter, 1, deep);
    const std::optional<double> crowd =
        many > 1 ? draft_time(bench, drafter, many, deep) : std::nullopt;
    if (all) {
      if (crowd) {
        cost.sequence = std::max(0.0, (*crowd - *all) / static_cast<double>(deep * (many - 1)));
      }
      const double step = std::max(0.0, (*all - *one) / static_cast<double>(deep - 1));
      cost.step = std::max(0.0, step - cost.sequence);
      cost.call = std::max(0.0, *one - step);
    }
  }
  model.set_draft(drafter->name(), cost);
  return model;
}

}  // namespace specrt
