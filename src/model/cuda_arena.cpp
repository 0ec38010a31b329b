#include "model/cuda_arena.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/pack.h"
#include "kernels/pack.h"
#include "model/parallel_rows.h"
#include "specrt/error.h"

namespace specrt {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kShare = std::int64_t{8} << 20;  // bytes on their way at once
constexpr const char* kGated = "mlp.gate_up";

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool is_gated(const std::string& name) { return name.find(kGated) != std::string::npos; }

// Rows of gate and up together.
std::int64_t gated_rows(std::int64_t outputs) {
  return (outputs + cuda::kGateRows - 1) / cuda::kGateRows * cuda::kGateRows * 2;
}

cuda::Stored stored_as(Precision precision) {
  switch (precision) {
    case Precision::bf16:
    case Precision::f16:
      return cuda::Stored::plain;
    case Precision::int8:
      return cuda::Stored::int8;
    case Precision::int4:
      return cuda::Stored::int4;
    case Precision::f32:
    case Precision::w8a8:
      break;
  }
  throw InternalError(expected_got("weights", "a precision of the device", name_of(precision)));
}

std::int64_t row_bytes(std::int64_t k) { return cuda::padded_columns(k) * 2; }

std::int64_t matrix_bytes(const CudaPiece& piece) {
  return piece.row_major ? piece.n * row_bytes(piece.k)
                         : cuda::packed_bytes(piece.n, piece.k, piece.stored);
}

/// The rows of a matrix as they lie on the device, out of what the CPU has packed.
class Rows {
 public:
  Rows(const WeightEntry& entry, const std::byte* from, bool gated, std::int64_t outputs)
      : entry_(entry), from_(from), gated_(gated), outputs_(outputs) {}

  // The packed row that stands at `row` of the device; -1: nothing, zeros.
  std::int64_t source(std::int64_t row) const {
    if (!gated_) return row;
    const std::int64_t turn = row / (2 * cuda::kGateRows);
    const std::int64_t inside = row % (2 * cuda::kGateRows);
    const std::int64_t output = turn * cuda::kGateRows + inside % cuda::kGateRows;
    if (output >= outputs_) return -1;
    return cpu::PackedRows{0, 2, inside / cuda::kGateRows}.row(output);
  }

  // Rows [first, first + n), of which the first of a panel is first, to `to`.
  void pack(const CudaPiece& piece, std::int64_t first, std::int64_t n, std::byte* to) const {
    const std::int64_t k = piece.k;
    const std::int64_t bytes =
        piece.row_major ? n * row_bytes(k) : cuda::packed_bytes(n, k, piece.stored);
    const std::span<std::byte> out(to, static_cast<std::size_t>(bytes));
    std::fill(out.begin(), out.end(), std::byte{0});
    std::vector<float> values(static_cast<std::size_t>(k));
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(k));
    std::vector<std::int8_t> codes(static_cast<std::size_t>(k));
    const auto groups = static_cast<std::size_t>((k + 31) / 32);
    std::vector<std::uint16_t> scales(groups);
    std::vector<std::uint16_t> minima(groups);
    for (std::int64_t r = 0; r < n; ++r) {
      const std::int64_t row = source(first + r);
      if (row < 0) continue;
      if (piece.stored == cuda::Stored::plain) {
        cpu::unpack_row(from_, entry_.precision, k, row, values.data());
        std::transform(
            values.begin(), values.end(), bits.begin(),
            entry_.precision == Precision::f16 ? cpu::float_to_half : cpu::float_to_bf16);
        if (piece.row_major) {
          std::memcpy(to + r * row_bytes(k), bits.data(), static_cast<std::size_t>(k) * 2);
        } else {
          cuda::pack_plain(bits, r, 1, k, out);
        }
        continue;
      }
      cpu::unpack_codes(from_, entry_.precision, k, row, codes.data(), scales.data(),
                        minima.data());
      if (piece.stored == cuda::Stored::int8) {
        cuda::pack_int8(codes, r, 1, k, out);
      } else {
        cuda::pack_int4(codes, scales, minima, r, 1, k, out);
      }
    }
  }

  // GemmArgs::scales.
  float scale(std::int64_t row) const {
    const std::int64_t at = source(row);
    return at < 0 ? 0.0f : cpu::unpack_scale(from_, entry_.precision, entry_.k, at);
  }

 private:
  const WeightEntry& entry_;
  const std::byte* from_;
  bool gated_;
  std::int64_t outputs_;
};

/// Brings bytes to the device through pinned memory.
class Carrier {
 public:
  explicit Carrier(std::byte* to) : to_(to), staging_(static_cast<std::size_t>(kShare)) {}
  std::byte* staging() const { return staging_.data(); }
  void send(std::int64_t offset, std::int64_t bytes) {
    cuda::copy_to_device(to_ + offset, staging_.data(), static_cast<std::size_t>(bytes),
                         stream_.get());
    cuda::synchronize(stream_.get());
  }
  void send(std::int64_t offset, const void* from, std::int64_t bytes) {
    for (std::int64_t at = 0; at < bytes; at += kShare) {
      const std::int64_t share = std::min(kShare, bytes - at);
      std::memcpy(staging(), static_cast<const std::byte*>(from) + at,
                  static_cast<std::size_t>(share));
      send(offset + at, share);
    }
  }

