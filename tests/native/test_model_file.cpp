#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "specrt/error.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace {

using specrt::LoadError;
using specrt::Model;
using specrt::Precision;

/// A folder that is gone afterwards.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "specrt-test-XXXXXX").string();
    CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  CHECK(out.good());
}

tiny::Output generate(const Model& model) {
  tiny::Request request;
  request.prompt = tiny::random_tokens(3, 20, model.config().vocab_size);
  request.params.max_tokens = 20;
  request.params.temperature = 0.9;
  request.params.logprobs = 5;
  return tiny::run_alone(model, tiny::options_for(model, 1, 64), request, tiny::fixed(0));
}

// Maps, or refuses with a LoadError; anything else fails the test. Returns whether it mapped.
bool maps(const std::string& path) {
  try {
    (void)Model::map(path);
    return true;
  } catch (const LoadError&) {
    return false;
  }
}

}  // namespace

TEST(model_file_round_trip) {
  const Folder folder;
  for (const Precision dtype :
       {Precision::f32, Precision::bf16, Precision::int8, Precision::int4, Precision::w8a8}) {
    for (const bool tied : {false, true}) {
      tiny::Spec spec = tiny::small_spec(dtype);
      spec.tied = tied;
      spec.qkv_bias = tied;
      spec.mlp_bias = !tied;
      spec.output_bias = tied;
      spec.attention_scale = tied ? 0.3 : 0.0;
      specrt::ModelConfig config = tiny::config_of(spec);
      config.eos_token_ids = {3, 60};
      config.norm_eps = 1.2345678901234567e-6;
      config.rope_scale = 1.0000000000000002;
      config.family = "a family of two words";
      const Model model = tiny::build(config, dtype, tiny::random_tensors(spec));
      const std::string path = folder.file("model");
      model.save(path);
      const Model mapped = Model::map(path);
      const specrt::ModelConfig& got = mapped.config();
      CHECK(mapped.precision() == dtype);
      CHECK_EQ(mapped.weight_bytes(), model.weight_bytes());
      CHECK_EQ(got.family, config.family);
      CHECK_EQ(got.norm_eps, config.norm_eps);
      CHECK_EQ(got.rope_scale, config.rope_scale);
      CHECK_EQ(got.attention_scale, config.attention_scale);
      CHECK(got.rope_inv_freq == config.rope_inv_freq);
      CHECK(got.eos_token_ids == config.eos_token_ids);
      CHECK_EQ(got.qkv_bias, config.qkv_bias);
      CHECK_EQ(got.tied_embeddings, config.tied_embeddings);
      CHECK_EQ(tiny::difference(generate(mapped), generate(model)), "");
    }
  }
  CHECK_EQ(folder.entries(), 1u);
}

TEST(model_file_saved_twice_is_the_same_file) {
  const Folder folder;
  const Model model = tiny::random_model(tiny::small_spec());
  model.save(folder.file("a"));
  Model::map(folder.file("a")).save(folder.file("b"));
  CHECK(read(folder.file("a")) == read(folder.file("b")));
}

// A saved file replaces an older one whole; whoever has mapped the old one keeps it.
TEST(model_file_save_is_atomic) {
  const Folder folder;
  const std::string path = folder.file("model");
  const Model first = tiny::random_model(tiny::small_spec(Precision::f32, 1));
  const Model second = tiny::random_model(tiny::small_spec(Precision::f32, 2));
  first.save(path);
  const Model mapped = Model::map(path);
  second.save(path);
  CHECK_EQ(folder.entries(), 1u);
  CHECK_EQ(tiny::difference(generate(mapped), generate(first)), "");
  CHECK_EQ(tiny::difference(generate(Model::map(path)), generate(second)), "");

  const std::string before = read(path);
  CHECK_THROWS(first.save(folder.file("missing/model")), LoadError, "missing/model");
  std::filesystem::create_directory(folder.file("taken"));
  CHECK_THROWS(first.save(folder.file("taken")), LoadError, "taken");
  CHECK(read(path) == before);
  CHECK_EQ(folder.entries(), 2u);  // no temporary file is left
  CHECK_THROWS(Model().save(path), specrt::InvalidArgument, "[save]");
}

