// From logits to tokens on the device, against what the CPU's LogitsState and Chooser make of the
// same rows, and the walk over drafts against the CPU's.

#include <cmath>
#include <limits>

#include "core/philox.h"
#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "decode/logits_state.h"
#include "decode/verify.h"
#include "kernels/choose.h"
#include "kernels/process_logits.h"
#include "kernels/verify.h"
#include "support.h"

namespace {

using namespace cuda_test;
using namespace specrt::cuda;
using specrt::SamplingParams;
using specrt::TokenId;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Sequence {
  SamplingParams params;
  std::vector<TokenId> prompt, output;
  std::vector<std::int32_t> tokens, parents;  // of its draft
  std::int32_t limit = 100;
};

// Sequences laid out as the device has them, with all that they point at.
struct Batch {
  std::int64_t vocab;
  std::int64_t most_nodes = 1;
  std::vector<Sequence> sequences;
  std::vector<SamplingState> states;
  std::vector<LogitRow> rows;
  std::vector<std::vector<TokenId>> histories;  // of each row: output and path
  std::vector<std::int32_t> tokens, parents;
  std::vector<std::vector<SeenToken>> seen;
  std::vector<std::vector<TokenBias>> biases;
  std::vector<std::vector<std::uint32_t>> allowed;
  std::vector<std::vector<BadWord>> words;
  std::vector<std::vector<std::int32_t>> word_tokens, tails, stops;
  Floats logits, processed;
  std::int64_t stride;

  Batch(std::int64_t size, std::vector<Sequence> all) : vocab(size), sequences(std::move(all)) {
    stride = vocab + 3;
    for (const Sequence& s : sequences) {
      most_nodes = std::max<std::int64_t>(most_nodes, std::ssize(s.tokens));
    }
    const std::size_t count = sequences.size();
    seen.resize(count);
    biases.resize(count);
    allowed.resize(count);
    words.resize(count);
    word_tokens.resize(count);
    tails.resize(count);
    stops.resize(count);
    for (std::size_t i = 0; i < count; ++i) add(i);
    logits = random_floats(rows.size() * stride, 17, 3.0f);
    // Many equal logits, as low precisions have them.
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (i / stride % 2 == 1) logits[i] = std::round(logits[i] * 2.0f) / 2.0f;
    }
    processed.assign(logits.size(), NAN);
  }

