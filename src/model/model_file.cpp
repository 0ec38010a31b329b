#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <sstream>

#include "model/weights.h"
#include "specrt/error.h"

// A saved model: 16 bytes of magic and format version, 8 bytes of header length, 8 bytes of the
// header's checksum, the header as
// "key value" lines, zeros up to a whole page, the arena. The arena's layout follows from the
// header, so mapping it is checking it and pointing into it.

namespace specrt {
namespace {

constexpr char kMagic[16] = "specrt model 4\n";
constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kPrefix = 32;  // magic, length, checksum

static_assert(std::endian::native == std::endian::little, "the file format is little-endian");

// FNV-1a: damage to the header must not pass for another config.
std::uint64_t checksum(const std::string& text) {
  std::uint64_t value = 0xCBF29CE484222325u;
  for (const char one : text) {
    value = (value ^ static_cast<unsigned char>(one)) * 0x100000001B3u;
  }
  return value;
}

std::int64_t arena_start(std::int64_t header_bytes) {
  return (kPrefix + header_bytes + kPage - 1) / kPage * kPage;
}

template <typename T>
T parse(const std::map<std::string, std::string>& fields, const std::string& key,
        const std::string& path) {
  const auto found = fields.find(key);
  if (found == fields.end()) throw LoadError(expected_got(path, "header field " + key, "none"));
  T value{};
  const std::string& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw LoadError(expected_got(path + ": " + key, "a number", text));
  }
  return value;
}

std::string to_text(double value) {
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, result.ptr);
}

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (file_ < 0) fail();
  }
  ~File() {
    if (file_ >= 0) ::close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, std::int64_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t done = ::write(file_, at, static_cast<std::size_t>(bytes));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail();
      at += done;
      bytes -= done;
    }
  }
  void finish() {
    if (::fsync(file_) != 0) fail();
    const int file = file_;
    file_ = -1;
    if (::close(file) != 0) fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw LoadError(expected_got(path_, "a file that can be written", std::strerror(errno)));
  }
  std::string path_;
  int file_;
};

}  // namespace

std::string config_to_text(const ModelConfig& c, Precision precision) {
  std::ostringstream out;
  out << "dtype " << name_of(precision) << "\nfamily " << c.family << "\nvocab_size "
      << c.vocab_size << "\nhidden_size " << c.hidden_size << "\nintermediate_size "
      << c.intermediate_size << "\nnum_layers " << c.num_layers << "\nnum_heads " << c.num_heads
      << "\nnum_kv_heads " << c.num_kv_heads << "\nhead_dim " << c.head_dim
      << "\nmax_position_embeddings " << c.max_position_embeddings << "\nnorm_eps "
      << to_text(c.norm_eps) << "\nattention_scale " << to_text(c.attention_scale)
      << "\nrope_scale " << to_text(c.rope_scale) << "\nactivation "
      << static_cast<int>(c.activation) << "\nnorm_placement " << static_cast<int>(c.norm_placement)
      << "\nqk_norm " << static_cast<int>(c.qk_norm) << "\nattention_softcap "
      << to_text(c.attention_softcap) << "\nfinal_softcap " << to_text(c.final_softcap)
      << "\nembedding_scale " << to_text(c.embedding_scale) << "\nresidual_scale "
      << to_text(c.residual_scale) << "\nlogits_scale " << to_text(c.logits_scale) << "\nqkv_bias "
      << c.qkv_bias << "\noutput_bias " << c.output_bias << "\nmlp_bias " << c.mlp_bias
      << "\ntied_embeddings " << c.tied_embeddings << "\n";
  // Bit patterns: the same factors come back.
  out << "rope_inv_freq";
  for (const float value : c.rope_inv_freq) out << " " << std::bit_cast<std::uint32_t>(value);
  out << "\nrope_local_inv_freq";
  for (const float value : c.rope_local_inv_freq) out << " " << std::bit_cast<std::uint32_t>(value);
  out << "\nwindows";
  for (const std::int64_t window : c.windows) out << " " << window;
  out << "\neos_token_ids";
  for (const TokenId token : c.eos_token_ids) out << " " << token;
  out << "\n";
  return out.str();
}

