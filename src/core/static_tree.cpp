#include "specrt/static_tree.h"

#include <map>
#include <queue>
#include <utility>

#include "specrt/error.h"

namespace specrt {
namespace {

std::string text_of(const StaticTree::Path& path) {
  std::string text = "[";
  for (std::size_t i = 0; i < path.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(path[i]);
  }
  return text + "]";
}

}  // namespace

StaticTree::StaticTree(const std::vector<Path>& paths) {
  if (paths.empty()) throw InvalidArgument(expected_got("tree", "at least one path", "none"));
  std::map<Path, std::int32_t> places;  // -1: listed, not entered yet
  for (const Path& path : paths) {
    if (path.empty()) throw InvalidArgument(expected_got("tree", "paths of ranks", "an empty one"));
    for (const std::int32_t rank : path) {
      if (rank < 0 || rank >= kMostRanks) {
        throw InvalidArgument(expected_got(
            "tree", "ranks from 0 to " + std::to_string(kMostRanks - 1), text_of(path)));
      }
    }
    if (!places.emplace(path, -1).second) {
      throw InvalidArgument(expected_got("tree", "each path once", text_of(path) + " twice"));
    }
  }
  for (const Path& path : paths) {
    for (std::size_t length = 1; length <= path.size(); ++length) {
      const Path start(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(length));
      const auto found = places.find(start);
      if (found == places.end()) {
        throw InvalidArgument(
            expected_got("tree", "the parent " + text_of(start) + " of " + text_of(path), "none"));
      }
      if (found->second >= 0) continue;
      found->second = static_cast<std::int32_t>(nodes_.size());
      Node node;
      node.depth = static_cast<std::int32_t>(length);
      node.rank = start.back();
      if (length > 1) node.parent = places.at(Path(start.begin(), start.end() - 1));
      nodes_.push_back(node);
      if (widths_.size() < length) widths_.resize(length, 0);
      widths_[length - 1] = std::max(widths_[length - 1], node.rank + 1);
    }
  }
}

StaticTree StaticTree::chain(std::int32_t depth) {
  std::vector<Path> paths;
  for (std::int32_t d = 1; d <= depth; ++d) paths.emplace_back(static_cast<std::size_t>(d), 0);
  return StaticTree(paths);
}

StaticTree StaticTree::mc_sim_7b_63() {
  // As published, in the order in which the nodes are worth trying.
  return StaticTree(
      {{0},       {0, 0},    {1},       {0, 1},    {2},          {0, 0, 0}, {1, 0},    {0, 2},
       {3},       {0, 3},    {4},       {0, 4},    {2, 0},       {0, 5},    {0, 0, 1}, {5},
       {0, 6},    {6},       {0, 7},    {0, 1, 0}, {1, 1},       {7},       {0, 8},    {0, 0, 2},
       {3, 0},    {0, 9},    {8},       {9},       {1, 0, 0},    {0, 2, 0}, {1, 2},    {0, 0, 3},
       {4, 0},    {2, 1},    {0, 0, 4}, {0, 0, 5}, {0, 0, 0, 0}, {0, 1, 1}, {0, 0, 6}, {0, 3, 0},
       {5, 0},    {1, 3},    {0, 0, 7}, {0, 0, 8}, {0, 0, 9},    {6, 0},    {0, 4, 0}, {1, 4},
       {7, 0},    {0, 1, 2}, {2, 0, 0}, {3, 1},    {2, 2},       {8, 0},    {0, 5, 0}, {1, 5},
       {1, 0, 1}, {0, 2, 1}, {9, 0},    {0, 6, 0}, {0, 0, 0, 1}, {1, 6},    {0, 7, 0}});
}

StaticTree StaticTree::from_accuracies(const std::vector<std::vector<double>>& accuracies,
                                       std::int64_t nodes) {
  if (nodes < 1) throw InvalidArgument(expected_got("nodes", "at least 1", std::to_string(nodes)));
  for (const std::vector<double>& ranks : accuracies) {
    if (std::ssize(ranks) > kMostRanks) {
      throw InvalidArgument(expected_got("accuracies",
                                         "at most " + std::to_string(kMostRanks) + " a depth",
                                         std::to_string(ranks.size())));
    }
    for (const double value : ranks) {
      if (!(value >= 0.0 && value <= 1.0)) {
        throw InvalidArgument(
            expected_got("accuracies", "numbers from 0 to 1", std::to_string(value)));
      }
    }
  }
  struct Candidate {
    double accepted;
    Path path;
  };
  const auto worse = [](const Candidate& a, const Candidate& b) {
    if (a.accepted != b.accepted) return a.accepted < b.accepted;
    if (a.path.size() != b.path.size()) return a.path.size() > b.path.size();
    return a.path > b.path;
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(worse)> open(worse);
  const auto add_children = [&](double accepted, const Path& path) {
    if (path.size() >= accuracies.size()) return;
    const std::vector<double>& ranks = accuracies[path.size()];
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!(accepted * ranks[rank] > 0.0)) continue;
      Candidate child{accepted * ranks[rank], path};
      child.path.push_back(static_cast<std::int32_t>(rank));
      open.push(std::move(child));
    }
  };
  add_children(1.0, {});
  std::vector<Path> paths;
  while (!open.empty() && std::ssize(paths) < nodes) {
    const Candidate best = open.top();
    open.pop();
    paths.push_back(best.path);
    add_children(best.accepted, best.path);
  }
  return StaticTree(paths);
}

std::vector<StaticTree::Path> StaticTree::paths() const {
  std::vector<Path> paths;
  paths.reserve(nodes_.size());
  for (const Node& node : nodes_) {
    Path path;
    if (node.parent != DraftTree::kRoot) path = paths[static_cast<std::size_t>(node.parent)];
    path.push_back(node.rank);
    paths.push_back(std::move(path));
  }
  return paths;
}

StaticTree StaticTree::cut(std::int32_t depth) const {
  std::vector<Path> kept = paths();
  std::erase_if(kept, [&](const Path& path) { return std::ssize(path) > depth; });
  return StaticTree(kept);
}

}  // namespace specrt
