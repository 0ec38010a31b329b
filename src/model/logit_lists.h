#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/sampling_state.h"

namespace specrt {

/// What a sequence's parameters and history do to its logits, as a device reads it: a state, and
/// the lists that it points at once they are there.
struct LogitLists {
  cuda::SamplingState state;
  std::vector<cuda::SeenToken> seen;  ///< by id
  std::vector<cuda::TokenBias> biases;
  std::vector<std::uint32_t> allowed;
  std::vector<cuda::BadWord> words;
  std::vector<std::int32_t> word_tokens;
  std::vector<std::int32_t> tail;
  std::vector<std::int32_t> stops;

  void clear() {
    state = {};
    each([](auto& list) { list.clear(); });
  }

  /// That append() is asked for in packed().
  std::int64_t bytes() const {
    std::size_t sum = 0;
    each([&](const auto& list) { sum += aligned(list.size() * sizeof(list[0])); });
    return static_cast<std::int64_t>(sum);
  }
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

  /// The state with its lists' places, which append(from, bytes) says, having put them there.
  template <class Append>
  cuda::SamplingState packed(const Append& append) const {
    cuda::SamplingState out = state;
    const auto put = [&]<typename T>(const std::vector<T>& list, std::int32_t* count) -> const T* {
      if (count != nullptr) *count = static_cast<std::int32_t>(list.size());
      if (list.empty()) return nullptr;
      return reinterpret_cast<const T*>(append(list.data(), list.size() * sizeof(T)));
    };
    out.seen = put(seen, &out.seen_count);
    out.biases = put(biases, &out.bias_count);
    out.allowed = put(allowed, nullptr);
    out.words = put(words, &out.word_count);
    out.word_tokens = put(word_tokens, nullptr);
    out.tail = put(tail, &out.tail_count);
    out.stops = put(stops, &out.stop_count);
    return out;
  }

 private:
  template <class Visit>
  void each(const Visit& visit) {
    visit(seen), visit(biases), visit(allowed), visit(words);
    visit(word_tokens), visit(tail), visit(stops);
  }
  template <class Visit>
  void each(const Visit& visit) const {
    visit(seen), visit(biases), visit(allowed), visit(words);
    visit(word_tokens), visit(tail), visit(stops);
  }
};

}  // namespace specrt
