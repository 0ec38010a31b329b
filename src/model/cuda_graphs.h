#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device.h"

namespace specrt {

/// Graphs by what was captured in them, at most so many: the one that was not used for longest
/// gives way.
template <typename Key>
class CudaGraphs {
 public:
  static constexpr std::size_t kMost = 32;

  CudaGraphs() { graphs_.reserve(kMost); }

  /// Puts `work(stream)` on the stream: as a graph, captured the second time that it is asked for,
  /// since much comes once alone.
  template <typename Work>
  void run(const Key& key, cuda::Stream stream, const Work& work) {
    ++now_;
    for (Entry& entry : graphs_) {
      if (!(entry.key == key)) continue;
      entry.used = now_;
      if (!entry.graph.valid()) entry.graph = capture(stream, work);
      entry.graph.launch(stream);
      return;
    }
    work(stream);
    // Entered once it has run: what fails is not captured either.
    if (graphs_.size() < kMost) {
      graphs_.push_back({key, now_, {}});
      return;
    }
    Entry* oldest = &graphs_.front();
    for (Entry& entry : graphs_) {
      if (entry.used < oldest->used) oldest = &entry;
    }
    *oldest = {key, now_, {}};
  }

  std::size_t size() const { return graphs_.size(); }

 private:
  struct Entry {
    Key key;
    std::int64_t used = 0;
    cuda::Graph graph;
  };
  template <typename Work>
  static cuda::Graph capture(cuda::Stream stream, const Work& work) {
    cuda::begin_capture(stream);
    try {
      work(stream);
      return cuda::end_capture(stream);
    } catch (...) {
      cuda::abandon_capture(stream);
      throw;
    }
  }

  std::vector<Entry> graphs_;
  std::int64_t now_ = 0;
};

}  // namespace specrt