 private:
  std::byte* to_;
  cuda::OwnStream stream_;
  cuda::HostBuffer staging_;
};

void send_matrix(Carrier& carrier, const CudaPiece& piece, const Rows& rows) {
  // Bytes of the rows that a panel of either layout has.
  const std::int64_t unit = piece.row_major
                                ? cuda::kPanelRows * row_bytes(piece.k)
                                : cuda::packed_bytes(cuda::kPanelRows, piece.k, piece.stored);
  if (unit > kShare) {
    throw UnsupportedError(
        expected_got("weights", "layers of at most 250000 inputs", std::to_string(piece.k)));
  }
  const std::int64_t share = kShare / unit * cuda::kPanelRows;
  for (std::int64_t first = 0; first < piece.n; first += share) {
    const std::int64_t n = std::min(share, piece.n - first);
    parallel_rows(n, n * piece.k, [&](std::int64_t begin, std::int64_t end) {
      rows.pack(piece, first + begin, end - begin,
                carrier.staging() + begin / cuda::kPanelRows * unit);
    });
    const std::int64_t bytes =
        piece.row_major ? n * row_bytes(piece.k) : cuda::packed_bytes(n, piece.k, piece.stored);
    carrier.send(piece.offset + first / cuda::kPanelRows * unit, bytes);
  }
  if (piece.scales < 0) return;
  std::vector<float> scales(static_cast<std::size_t>(piece.n));
  for (std::int64_t row = 0; row < piece.n; ++row) {
    scales[static_cast<std::size_t>(row)] = rows.scale(row);
  }
  carrier.send(piece.scales, scales.data(), piece.n * 4);
}

}  // namespace

cuda::Type cuda_type_of(Precision precision) {
  return precision == Precision::f16 ? cuda::Type::fp16 : cuda::Type::bf16;
}

CudaLayout cuda_layout(const std::map<std::string, WeightEntry>& entries,
                       std::int64_t gated_outputs, int architecture) {
  CudaLayout out;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t at = out.bytes;
    out.bytes += aligned(bytes);
    return at;
  };
  for (const auto& [name, entry] : entries) {
    CudaPiece piece;
    piece.kind = entry.kind;
    piece.n = is_gated(name) ? gated_rows(gated_outputs) : entry.n;
    piece.k = entry.k;
    switch (entry.kind) {
      case WeightEntry::Kind::vector:
        piece.offset = take(piece.n * 4);
        break;
      case WeightEntry::Kind::rows:
        piece.offset = take(piece.n * piece.k * 2);
        break;
      case WeightEntry::Kind::packed:
        piece.stored = stored_as(entry.precision);
        piece.row_major = piece.stored == cuda::Stored::plain &&
                          cuda::wants_row_major(architecture, piece.n, piece.k);
        piece.offset = take(matrix_bytes(piece));
        if (piece.stored != cuda::Stored::plain) piece.scales = take(piece.n * 4);
        break;
    }
    out.pieces.emplace(name, piece);
  }
  return out;
}

CudaArena::CudaArena(CudaLayout layout, const Find& find, std::int64_t gated_outputs)
    : layout_(std::move(layout)), buffer_(static_cast<std::size_t>(layout_.bytes)) {
  Carrier carrier(buffer_.data());
  for (const auto& [name, piece] : layout_.pieces) {
    const std::byte* from = nullptr;
    const WeightEntry* entry = find(name, &from);
    if (entry == nullptr) throw InternalError("[model] expected " + name + ", got none");
    const bool gated = is_gated(name);
    const Rows rows(*entry, from, gated, gated_outputs);
    if (entry->kind == WeightEntry::Kind::packed) {
      send_matrix(carrier, piece, rows);
      continue;
    }
    if (entry->kind == WeightEntry::Kind::rows) {
      carrier.send(piece.offset, from, piece.n * piece.k * 2);
      continue;
    }
    std::vector<float> values(static_cast<std::size_t>(piece.n));
    for (std::int64_t i = 0; i < piece.n; ++i) {
      const std::int64_t at = rows.source(i);
      if (at < 0) continue;
      std::memcpy(&values[static_cast<std::size_t>(i)], from + at * 4, 4);
    }
    carrier.send(piece.offset, values.data(), piece.n * 4);
  }
}

const void* CudaArena::find(const std::string& name) const {
  const auto found = layout_.pieces.find(name);
  return found == layout_.pieces.end() ? nullptr : buffer_.data() + found->second.offset;
}

cuda::DeviceMatrix CudaArena::matrix(const std::string& name) const {
  const auto found = layout_.pieces.find(name);
  if (found == layout_.pieces.end()) return {};
  const CudaPiece& piece = found->second;
  cuda::DeviceMatrix out;
  out.data = buffer_.data() + piece.offset;
  if (piece.scales >= 0) {
    out.scales = reinterpret_cast<const float*>(buffer_.data() + piece.scales);
  }
  out.n = piece.n;
  out.k = piece.k;
  out.stored = piece.stored;
  out.row_major = piece.row_major;
  return out;
}

}  // namespace specrt