void config_from_text(const std::string& text, const std::string& path, ModelConfig& c,
                      Precision& precision) {
  std::map<std::string, std::string> fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto space = line.find(' ');
    fields[line.substr(0, space)] = space == std::string::npos ? "" : line.substr(space + 1);
  }
  const auto integer = [&](const char* key) { return parse<std::int64_t>(fields, key, path); };
  const auto flag = [&](const char* key) { return integer(key) != 0; };
  c = ModelConfig{};
  try {
    precision = precision_from_name(fields["dtype"]);
  } catch (const InvalidArgument& error) {
    throw LoadError(path + ": " + error.what());
  }
  c.family = fields["family"];
  c.vocab_size = integer("vocab_size");
  c.hidden_size = integer("hidden_size");
  c.intermediate_size = integer("intermediate_size");
  c.num_layers = integer("num_layers");
  c.num_heads = integer("num_heads");
  c.num_kv_heads = integer("num_kv_heads");
  c.head_dim = integer("head_dim");
  c.max_position_embeddings = integer("max_position_embeddings");
  c.norm_eps = parse<double>(fields, "norm_eps", path);
  c.attention_scale = parse<double>(fields, "attention_scale", path);
  c.rope_scale = parse<double>(fields, "rope_scale", path);
  const auto choice = [&](const char* key, std::int64_t last) {
    const std::int64_t value = integer(key);
    if (value < 0 || value > last) {
      throw LoadError(expected_got(path + ": " + key, "from 0 to " + std::to_string(last),
                                   std::to_string(value)));
    }
    return value;
  };
  c.activation = static_cast<Activation>(choice("activation", 1));
  c.norm_placement = static_cast<NormPlacement>(choice("norm_placement", 2));
  c.qk_norm = static_cast<QkNorm>(choice("qk_norm", 2));
  c.attention_softcap = parse<double>(fields, "attention_softcap", path);
  c.final_softcap = parse<double>(fields, "final_softcap", path);
  c.embedding_scale = parse<double>(fields, "embedding_scale", path);
  c.residual_scale = parse<double>(fields, "residual_scale", path);
  c.logits_scale = parse<double>(fields, "logits_scale", path);
  c.qkv_bias = flag("qkv_bias");
  c.output_bias = flag("output_bias");
  c.mlp_bias = flag("mlp_bias");
  c.tied_embeddings = flag("tied_embeddings");
  const auto factors = [&](const char* key, std::vector<float>& out) {
    std::istringstream words(fields[key]);
    for (std::uint32_t bits = 0; words >> bits;) out.push_back(std::bit_cast<float>(bits));
  };
  factors("rope_inv_freq", c.rope_inv_freq);
  factors("rope_local_inv_freq", c.rope_local_inv_freq);
  std::istringstream windows(fields["windows"]);
  for (std::int64_t window = 0; windows >> window;) c.windows.push_back(window);
  std::istringstream tokens(fields["eos_token_ids"]);
  for (TokenId token = 0; tokens >> token;) c.eos_token_ids.push_back(token);
}

void Model::save(const std::string& path) const {
  if (!valid()) throw InvalidArgument("[save] expected a loaded model, got an empty one");
  if (config().head.kind != HeadKind::none) {
    throw UnsupportedError("[save] expected a model of its own, got a draft head");
  }
  if (data_->shared != nullptr) {
    throw InvalidArgument("[save] expected a model of its own weights, got one that shares them");
  }
  const std::string header = config_to_text(config(), precision());
  const auto header_bytes = static_cast<std::int64_t>(header.size());
  const std::string temporary = path + ".tmp" + std::to_string(::getpid());
  try {
    File file(temporary);
    file.write(kMagic, sizeof kMagic);
    file.write(&header_bytes, sizeof header_bytes);
    const std::uint64_t sum = checksum(header);
    file.write(&sum, sizeof sum);
    file.write(header.data(), header_bytes);
    const std::string padding(
        static_cast<std::size_t>(arena_start(header_bytes) - kPrefix - header_bytes), '\0');
    file.write(padding.data(), static_cast<std::int64_t>(padding.size()));
    file.write(data_->arena(), data_->layout.bytes);
    file.finish();
    if (::rename(temporary.c_str(), path.c_str()) != 0) {
      throw LoadError(expected_got(path, "a file that can be written", std::strerror(errno)));
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

Model Model::map(const std::string& path) {
  auto data = std::make_shared<ModelData>();
  data->buffer = Buffer::map_file(path);
  const std::byte* base = data->buffer.data();
  const std::int64_t size = data->buffer.size();
  std::int64_t header_bytes = 0;
  if (size < kPrefix || std::memcmp(base, kMagic, sizeof kMagic) != 0) {
    throw LoadError(expected_got(path, "a model saved by this version of specrt", "another file"));
  }
  std::memcpy(&header_bytes, base + sizeof kMagic, sizeof header_bytes);
  if (header_bytes < 0 || header_bytes > size - kPrefix) {
    throw LoadError(expected_got(path, "a whole header", "a damaged or truncated file"));
  }
  const std::string header(reinterpret_cast<const char*>(base) + kPrefix,
                           static_cast<std::size_t>(header_bytes));
  std::uint64_t sum = 0;
  std::memcpy(&sum, base + sizeof kMagic + sizeof header_bytes, sizeof sum);
  if (sum != checksum(header)) {
    throw LoadError(expected_got(path, "a whole header", "a damaged one"));
  }
  config_from_text(header, path, data->config, data->precision);
  try {
    data->layout = weight_layout(data->config, data->precision);
  } catch (const InvalidArgument& error) {
    throw LoadError(path + ": " + error.what());
  }
  data->arena_offset = arena_start(header_bytes);
  if (size != data->arena_offset + data->layout.bytes) {
    throw LoadError(expected_got(path,
                                 std::to_string(data->arena_offset + data->layout.bytes) + " bytes",
                                 std::to_string(size)));
  }
  data->resolve();
  return Model(std::move(data));
}

}  // namespace specrt
