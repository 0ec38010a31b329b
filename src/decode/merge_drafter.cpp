#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include "decode/acceptance.h"
#include "specrt/error.h"
#include "specrt/merge.h"

namespace specrt {
namespace {

constexpr std::size_t kMostParts = 32;  // bits of DraftTree::sources_of

/// Less than this is drafted before anything that costs: it is not weighed.
constexpr double kCheap = 0.005;

class MergeDrafter final : public Drafter {
 public:
  explicit MergeDrafter(const MergeOptions& options) : parts_(options.parts) {
    if (parts_.empty() || parts_.size() > kMostParts) {
      throw InvalidArgument(
          expected_got("parts", "1 to 32 drafters", std::to_string(parts_.size())));
    }
    if (options.target_bytes < 1) {
      throw InvalidArgument(
          expected_got("target_bytes", "at least 1", std::to_string(options.target_bytes)));
    }
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      if (parts_[p] == nullptr) throw InvalidArgument("[parts] expected drafters, got none");
      const auto same =
          std::count_if(parts_.begin(), parts_.begin() + static_cast<std::ptrdiff_t>(p),
                        [&](const auto& one) { return one == parts_[p]; });
      if (same > 0) throw InvalidArgument("[parts] expected each drafter once, got one twice");
      const auto named =
          std::count_if(parts_.begin(), parts_.begin() + static_cast<std::ptrdiff_t>(p),
                        [&](const auto& one) { return one->name() == parts_[p]->name(); });
      names_.push_back(parts_[p]->name());
      if (named > 0) names_.back().append("#").append(std::to_string(named + 1));
      costs_.push_back(parts_[p]->step_cost(options.target_bytes));
      if (!parts_[p]->features().any()) continue;
      if (reader_ != nullptr) {
        throw InvalidArgument("[parts] expected one that reads the target's hidden states, got " +
                              reader_->name() + " and " + parts_[p]->name());
      }
      reader_ = parts_[p].get();
    }
    order_.resize(parts_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [this](std::size_t a, std::size_t b) {
      return is_cheap(a) != is_cheap(b) ? is_cheap(a) : costs_[a] < costs_[b];
    });
    trees_.resize(parts_.size());
  }

  const std::string& name() const override { return name_; }

