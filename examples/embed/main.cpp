// Generates token ids from a model file that engine.save() wrote, with n-gram speculation:
//   embed MODEL MAX_TOKENS ID [ID ...]

#include <charconv>
#include <cstdint>
#include <exception>
#include <iostream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "specrt/specrt.h"

namespace {

specrt::TokenId integer(std::string_view text) {
  specrt::TokenId value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw std::invalid_argument("expected an integer, got '" + std::string(text) + "'");
  }
  return value;
}

std::vector<specrt::TokenId> generate(const std::string& path, std::int64_t max_tokens,
                                      std::span<const specrt::TokenId> prompt) {
  const specrt::Model model = specrt::Model::map(path);

  specrt::DecoderOptions options;
  options.max_batch_size = 1;
  const auto length = static_cast<std::int64_t>(prompt.size()) + max_tokens;
  options.kv_cache_bytes =
      specrt::kv_cache_bytes_for(model.config(), model.precision(), options, 1, length);
  specrt::Decoder decoder(model, options);

  specrt::SamplingParams params;
  params.max_tokens = max_tokens;
  params.stop_token_ids = model.config().eos_token_ids;
  decoder.add(prompt, params, specrt::make_ngram_drafter());

  std::vector<specrt::TokenId> tokens;
  while (!decoder.idle()) {
    for (const specrt::Progress& progress : decoder.round(specrt::plan_fixed(decoder, 5))) {
      if (progress.finish == specrt::Finish::error) throw std::runtime_error(progress.error);
      tokens.insert(tokens.end(), progress.tokens.begin(), progress.tokens.end());
      if (progress.finish != specrt::Finish::none) {
        const specrt::SequenceCounters& counters = *progress.counters;
        std::cerr << counters.tokens << " tokens in " << counters.rounds << " rounds, "
                  << counters.accepted << " of " << counters.drafted << " drafts accepted\n";
      }
    }
  }
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: embed MODEL MAX_TOKENS ID [ID ...]\n";
    return 2;
  }
  try {
    std::vector<specrt::TokenId> prompt;
    for (int i = 3; i < argc; ++i) prompt.push_back(integer(argv[i]));
    for (const specrt::TokenId token : generate(argv[1], integer(argv[2]), prompt)) {
      std::cout << token << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