  void add(std::size_t at) {
    const Sequence& s = sequences[at];
    const SamplingParams& p = s.params;
    SamplingState state;
    state.repetition = static_cast<float>(p.repetition_penalty);
    state.frequency = static_cast<float>(p.frequency_penalty);
    state.presence = static_cast<float>(p.presence_penalty);
    state.penalties =
        p.repetition_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0;
    state.neutral = !state.penalties && p.logit_bias.empty() && p.allowed_token_ids.empty() &&
                    p.bad_words.empty() && p.min_tokens == 0;
    std::vector<TokenId> all = s.prompt;
    all.insert(all.end(), s.output.begin(), s.output.end());
    for (TokenId id = 0; id < vocab; ++id) {
      const auto count = std::count(s.output.begin(), s.output.end(), id);
      if (std::count(all.begin(), all.end(), id) > 0) {
        seen[at].push_back({id, static_cast<std::int32_t>(count)});
      }
    }
    for (const auto& [id, bias] : p.logit_bias) biases[at].push_back({id, bias});
    if (!p.allowed_token_ids.empty()) {
      allowed[at].assign((vocab + 31) / 32, 0);
      for (const TokenId id : p.allowed_token_ids) allowed[at][id / 32] |= 1u << (id % 32);
      state.allowed = allowed[at].data();
    }
    std::size_t longest = 0;
    for (const auto& word : p.bad_words) {
      words[at].push_back({static_cast<std::int32_t>(word_tokens[at].size()),
                           static_cast<std::int32_t>(word.size())});
      word_tokens[at].insert(word_tokens[at].end(), word.begin(), word.end());
      longest = std::max(longest, word.size());
    }
    tails[at].assign(all.end() - std::min(longest, all.size()), all.end());
    stops[at].assign(p.stop_token_ids.begin(), p.stop_token_ids.end());
    state.seen = seen[at].data();
    state.seen_count = static_cast<std::int32_t>(seen[at].size());
    state.biases = biases[at].data();
    state.bias_count = static_cast<std::int32_t>(biases[at].size());
    state.words = words[at].data();
    state.word_count = static_cast<std::int32_t>(words[at].size());
    state.word_tokens = word_tokens[at].data();
    state.tail = tails[at].data();
    state.tail_count = static_cast<std::int32_t>(tails[at].size());
    state.generated = static_cast<std::int32_t>(s.output.size());
    state.min_tokens = static_cast<std::int32_t>(p.min_tokens);
    state.stops = stops[at].data();
    state.stop_count = static_cast<std::int32_t>(stops[at].size());
    if (!p.greedy()) {
      state.temperature = static_cast<float>(p.temperature);
      state.inv_temperature = static_cast<float>(1.0 / p.temperature);
    }
    state.top_k = static_cast<std::int32_t>(p.top_k);
    state.top_p = p.top_p;
    state.min_p = p.min_p;
    state.seed = p.seed;
    state.sample_index = p.sample_index;
    state.limit = s.limit;
    state.root_row = static_cast<std::int32_t>(rows.size());
    state.nodes = static_cast<std::int32_t>(s.tokens.size());
    states.push_back(state);
    for (int node = -1; node < static_cast<int>(s.tokens.size()); ++node) {
      std::vector<TokenId> path;
      for (int n = node; n >= 0; n = s.parents[n]) path.insert(path.begin(), s.tokens[n]);
      const auto position = static_cast<std::int32_t>(all.size() + path.size());
      rows.push_back({static_cast<std::int32_t>(at), node, position, -1});
      std::vector<TokenId> history = s.output;
      history.insert(history.end(), path.begin(), path.end());
      histories.push_back(history);
    }
    tokens.resize((at + 1) * most_nodes, -5);
    parents.resize((at + 1) * most_nodes, -5);
    std::copy(s.tokens.begin(), s.tokens.end(), tokens.begin() + at * most_nodes);
    std::copy(s.parents.begin(), s.parents.end(), parents.begin() + at * most_nodes);
  }

  DraftTrees trees() const { return {tokens.data(), parents.data(), most_nodes}; }

  struct Choices {
    std::vector<std::int32_t> tokens;
    Floats logprobs;
  };
  Choices choose(Order order) {
    ProcessArgs process;
    process.logits = logits.data();
    process.processed = processed.data();
    process.stride = stride;
    process.vocab = vocab;
    process.rows = rows.data();
    process.states = states.data();
    process.trees = trees();
    const auto count = static_cast<std::int64_t>(rows.size());
    run_grid<ProcessLogits>({count}, process, order);
    const std::int64_t chunks = chunks_of(vocab);
    std::vector<ChunkTop> tops(count * chunks);
    std::vector<ChunkShare> shares(count * chunks);
    std::vector<std::int32_t> found(count * vocab, -1);
    Choices out{std::vector<std::int32_t>(count, -99), Floats(count, NAN)};
    ChooseArgs args;
    args.logits = logits.data();
    args.processed = processed.data();
    args.stride = stride;
    args.vocab = vocab;
    args.chunks = chunks;
    args.rows = rows.data();
    args.states = states.data();
    args.tops = tops.data();
    args.shares = shares.data();
    args.found = found.data();
    args.choices = out.tokens.data();
    args.logprobs = out.logprobs.data();
    run_grid<FindTops>({chunks, count}, args, order);
    run_grid<Weigh>({chunks, count}, args, order);
    run_grid<Choose>({count}, args, order);
    return out;
  }

