// Generates token ids from a model file that engine.save() wrote, several texts in one batch, with
// n-gram speculation as far as it pays on this machine:
//   embed MODEL MAX_TOKENS ID [ID ...] [, ID [ID ...] ...]

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "specrt/specrt.h"

namespace {

using Tokens = std::vector<specrt::TokenId>;

specrt::TokenId integer(std::string_view text) {
  specrt::TokenId value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw std::invalid_argument("expected an integer, got '" + std::string(text) + "'");
  }
  return value;
}

std::vector<Tokens> generate(const std::string& path, std::int64_t max_tokens,
                             std::span<const Tokens> prompts) {
  const specrt::Model model = specrt::Model::map(path);

  std::size_t longest = 0;
  for (const Tokens& prompt : prompts) longest = std::max(longest, prompt.size());
  specrt::DecoderOptions options;
  options.max_batch_size = static_cast<int>(prompts.size());
  options.kv_cache_bytes =
      specrt::kv_cache_bytes_for(model.config(), model.precision(), options, options.max_batch_size,
                                 static_cast<std::int64_t>(longest) + max_tokens);
  specrt::Decoder decoder(model, options);

  // What passes cost here, so that rounds draft where it pays; it follows what they turn out to
  // take.
  const auto ngram = specrt::make_ngram_drafter();
  decoder.set_cost_model(specrt::measure_cost(decoder, ngram, 8));

  std::map<specrt::SequenceId, std::size_t> which;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    specrt::SamplingParams params;
    params.max_tokens = max_tokens;
    params.stop_token_ids = model.config().eos_token_ids;
    params.speculation.policy = specrt::Policy::goodput;
    which[decoder.add(prompts[i], params, ngram)] = i;
  }

  std::vector<Tokens> texts(prompts.size());
  while (!decoder.idle()) {
    for (const specrt::Progress& progress : decoder.round(specrt::plan_goodput(decoder, 8))) {
      if (progress.finish == specrt::Finish::error) throw std::runtime_error(progress.error);
      Tokens& text = texts[which.at(progress.id)];
      text.insert(text.end(), progress.tokens.begin(), progress.tokens.end());
      if (progress.finish != specrt::Finish::none) {
        const specrt::SequenceCounters& counters = *progress.counters;
        std::cerr << counters.tokens << " tokens in " << counters.rounds << " rounds, "
                  << counters.accepted << " of " << counters.drafted << " drafts accepted\n";
      }
    }
  }
  return texts;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: embed MODEL MAX_TOKENS ID [ID ...] [, ID [ID ...] ...]\n";
    return 2;
  }
  try {
    std::vector<Tokens> prompts(1);
    for (int i = 3; i < argc; ++i) {
      if (std::string_view(argv[i]) == ",") {
        prompts.emplace_back();
      } else {
        prompts.back().push_back(integer(argv[i]));
      }
    }
    for (const Tokens& text : generate(argv[1], integer(argv[2]), prompts)) {
      for (std::size_t i = 0; i < text.size(); ++i) std::cout << (i > 0 ? " " : "") << text[i];
      std::cout << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
