#include "model/cuda_medusa.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "model/medusa.h"
#include "specrt/error.h"

namespace specrt {
namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Rows that a draft is filled up to.
std::int64_t rows_of(std::int64_t rows) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows)));
}

CudaLayout layout_of(const MedusaConfig& config, Precision precision, int device) {
  return cuda_layout(medusa_entries(config, precision), 0, cuda::architecture_of(device));
}

CudaFavour::Shape favour_shape(const MedusaConfig& config, std::int64_t max_rows) {
  CudaFavour::Shape shape;
  shape.sequences = shape.rows = shape.slice = rows_of(max_rows);
  shape.lists = config.num_heads;
  shape.vocab = config.outputs;
  shape.count = CudaMedusa::kMostLikely;
  return shape;
}

}  // namespace

struct CudaMedusa::Sizes {
  std::int64_t input, read, logits, workspace, shares, found, likeliest, stride;

  Sizes(const MedusaConfig& c, std::int64_t max_rows) {
    const std::int64_t rows = rows_of(max_rows);
    input = rows * c.hidden_size * 4;
    read = rows * cuda::padded_columns(c.hidden_size) * 2;
    stride = (c.outputs + 3) / 4 * 4;
    logits = rows * stride * 4;
    workspace = 0;
    for (const std::int64_t n : {c.hidden_size, c.outputs}) {
      cuda::DeviceMatrix matrix;
      matrix.n = n;
      matrix.k = c.hidden_size;
      workspace = std::max(workspace, cuda::workspace_bytes(matrix, rows));
    }
    const std::int64_t chunks = rows * cuda::chunks_of(c.outputs);
    const auto token = static_cast<std::int64_t>(sizeof(cuda::LikelyToken));
    shares = chunks * static_cast<std::int64_t>(sizeof(cuda::LikelyShare));
    found = chunks * kMostLikely * token;
    likeliest = c.num_heads * rows * kMostLikely * token;
  }

  /// Calls take(bytes) for each part, in order.
  template <typename Take>
  void each(const Take& take) const {
    for (const std::int64_t bytes :
         {input, input, read, input, logits, workspace, shares, found, likeliest}) {
      take(aligned(bytes));
    }
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    each([&](std::int64_t part) { sum += part; });
    return sum;
  }
};

std::int64_t CudaMedusa::weight_bytes(const MedusaConfig& config, Precision precision, int device) {
  return layout_of(config, precision, device).bytes;
}

std::int64_t CudaMedusa::workspace_bytes(const MedusaConfig& config, std::int64_t max_rows) {
  return Sizes(config, max_rows).bytes() + StateCopies::device_bytes() +
         CudaFavour::device_bytes(favour_shape(config, max_rows),
                                  config.token_map.empty() ? 0 : config.vocab_size);
}

CudaMedusa::CudaMedusa(const MedusaHeads& heads, std::int64_t max_rows,
                       std::span<const std::int32_t> counts, int device)
    : config_(heads.config()),
      device_((cuda::use_device(device), device)),
      type_(cuda_type_of(heads.precision())),
      arena_(
          layout_of(config_, heads.precision(), device),
          [&](const std::string& name, const std::byte** at) {
            return heads.data().find_entry(name, at);
          },
          0),
      copies_(device),
      counts_(counts.begin(), counts.end()),
      favour_(favour_shape(config_, max_rows), config_.token_map, config_.vocab_size,
              stream_.get()) {
  const Sizes sizes(config_, max_rows);
  stride_ = sizes.stride;
  buffer_ = cuda::DeviceBuffer(static_cast<std::size_t>(sizes.bytes()));
  host_ = cuda::HostBuffer(static_cast<std::size_t>(std::max(sizes.logits, sizes.likeliest)));
  std::vector<std::byte*> parts;
  std::byte* at = buffer_.data();
  sizes.each([&](std::int64_t bytes) {
    parts.push_back(at);
    at += bytes;
  });
  auto part = parts.begin();
  const auto take = [&]<typename T>(T*& out) { out = reinterpret_cast<T*>(*part++); };
  take(input_);
  take(x_);
  read_ = *part++;
  take(block_);
  take(logits_);
  take(workspace_);
  take(shares_);
  take(found_);
  take(likeliest_);
  for (std::int64_t head = 0; head < config_.num_heads; ++head) {
    Head one;
    for (std::int64_t block = 0; block < config_.num_blocks; ++block) {
      const std::string name = medusa_block(config_, head, block);
      one.blocks.push_back({arena_.matrix(name), arena_.vector(name + ".bias")});
    }
    one.projection = arena_.matrix(medusa_projection(config_, head));
    heads_.push_back(std::move(one));
  }
}

CudaMedusa::~CudaMedusa() {
  try {
    cuda::use_device(device_);
    cuda::synchronize(stream());
  } catch (...) {  // a device that is lost has nothing under way
  }
}