  std::span<const float> row(std::size_t r) const {
    return {logits.data() + r * stride, static_cast<std::size_t>(vocab)};
  }
};

const specrt::cpu::Kernels& kernels() { return specrt::cpu::scalar_kernels(); }

void check_against_cpu(Batch& batch) {
  const specrt::cpu::FpMode mode;
  specrt::Chooser chooser(kernels(), batch.vocab);
  const Batch::Choices got = batch.choose(Order::forward);
  for (std::size_t r = 0; r < batch.rows.size(); ++r) {
    const Sequence& s = batch.sequences[batch.rows[r].sequence];
    specrt::LogitsState state(s.params, s.prompt, batch.vocab, nullptr);
    for (const TokenId token : batch.histories[r]) state.push(token);
    const auto processed = chooser.processed(batch.row(r), state, nullptr);
    if (!state.neutral()) {
      const Floats device(batch.processed.begin() + r * batch.stride,
                          batch.processed.begin() + r * batch.stride + batch.vocab);
      CHECK(same_bits(device, Floats(processed.begin(), processed.end())));
    }
    const TokenId want = chooser.choose(processed, s.params, batch.rows[r].position);
    CHECK_EQ(got.tokens[r], want);
    CHECK_NEAR(got.logprobs[r], chooser.logprob(batch.row(r), want), 2e-6);
  }
  const Batch::Choices again = batch.choose(Order::shuffled);
  CHECK(again.tokens == got.tokens);
  CHECK(same_bits(again.logprobs, got.logprobs));
}

SamplingParams sampled(double temperature, std::uint64_t seed) {
  SamplingParams p;
  p.temperature = temperature;
  p.seed = seed;
  return p;
}

Sequence plain(const SamplingParams& p) { return {p, {1, 2, 3, 5}, {2, 4}, {}, {}}; }

TEST(cuda_choice_is_the_cpus) {
  for (const std::int64_t vocab : {11, 4097}) {
    std::vector<Sequence> all = {plain({}), plain(sampled(0.7, 1)), plain(sampled(1.0, 2)),
                                 plain(sampled(1.9, 3))};
    all.back().params.sample_index = 7;
    Batch batch(vocab, all);
    check_against_cpu(batch);
  }
}

TEST(cuda_filters_are_the_cpus) {
  std::vector<Sequence> all;
  for (std::uint64_t seed = 0; seed < 6; seed += 2) {
    for (int which = 0; which < 7; ++which) {
      SamplingParams p = sampled(which % 2 == 0 ? 1.0 : 2.5, seed);
      if (which == 0 || which == 3 || which == 6) p.top_k = 1 + 9 * static_cast<int>(seed);
      if (which == 1 || which == 3 || which == 5) p.top_p = 0.15 + 0.16 * static_cast<double>(seed);
      if (which == 2 || which == 5 || which == 6) p.min_p = 0.01 + 0.1 * static_cast<double>(seed);
      if (which == 4) p.top_k = 590;
      all.push_back(plain(p));
    }
  }
  Batch batch(600, all);
  check_against_cpu(batch);
}

TEST(cuda_filters_keep_the_lower_of_equals) {
  std::vector<Sequence> all;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SamplingParams p = sampled(1.0, seed);
    if (seed % 2 == 0) p.top_k = 3;
    if (seed % 2 == 1) p.top_p = 0.26;
    all.push_back(plain(p));
  }
  Batch batch(20, all);
  std::fill(batch.logits.begin(), batch.logits.end(), 1.5f);
  check_against_cpu(batch);
  std::vector<int> hits(20);
  const auto choices = batch.choose(Order::forward).tokens;
  for (std::size_t r = 0; r < choices.size(); ++r) {
    ++hits[choices[r]];
    CHECK(choices[r] < (r % 2 == 0 ? 3 : 6));
  }
  CHECK(hits[0] > 0 && hits[1] + hits[2] > 0);
}