  void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) override {
    if (sequences_.contains(id)) {
      throw InvalidArgument(expected_got("sequence", "an id not in use", std::to_string(id)));
    }
    std::size_t done = 0;
    try {
      for (; done < parts_.size(); ++done) parts_[done]->admit(id, prompt, max_length);
      sequences_[id].parts.resize(parts_.size());
    } catch (...) {
      while (done > 0) parts_[--done]->release(id);
      throw;
    }
  }

  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Sequence& s = find(requests[i].id);
      s.draft.clear();
      s.merged.start(parts_.size());
      if (picks_anyway(requests[i]) || s.picked != nullptr) continue;
      s.picked = std::make_unique<SamplingParams>(*requests[i].sampling);
      s.picked->temperature = 0.0f;
      s.picked->verification = Verification::coupled;
    }
    for (const std::size_t part : order_) ask(part, requests);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Sequence& s = find(requests[i].id);
      choose(s, requests[i]);
      write(s, out[i]);
    }
  }

  void observe(SequenceId id, std::span<const TokenId> committed) override {
    Sequence& s = find(id);
    if (s.asked) credit(s, committed);
    s.asked = false;
    for (const auto& part : parts_) part->observe(id, committed);
  }

  const TargetFeatures& features() const override {
    return reader_ != nullptr ? reader_->features() : Drafter::features();
  }
  bool wants_features(SequenceId id) const override {
    return reader_ != nullptr && reader_->wants_features(id);
  }
  std::int64_t known_positions(SequenceId id) const override {
    return reader_ != nullptr ? reader_->known_positions(id) : Drafter::known_positions(id);
  }
  void observe_features(std::span<const ObservedFeatures> batch) override {
    if (reader_ != nullptr) reader_->observe_features(batch);
  }

  void finished(SequenceId id, std::span<const TokenId> tokens) override {
    for (const auto& part : parts_) part->finished(id, tokens);
  }

  bool suspend(SequenceId id) override {
    Sequence& s = find(id);
    s.asked = false;
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      if (s.parts[p].place == Place::here) {
        s.parts[p].place = Place::gone;  // also where it throws
        if (parts_[p]->suspend(id)) s.parts[p].place = Place::kept;
      }
    }
    return true;
  }

  void resume(SequenceId id, std::span<const TokenId> tokens, std::int64_t max_length) override {
    Sequence& s = find(id);
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      if (s.parts[p].place == Place::kept) parts_[p]->resume(id, tokens, max_length);
      if (s.parts[p].place == Place::gone) parts_[p]->admit(id, tokens, max_length);
      s.parts[p].place = Place::here;
    }
  }

  void release(SequenceId id) override {
    std::exception_ptr failed;
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      if (find(id).parts[p].place == Place::gone) continue;
      try {
        parts_[p]->release(id);
      } catch (...) {
        failed = std::current_exception();
      }
    }
    sequences_.erase(id);
    if (failed != nullptr) std::rethrow_exception(failed);
  }

  MemoryUse memory() const override {
    MemoryUse use;
    for (const auto& part : parts_) {
      const MemoryUse own = part->memory();
      use.weights += own.weights;
      use.kv_cache += own.kv_cache;
      use.workspace += own.workspace;
      use.other += own.other;
    }
    for (const auto& [id, s] : sequences_) {
      use.other += static_cast<std::int64_t>(sizeof(Sequence) + s.parts.capacity() * sizeof(Part));
    }
    return use;
  }

 private:
  // A union of trees, with what each part thinks of each node.
  struct Merged {
    DraftTree tree;
    std::vector<std::uint32_t> sources;  // of each node, a bit a part
    std::vector<float> confidence;       // of each node, one a part
    std::vector<double> accepted;        // of each node's path
    std::size_t width = 0;

    void start(std::size_t parts) {
      tree.clear();
      sources.clear();
      confidence.clear();
      accepted.clear();
      width = parts;
    }
    float of(std::size_t node, std::size_t part) const { return confidence[node * width + part]; }
  };
  enum class Place : std::uint8_t { here, kept, gone };  // the latter two while suspended
  struct Part {
    Brake brake;
    Calibration calibration;
    Place place = Place::here;
  };
  struct Sequence {
    std::vector<Part> parts;
    Merged merged;                           // what was found
    DraftTree draft;                         // what of it was proposed
    std::vector<std::int32_t> origin;        // of each node of the draft, in `merged`
    bool asked = false;                      // a draft waits for its outcome
    std::unique_ptr<SamplingParams> picked;  // what parts are told where they may not sample
  };

  bool is_cheap(std::size_t part) const { return costs_[part] < kCheap; }

  static bool picks_anyway(const DraftRequest& request) {
    return request.sampling == nullptr || request.sampling->greedy() ||
           request.sampling->verification == Verification::coupled;
  }

  Sequence& find(SequenceId id) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) {
      throw InvalidArgument(expected_got("sequence", "an admitted id", std::to_string(id)));
    }
    return found->second;
  }

  // Drafts of one part, for all that it is worth asking for, into the unions.
  void ask(std::size_t part, std::span<const DraftRequest> requests) {
    asked_.clear();
    for (const DraftRequest& request : requests) {
      Sequence& s = find(request.id);
      DraftRequest own = request;
      if (!picks_anyway(request)) own.sampling = s.picked.get();
      if (!is_cheap(part)) own.max_depth = worth(s, part, request);
      if (own.max_nodes > 0 && own.max_depth > 0) asked_.push_back(own);
    }
    if (asked_.empty()) return;
    std::vector<DraftTree>& trees = trees_[part];
    if (trees.size() < asked_.size()) trees.resize(asked_.size());
    for (std::size_t i = 0; i < asked_.size(); ++i) trees[i].clear();
    try {
      parts_[part]->propose(asked_, std::span(trees).first(asked_.size()));
      for (std::size_t i = 0; i < asked_.size(); ++i) {
        if (trees[i].draw() != Draw::deterministic && !trees[i].empty()) {
          throw InvalidArgument(expected_got("draft", "picked tokens in a merge", "sampled ones"));
        }
        trees[i].prune(asked_[i].max_depth, asked_[i].max_nodes);
        add(find(asked_[i].id), part, trees[i]);
      }
    } catch (const std::exception& error) {
      throw InvalidArgument(std::string(names_[part]).append(": ").append(error.what()));
    }
  }

  static void add(Sequence& s, std::size_t part, const DraftTree& tree) {
    Merged& m = s.merged;
    std::vector<std::int32_t>& place = s.origin;  // of the part's nodes, for now
    place.clear();
    for (std::size_t i = 0; i < tree.size(); ++i) {
      const std::int32_t above = tree.parents()[i];
      const std::int32_t parent = above < 0 ? above : place[static_cast<std::size_t>(above)];
      std::int32_t node = m.tree.child(parent, tree.tokens()[i]);
      if (node < 0) {
        node = m.tree.add(tree.tokens()[i], parent);
        m.sources.push_back(0);
        m.confidence.resize(m.confidence.size() + m.width, 0.0f);
      }
      const auto at = static_cast<std::size_t>(node);
      m.sources[at] |= 1u << part;
      m.confidence[at * m.width + part] = std::min(1.0f, std::exp(tree.log_probs()[i]));
      place.push_back(node);
    }
  }

  // Each node's chance of being reached and accepted: of several sources the most hopeful one's
  // word for it; siblings exclude each other.
  void estimate(Sequence& s) {
    Merged& m = s.merged;
    const std::size_t size = m.tree.size();
    m.accepted.assign(size, 0.0);
    sums_.assign(size + 1, 0.0);
    for (std::size_t i = 0; i < size; ++i) {
      for (std::uint32_t left = m.sources[i]; left != 0; left &= left - 1) {
        const auto part = static_cast<std::size_t>(std::countr_zero(left));
        const Part& one = s.parts[part];
        m.accepted[i] = std::max(
            m.accepted[i], one.calibration.acceptance(
                               m.of(i, part), one.brake.acceptance().alpha(m.tree.depths()[i])));
      }
      sums_[static_cast<std::size_t>(m.tree.parents()[i] + 1)] += m.accepted[i];
    }
    for (std::size_t i = 0; i < size; ++i) {
      const std::int32_t parent = m.tree.parents()[i];
      m.accepted[i] /= std::max(1.0, sums_[static_cast<std::size_t>(parent + 1)]);
      if (parent >= 0) m.accepted[i] *= m.accepted[static_cast<std::size_t>(parent)];
    }
  }

  // The likeliest `count` nodes, parents among them; of equals the shallow ones, as they were
  // found.
  void rank(const Merged& m, std::int64_t count) {
    ranked_.resize(m.tree.size());
    std::iota(ranked_.begin(), ranked_.end(), 0);
    const auto kept =
        static_cast<std::size_t>(std::min(count, static_cast<std::int64_t>(ranked_.size())));
    std::partial_sort(ranked_.begin(), ranked_.begin() + static_cast<std::ptrdiff_t>(kept),
                      ranked_.end(), [&](std::int32_t a, std::int32_t b) {
                        const double x = m.accepted[static_cast<std::size_t>(a)];
                        const double y = m.accepted[static_cast<std::size_t>(b)];
                        if (x != y) return x > y;
                        const std::int32_t p = m.tree.depths()[static_cast<std::size_t>(a)];
                        const std::int32_t q = m.tree.depths()[static_cast<std::size_t>(b)];
                        return p != q ? p < q : a < b;
                      });
    ranked_.resize(kept);
  }

  // How deep a part that costs should draft: for what it may accept beyond what the others fill the
  // budget with, depth by depth, against its cost.
  std::int64_t worth(Sequence& s, std::size_t part, const DraftRequest& request) {
    const Brake& brake = s.parts[part].brake;
    const std::int64_t most =
        std::min({request.max_depth, brake.limit(request.max_nodes, {0.0, costs_[part]}),
                  Acceptance::kDepths});
    if (most <= 0) return 0;
    estimate(s);
    rank(s.merged, request.max_nodes);
    filled_.assign(static_cast<std::size_t>(most), 0.0);
    double speed = 1.0;
    for (const std::int32_t node : ranked_) {
      const auto at = static_cast<std::size_t>(node);
      speed += s.merged.accepted[at];
      const auto depth = static_cast<std::size_t>(s.merged.tree.depths()[at]);
      if (depth <= filled_.size()) filled_[depth - 1] += s.merged.accepted[at];
    }
    const double without = speed;
    double best = speed;
    const auto at_depth = [&](const auto& visit) {
      double reached = 1.0;
      double tokens = without;
      for (std::int64_t d = 1; d <= most; ++d) {
        reached *= brake.acceptance().alpha(d);
        tokens += std::max(0.0, reached - filled_[static_cast<std::size_t>(d) - 1]);
        visit(d, tokens / (1.0 + static_cast<double>(d) * costs_[part]));
      }
    };
    at_depth([&](std::int64_t, double one) { best = std::max(best, one); });
    std::int64_t chosen = 0;
    at_depth([&](std::int64_t d, double one) {
      if (one >= Brake::kNearBest * best) chosen = d;
    });
    return chosen;
  }

  void choose(Sequence& s, const DraftRequest& request) {
    estimate(s);
    const bool chain =
        !picks_anyway(request) && request.sampling->verification == Verification::block;
    rank(s.merged, chain ? std::ssize(s.merged.tree.tokens()) : request.max_nodes);
    if (chain) {  // what continues the likeliest node so far, the first of which is the likeliest
      std::int32_t last = DraftTree::kRoot;
      std::erase_if(ranked_, [&](std::int32_t node) {
        if (s.merged.tree.parents()[static_cast<std::size_t>(node)] != last) return true;
        last = node;
        return false;
      });
      if (std::ssize(ranked_) > request.max_nodes) {
        ranked_.resize(static_cast<std::size_t>(request.max_nodes));
      }
    }
    std::sort(ranked_.begin(), ranked_.end());
    s.origin.clear();
    places_.assign(s.merged.tree.size(), DraftTree::kRoot);
    s.draft.clear();
    for (const std::int32_t node : ranked_) {
      const auto at = static_cast<std::size_t>(node);
      const std::int32_t above = s.merged.tree.parents()[at];
      const std::int32_t parent = above < 0 ? above : places_[static_cast<std::size_t>(above)];
      const double reached = above < 0 ? 1.0 : s.merged.accepted[static_cast<std::size_t>(above)];
      places_[at] = s.draft.add(s.merged.tree.tokens()[at], parent,
                                static_cast<float>(std::log(std::max(
                                    s.merged.accepted[at] / std::max(reached, 1e-30), 1e-30))));
      s.origin.push_back(node);
    }
    s.asked = true;
  }

  void write(const Sequence& s, DraftTree& out) const {
    out.clear();
    out.set_source(name_);
    out.set_sources(names_);
    for (std::size_t i = 0; i < s.draft.size(); ++i) {
      const std::int32_t node =
          out.add(s.draft.tokens()[i], s.draft.parents()[i], s.draft.log_probs()[i]);
      out.set_sources_of(node, s.merged.sources[static_cast<std::size_t>(s.origin[i])]);
    }
  }

  // What was committed decides each node whose parent is on its path, for all that proposed it.
  void credit(Sequence& s, std::span<const TokenId> committed) {
    const DraftTree& draft = s.draft;
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      const std::uint32_t bit = 1u << part;
      const auto has = [&](std::size_t node) {
        return (s.merged.sources[static_cast<std::size_t>(s.origin[node])] & bit) != 0;
      };
      std::int64_t nodes = 0;
      std::int64_t depth = 0;
      for (std::size_t i = 0; i < draft.size(); ++i) {
        if (!has(i)) continue;
        ++nodes;
        depth = std::max(depth, static_cast<std::int64_t>(draft.depths()[i]));
      }
      std::int32_t at = DraftTree::kRoot;
      std::int64_t accepted = 0;
      bool rejected = false;
      for (const TokenId token : committed) {
        std::int32_t next = -2;
        bool decided = false;
        for (std::size_t i = static_cast<std::size_t>(at + 1); i < draft.size(); ++i) {
          if (draft.parents()[i] != at || !has(i)) continue;
          decided = true;
          const bool right = draft.tokens()[i] == token;
          if (right) next = static_cast<std::int32_t>(i);
          s.parts[part].calibration.observe(
              s.merged.of(static_cast<std::size_t>(s.origin[i]), part), right);
        }
        if (next < 0) {
          rejected = decided;
          break;
        }
        at = next;
        ++accepted;
      }
      s.parts[part].brake.observe(nodes, depth, accepted, rejected, true);
    }
  }

  const std::string name_ = "merge";
  const std::vector<std::shared_ptr<Drafter>> parts_;
  Drafter* reader_ = nullptr;  // the part that reads the target's hidden states, or none
  std::vector<std::string> names_;
  std::vector<double> costs_;
  std::vector<std::size_t> order_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  // Scratch of a call.
  std::vector<DraftRequest> asked_;
  std::vector<std::vector<DraftTree>> trees_;
  std::vector<double> sums_;
  std::vector<double> filled_;
  std::vector<std::int32_t> ranked_;
  std::vector<std::int32_t> places_;
};

}  // namespace

std::shared_ptr<Drafter> make_merge_drafter(const MergeOptions& options) {
  return std::make_shared<MergeDrafter>(options);
}

}  // namespace specrt