void CudaMedusa::start(std::span<const float* const> states) {
  for (std::size_t row = 0; row < states.size(); ++row) {
    float* const to = input_ + static_cast<std::int64_t>(row) * config_.hidden_size;
    copies_.add(states[row], to, config_.hidden_size, stream());
  }
  copies_.flush(stream());
}

void CudaMedusa::product(const cuda::DeviceMatrix& matrix, const float* bias, std::int64_t rows,
                         float* y, std::int64_t y_stride) {
  cuda::Product args;
  args.x = read_;
  args.rows = rows;
  args.bias = bias;
  args.y = y;
  args.y_stride = y_stride;
  args.workspace = workspace_;
  cuda::product(type_, matrix, args, stream());
}

// logits_ of one head.
void CudaMedusa::run(const Head& head, std::int64_t rows) {
  const std::int64_t hidden = config_.hidden_size;
  const std::int64_t padded = cuda::padded_columns(hidden);
  cuda::StatesArgs begin;
  begin.x = input_;
  begin.x_stride = begin.width = begin.kept_stride = hidden;
  begin.kept = x_;
  begin.rounded = read_;
  begin.rounded_stride = begin.rounded_width = padded;
  cuda::states(type_, begin, rows, stream());
  for (const Block& block : head.blocks) {
    product(block.matrix, block.bias, rows, block_, hidden);
    cuda::add_silu(type_, {x_, block_, read_, padded, hidden}, rows, stream());
  }
  product(head.projection, nullptr, rows, logits_, stride_);
  if (config_.logits_scale == 1.0) return;
  cuda::finish_logits(
      {logits_, stride_, config_.outputs, static_cast<float>(config_.logits_scale), 0.0f}, rows,
      stream());
}

std::span<const float> CudaMedusa::logits(std::int64_t head, std::int64_t rows) {
  cuda::use_device(device_);
  run(heads_[static_cast<std::size_t>(head)], rows);
  cuda::copy_to_host(host_.data(), logits_, static_cast<std::size_t>(rows * stride_ * 4), stream());
  cuda::synchronize(stream());
  auto* out = reinterpret_cast<float*>(host_.data());
  for (std::int64_t row = 1; row < rows && stride_ != config_.outputs; ++row) {
    std::memmove(out + row * config_.outputs, out + row * stride_,
                 static_cast<std::size_t>(config_.outputs) * 4);
  }
  return {out, static_cast<std::size_t>(rows * config_.outputs)};
}

std::int64_t CudaMedusa::place_of(std::int64_t head, std::int64_t rows) const {
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < head; ++i) before += rows * counts_[static_cast<std::size_t>(i)];
  return before;
}

void CudaMedusa::rank(std::int64_t rows, std::int64_t head) {
  cuda::LikelyArgs args;
  args.logits = logits_;
  args.stride = stride_;
  args.vocab = config_.outputs;
  args.chunks = cuda::chunks_of(config_.outputs);
  args.count = counts_[static_cast<std::size_t>(head)];
  args.shares = shares_;
  args.found = found_;
  args.out = likeliest_ + place_of(head, rows);
  cuda::likely(args, rows, stream());
}

bool CudaMedusa::find_likely(std::span<const CudaFavour::Sequence> rows, std::int64_t heads) {
  cuda::use_device(device_);
  const std::int64_t count = std::ssize(rows);
  ranked_rows_ = rows_of(count);
  if (!favour_.begin(rows)) return false;
  const CudaFavour::Kinds& kinds = favour_.kinds();
  if (kinds.wanted()) {
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::size_t row = 0; row < rows.size(); ++row) {
        favour_.set_rows(head, static_cast<std::int64_t>(row), 1, row, head);
      }
      favour_.set_padding(head, count, ranked_rows_ - count);
    }
    favour_.send(0, heads);
  }
  graphs_.run(Key{ranked_rows_, heads, kinds}, stream(), [&](cuda::Stream) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const CudaFavour::Rows which = {logits_, stride_, config_.outputs, head, 0, ranked_rows_};
      run(heads_[static_cast<std::size_t>(head)], ranked_rows_);
      // As they stand at the root: what a path adds to them differs from node to node.
      if (kinds.changed) favour_.process(which, {});
      if (kinds.greedy) rank(ranked_rows_, head);
      if (!kinds.sampled) continue;
      favour_.favour(which, counts_[static_cast<std::size_t>(head)], false,
                     likeliest_ + place_of(head, ranked_rows_), nullptr);
    }
  });
  const auto bytes =
      static_cast<std::size_t>(place_of(heads, ranked_rows_)) * sizeof(cuda::LikelyToken);
  cuda::copy_to_host(host_.data(), likeliest_, bytes, stream());
  cuda::synchronize(stream());
  return true;
}

std::span<const cuda::LikelyToken> CudaMedusa::likely(std::int64_t head, std::int64_t row) const {
  const std::int64_t count = counts_[static_cast<std::size_t>(head)];
  return {reinterpret_cast<const cuda::LikelyToken*>(host_.data()) + place_of(head, ranked_rows_) +
              row * count,
          static_cast<std::size_t>(count)};
}

}  // namespace specrt