// Every field at once and one by one, along the paths of trees.
TEST(cuda_processing_is_the_cpus) {
  std::vector<Sequence> all;
  for (int which = 0; which < 8; ++which) {
    SamplingParams p = which % 2 == 0 ? SamplingParams{} : sampled(0.9, which);
    const bool every = which == 7;
    if (which == 0 || every) p.repetition_penalty = 1.7;
    if (which == 1 || every) p.frequency_penalty = 0.6;
    if (which == 2 || every) p.presence_penalty = 1.1;
    if (which == 3 || every) p.logit_bias = {{7, 4.0f}, {2, -3.0f}, {7, 1.0f}};
    if (which == 4 || every) {
      for (TokenId id = 1; id < 97; id += 3) p.allowed_token_ids.push_back(id);
    }
    if (which == 5 || every) p.bad_words = {{4, 13}, {40}, {13, 2, 9}, {3, 5, 2, 4, 8}};
    if (which == 6 || every) p.min_tokens = 4;
    p.stop_token_ids = {22, 61};
    Sequence s = plain(p);
    s.tokens = {13, 4, 2, 13, 9, 2};
    s.parents = {-1, -1, 0, 1, 2, 3};
    all.push_back(s);
  }
  Batch batch(97, all);
  check_against_cpu(batch);
}

TEST(cuda_rows_without_a_choice_say_why) {
  SamplingParams only;
  only.allowed_token_ids = {3};
  Batch batch(50, {plain({}), plain(sampled(1.0, 1)), plain(only), plain({}), plain(only)});
  batch.logits[0 * batch.stride + 20] = NAN;
  batch.logits[1 * batch.stride + 49] = kInfinity;
  batch.logits[2 * batch.stride + 3] = -kInfinity;
  std::fill_n(batch.logits.begin() + 3 * batch.stride, 50, -kInfinity);
  const auto got = batch.choose(Order::forward).tokens;
  CHECK_EQ(got[0], kNotFinite);
  CHECK_EQ(got[1], kNotFinite);
  CHECK_EQ(got[2], kAllMasked);
  CHECK_EQ(got[3], kNotFinite);
  CHECK_EQ(got[4], 3);
}

TEST(cuda_padding_rows_are_left_alone) {
  Batch batch(50, {plain({}), plain(sampled(1.0, 1))});
  const auto want = batch.choose(Order::forward).tokens;
  batch.rows[0].sequence = -1;
  const auto got = batch.choose(Order::forward).tokens;
  CHECK_EQ(got[0], -99);
  CHECK_EQ(got[1], want[1]);
}

TEST(cuda_noise_is_the_cores) {
  SamplingState state;
  state.seed = 0x123456789ABCDEF0u;
  state.sample_index = 3;
  for (const std::int64_t first : {0, 4, 131068}) {
    const Noise noise(state, 77, true, first);
    for (int i = 0; i < 4; ++i) {
      const auto id = static_cast<std::uint32_t>(first + i);
      CHECK_EQ(noise.words[i], specrt::noise_bits(state.seed, 3, 77, 0, id));
      CHECK_EQ(choice_noise(state, 77, static_cast<int>(id)), noise.words[i]);
    }
  }
}