TEST(model_file_refuses_truncated_and_longer_files) {
  const Folder folder;
  const std::string good = folder.file("good");
  const std::string bad = folder.file("bad");
  tiny::random_model(tiny::small_spec()).save(good);
  const std::string bytes = read(good);
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size < 1500; size += 7) sizes.push_back(size);
  for (const std::size_t size : {std::size_t{4095}, std::size_t{4096}, std::size_t{4097},
                                 bytes.size() / 2, bytes.size() - 64, bytes.size() - 1}) {
    sizes.push_back(size);
  }
  for (const std::size_t size : sizes) {
    write(bad, bytes.substr(0, size));
    CHECK_THROWS(Model::map(bad), LoadError, "bad");
  }
  write(bad, bytes + '\0');
  CHECK_THROWS(Model::map(bad), LoadError, "bytes, got");
  write(bad, bytes + std::string(4096, 'x'));
  CHECK_THROWS(Model::map(bad), LoadError, "bytes, got");
}

TEST(model_file_refuses_other_files) {
  const Folder folder;
  CHECK_THROWS(Model::map(folder.file("none")), LoadError, "none");
  CHECK_THROWS(Model::map(folder.file(".")), LoadError, "regular file");
  const std::string path = folder.file("other");
  write(path, "");
  CHECK_THROWS(Model::map(path), LoadError, "other");
  write(path, std::string(10000, 'x'));
  CHECK_THROWS(Model::map(path), LoadError, "a model saved by this version");
  tiny::random_model(tiny::small_spec()).save(path);
  std::string bytes = read(path);
  bytes[13] = '9';  // the format's version
  write(path, bytes);
  CHECK_THROWS(Model::map(path), LoadError, "a model saved by this version");
}

TEST(model_file_refuses_bad_headers) {
  const Folder folder;
  const std::string path = folder.file("model");
  tiny::random_model(tiny::small_spec()).save(path);
  const std::string bytes = read(path);
  for (const std::int64_t length :
       {std::int64_t{-1}, std::int64_t{0}, std::int64_t{5}, static_cast<std::int64_t>(bytes.size()),
        std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
    std::string copy = bytes;
    std::memcpy(copy.data() + 16, &length, 8);
    write(path, copy);
    CHECK_THROWS(Model::map(path), LoadError, "model");
  }
  const auto replaced = [&](const std::string& from, const std::string& to) {
    CHECK_EQ(from.size(), to.size());
    std::string copy = bytes;
    const auto at = copy.find(from);
    CHECK(at != std::string::npos);
    copy.replace(at, from.size(), to);
    write(path, copy);
  };
  for (const char* key :
       {"\nvocab_size 6", "\nhidden_size 3", "\nnum_layers 2", "\nnum_heads 4", "\nhead_dim 8",
        "\nnorm_eps 1", "\nqkv_bias 0", "\nrope_scale 1", "dtype float3"}) {
    std::string broken = key;
    broken.back() = 'x';
    replaced(key, broken);
    CHECK_THROWS(Model::map(path), LoadError, "model");
    broken = key;
    broken[broken.find(' ') - 1] = '?';  // another key
    replaced(key, broken);
    CHECK_THROWS(Model::map(path), LoadError, "model");
  }
  for (const auto& [from, to] : {std::pair{"num_kv_heads 2", "num_kv_heads 3"},
                                 {"hidden_size 32", "hidden_size 33"},
                                 {"num_layers 2", "num_layers 0"},
                                 {"vocab_size 61", "vocab_size -1"},
                                 {"tied_embeddings 0", "tied_embeddings 1"},
                                 {"rope_inv_freq ", "rope_inv_freqs"}}) {
    replaced(from, to);
    CHECK_THROWS(Model::map(path), LoadError, "model");
  }
}

// A damaged header is refused, unless the damage changed nothing.
TEST(model_file_survives_random_damage) {
  const Folder folder;
  const std::string path = folder.file("model");
  tiny::random_model(tiny::small_spec()).save(path);
  const std::string bytes = read(path);
  std::int64_t header = 0;
  std::memcpy(&header, bytes.data() + 16, 8);
  std::mt19937 random(1);
  int refused = 0;
  const int rounds = tiny::kThinned ? 150 : 600;
  for (int round = 0; round < rounds; ++round) {
    std::string copy = bytes;
    for (std::uint32_t i = 0; i < 1 + random() % 3; ++i) {
      const std::size_t at = random() % (32 + static_cast<std::size_t>(header));
      copy[at] = random() % 2 == 0 ? static_cast<char>(random() % 256)
                                   : static_cast<char>('0' + random() % 10);
    }
    write(path, copy);
    const bool mapped = maps(path);
    CHECK_EQ(mapped, copy == bytes);
    refused += mapped ? 0 : 1;
  }
  CHECK(refused > rounds / 2);
}
