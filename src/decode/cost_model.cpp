#include <algorithm>
#include <cmath>
#include <sstream>

#include "decode/row_cost.h"
#include "specrt/error.h"
#include "specrt/planner.h"

namespace specrt {
namespace {

constexpr double kGuess = 0.01;  // seconds of a pass of one row, until one is seen
constexpr std::int64_t kGuessedRows = 512;

void require(bool fine, const char* what, const char* expected, double got) {
  if (!fine) throw InvalidArgument(expected_got(what, expected, std::to_string(got)));
}

// Pools neighbours that fall until none does (isotonic regression, equal weights).
void make_rise(CostModel::Table& table) {
  struct Block {
    double sum = 0.0;
    std::size_t size = 0;
    double mean() const { return sum / static_cast<double>(size); }
  };
  std::vector<Block> blocks;
  for (const auto& [rows, seconds] : table) {
    blocks.push_back({seconds, 1});
    while (blocks.size() > 1 && blocks[blocks.size() - 2].mean() > blocks.back().mean()) {
      blocks[blocks.size() - 2].sum += blocks.back().sum;
      blocks[blocks.size() - 2].size += blocks.back().size;
      blocks.pop_back();
    }
  }
  std::size_t at = 0;
  for (const Block& block : blocks) {
    for (std::size_t i = 0; i < block.size; ++i) table[at++].second = block.mean();
  }
}

// Where `rows` lies: between entries `first` and first + 1, `part` of the way.
struct Place {
  std::size_t first = 0;
  double part = 0.0;
};

Place place_of(const CostModel::Table& table, std::int64_t rows) {
  if (table.size() < 2 || rows <= table.front().first) return {};
  if (rows >= table.back().first) return {table.size() - 2, 1.0};
  const auto above = std::find_if(table.begin() + 1, table.end() - 1,
                                  [rows](const auto& entry) { return entry.first >= rows; });
  const auto below = above - 1;
  return {
      static_cast<std::size_t>(below - table.begin()),
      static_cast<double>(rows - below->first) / static_cast<double>(above->first - below->first)};
}

// Beyond the last entry the last few have too much noise, and perhaps a stair, to say how it goes
// on: the line from a quarter of its rows does.
double beyond(const CostModel::Table& table, std::int64_t rows) {
  const auto& [last_rows, last_seconds] = table.back();
  if (rows <= last_rows || table.size() < 2) return 0.0;
  const auto from = std::find_if(table.rbegin() + 1, table.rend() - 1,
                                 [&](const auto& entry) { return entry.first * 4 <= last_rows; });
  return static_cast<double>(rows - last_rows) * (last_seconds - from->second) /
         static_cast<double>(last_rows - from->first);
}

double at_place(const CostModel::Table& table, const Place& place) {
  const double first = table[place.first].second;
  if (place.part == 0.0) return first;
  return first + place.part * (table[place.first + 1].second - first);
}

double seen_as(double seconds, double expected) {
  return std::clamp(std::log(seconds / expected), -CostModel::kMostSeen, CostModel::kMostSeen);
}

}  // namespace

CostModel::CostModel(CpuIsa isa) {
  const double row = row_cost_of(isa);
  table_ = {{1, kGuess}, {kGuessedRows, kGuess * (1.0 + row * (kGuessedRows - 1))}};
}

void CostModel::set_pass(Table table, double per_sequence, double per_token) {
  require(!table.empty(), "table", "at least one entry", 0.0);
  std::int64_t last = 0;
  for (const auto& [rows, seconds] : table) {
    require(rows > last, "rows", "rising numbers >= 1", static_cast<double>(rows));
    require(seconds > 0.0 && std::isfinite(seconds), "seconds", "finite numbers > 0", seconds);
    last = rows;
  }
  require(per_sequence >= 0.0 && std::isfinite(per_sequence), "per_sequence", "a number >= 0",
          per_sequence);
  require(per_token >= 0.0 && std::isfinite(per_token), "per_token", "a number >= 0", per_token);
  make_rise(table);
  table_ = std::move(table);
  per_sequence_ = per_sequence;
  per_token_ = per_token;
  scale_ = 1.0;
  measured_ = true;
  seen_ = true;
}

void CostModel::set_draft(const std::string& drafter, const Draft& draft) {
  for (const double part : {draft.call, draft.step, draft.sequence}) {
    require(part >= 0.0 && std::isfinite(part), "draft", "numbers >= 0", part);
  }
  drafts_.insert_or_assign(drafter, draft);
}

double CostModel::pass_seconds(std::int64_t rows, std::int64_t sequences,
                               std::int64_t context) const {
  const double others = static_cast<double>(std::max<std::int64_t>(0, sequences - 1));
  return scale_ * (at_place(table_, place_of(table_, rows)) + beyond(table_, rows) +
                   others * per_sequence_ + static_cast<double>(context) * per_token_);
}

CostModel::Draft CostModel::draft_of(const std::string& drafter, double step_share) const {
  const auto found = drafts_.find(drafter);
  if (found != drafts_.end()) return found->second;
  return {0.0, step_share * pass_seconds(1, 1, 0), 0.0};
}

double CostModel::draft_seconds(const std::string& drafter, double step_share, std::int64_t steps,
                                std::int64_t sequences) const {
  const Draft cost = draft_of(drafter, step_share);
  return cost.call +
         static_cast<double>(steps) * (cost.step + static_cast<double>(sequences) * cost.sequence);
}

void CostModel::observe_pass(std::int64_t rows, std::int64_t sequences, std::int64_t context,
                             double seconds) {
  const double expected = pass_seconds(rows, sequences, context);
  if (!(seconds > 0.0) || !(expected > 0.0)) return;
  if (!seen_) {  // of a guess only the shape is worth keeping
    scale_ *= seconds / expected;
    seen_ = true;
    return;
  }
  const double error = seen_as(seconds, expected);
  // What all passes have in common goes to the scale, what some do not to their entries: where
  // the same passes come over and over, nothing tells the two apart, and the scale is a better
  // guess.
  scale_ *= std::exp(kScaleRate * error);
  const Place place = place_of(table_, rows);
  table_[place.first].second *= std::exp(kShapeRate * (1.0 - place.part) * error);
  if (place.part > 0.0) {
    table_[place.first + 1].second *= std::exp(kShapeRate * place.part * error);
  }
  const double of_context = scale_ * static_cast<double>(context) * per_token_ / expected;
  per_token_ *= std::exp(kShapeRate * of_context * error);
}

void CostModel::observe_draft(const std::string& drafter, double step_share, std::int64_t steps,
                              std::int64_t sequences, double seconds) {
  if (!(seconds >= 0.0)) return;
  const auto found = drafts_.find(drafter);
  const auto many = static_cast<double>(std::max<std::int64_t>(1, steps));
  if (found == drafts_.end()) {
    // What it takes alone cannot be told apart yet: as step_share has it, what it takes is steps.
    const bool runs = step_share > 0.0 && steps > 0;
    set_draft(drafter, {runs ? 0.0 : seconds, runs ? seconds / many : 0.0, 0.0});
    return;
  }
  Draft& cost = found->second;
  const double expected = draft_seconds(drafter, step_share, steps, sequences);
  if (!(expected > 0.0) || !(seconds > 0.0)) {
    cost.call = seconds;
    return;
  }
  const double factor = std::exp(kScaleRate * seen_as(seconds, expected));
  cost.call *= factor;
  cost.step *= factor;
  cost.sequence *= factor;
}

std::string CostModel::text() const {
  std::ostringstream out;
  out.precision(9);
  out << "specrt-cost 1\n";
  for (const auto& [rows, seconds] : table_) {
    out << "pass " << rows << ' ' << scale_ * seconds << '\n';
  }
  out << "per_sequence " << scale_ * per_sequence_ << "\nper_token " << scale_ * per_token_ << '\n';
  for (const auto& [name, cost] : drafts_) {
    out << "draft " << cost.call << ' ' << cost.step << ' ' << cost.sequence << ' ' << name << '\n';
  }
  return out.str();
}

CostModel CostModel::parse(const std::string& text) {
  std::istringstream in(text);
  std::string line;
  CostModel model;
  Table table;
  double per_sequence = 0.0;
  double per_token = 0.0;
  const auto wrong = [&] {
    throw InvalidArgument(expected_got("cost model", "what CostModel::text() wrote", line));
  };
  if (!std::getline(in, line) || line != "specrt-cost 1") wrong();
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "pass") {
      std::int64_t rows = 0;
      double seconds = 0.0;
      words >> rows >> seconds;
      table.emplace_back(rows, seconds);
    } else if (kind == "per_sequence") {
      words >> per_sequence;
    } else if (kind == "per_token") {
      words >> per_token;
    } else if (kind == "draft") {
      Draft cost;
      std::string name;
      words >> cost.call >> cost.step >> cost.sequence;
      std::getline(words >> std::ws, name);
      if (name.empty()) wrong();
      model.set_draft(name, cost);
      continue;
    } else {
      wrong();
    }
    if (words.fail()) wrong();
  }
  model.set_pass(std::move(table), per_sequence, per_token);
  return model;
}

}  // namespace specrt