// Random trees, many of whose nodes carry what the target chooses, so that walks go deep; a step of
// the CPU's walk for a step of the device's.
TEST(cuda_walk_is_the_cpus) {
  constexpr int kVocab = 5;
  std::mt19937 engine(11);
  std::vector<Sequence> all;
  for (int i = 0; i < 30; ++i) {
    SamplingParams p = i % 2 == 0 ? sampled(1.0, i) : SamplingParams{};
    if (i % 5 == 1) p.stop_token_ids = {3, 1};
    Sequence s = plain(p);
    const int nodes = static_cast<int>(engine() % 16);
    for (int n = 0; n < nodes; ++n) {
      // Long paths with branches; siblings differ.
      const int last = static_cast<int>(s.tokens.size()) - 1;
      const bool on = engine() % 3 > 0;
      const int parent = on ? last : static_cast<int>(engine() % (last + 2)) - 1;
      const int token = static_cast<int>(engine() % kVocab);
      bool taken = false;
      for (int m = 0; m < std::ssize(s.tokens); ++m) {
        taken = taken || (s.parents[m] == parent && s.tokens[m] == token);
      }
      if (taken) continue;
      s.tokens.push_back(token);
      s.parents.push_back(parent);
    }
    s.limit = i % 7 == 0 ? 2 : 100;
    all.push_back(s);
  }
  Batch batch(kVocab, all);
  Batch::Choices choices = batch.choose(Order::forward);
  choices.tokens[batch.states[8].root_row] = kAllMasked;
  // Choices do not depend on the draft's tokens here, so those can be put in afterwards.
  for (std::size_t i = 0; i < all.size(); ++i) {
    Sequence& s = all[i];
    for (int n = 0; n < std::ssize(s.tokens); ++n) {
      const int choice = choices.tokens[batch.states[i].root_row + 1 + s.parents[n]];
      bool taken = choice < 0 || engine() % 4 == 0;
      for (int m = 0; m < std::ssize(s.tokens); ++m) {
        taken = taken || (s.parents[m] == s.parents[n] && s.tokens[m] == choice);
      }
      if (!taken) s.tokens[n] = choice;
      batch.tokens[i * batch.most_nodes + n] = s.tokens[n];
    }
  }
  const auto count = static_cast<std::int64_t>(all.size());
  const std::int64_t most = batch.most_nodes;
  std::vector<std::int32_t> verdicts(count * Verdict::size(most)), path(count * most),
      lengths(count);
  VerifyArgs args;
  args.states = batch.states.data();
  args.trees = batch.trees();
  args.choices = choices.tokens.data();
  args.logprobs = choices.logprobs.data();
  args.verdicts = verdicts.data();
  args.path = path.data();
  args.path_length = lengths.data();
  run_in_all_orders<Verify>({count}, args, verdicts);
  std::size_t deepest = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::int32_t* verdict = verdicts.data() + i * Verdict::size(most);
    if (i == 8) {
      CHECK_EQ(verdict[0], static_cast<int>(Walked::failed));
      CHECK_EQ(verdict[3], kAllMasked);
      continue;
    }
    const specrt::DraftTree tree(all[i].tokens, all[i].parents);
    specrt::TreeWalk walk;
    walk.start(all[i].limit);
    std::vector<float> logprobs;
    while (walk.running()) {
      const int row = batch.states[i].root_row + 1 + walk.node();
      const TokenId choice = choices.tokens[row];
      logprobs.push_back(choices.logprobs[row]);
      const auto& stops = all[i].params.stop_token_ids;
      walk.step(choice, tree.child(walk.node(), choice),
                std::find(stops.begin(), stops.end(), choice) != stops.end());
    }
    CHECK_EQ(verdict[0], static_cast<int>(walk.end()));
    CHECK_EQ(verdict[1], static_cast<int>(walk.emitted().size()));
    CHECK_EQ(verdict[2], static_cast<int>(walk.path().size()));
    CHECK_EQ(lengths[i], verdict[2]);
    for (std::size_t t = 0; t < walk.emitted().size(); ++t) {
      CHECK_EQ(verdict[Verdict::tokens() + t], walk.emitted()[t]);
      CHECK_EQ(specrt::simt::float_of(verdict[Verdict::logprobs(most) + t]), logprobs[t]);
    }
    for (std::size_t t = 0; t < walk.path().size(); ++t) {
      CHECK_EQ(verdict[Verdict::path(most) + t], walk.path()[t]);
      CHECK_EQ(path[i * most + t], walk.path()[t]);
    }
    deepest = std::max(deepest, walk.path().size());
  }
  CHECK(deepest >= 4);
}

}  // namespace
