#include <limits>
#include <ostream>
#include <stdexcept>

#include "runtime/files/json.h"
#include "runtime/files/new_file.h"
#include "runtime/files/safetensors.h"

namespace keyhole {
namespace {

// The data begins at a multiple of this, so that tensors of a mapped file can be read in place.
constexpr size_t kDataAlignment = 64;

size_t declared_bytes(const SafetensorsWriter::Declaration& tensor) {
  size_t bytes = element_size(tensor.type);
  for (const size_t axis : tensor.shape) {
    if (axis != 0 && bytes > std::numeric_limits<size_t>::max() / axis) {
      throw std::runtime_error("tensor \"" + tensor.name +
                               "\": the shape's size overflows 2^64 bytes");
    }
    bytes *= axis;
  }
  return bytes;
}

}  // namespace

struct SafetensorsWriter::Impl {
  std::filesystem::path path;
  std::unique_ptr<NewFile> file;  ///< null: finished
  size_t expected = 0;            ///< bytes of data declared
  size_t written = 0;

  void put(const void* data, size_t size) const {
    file->stream().write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
  }
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<Declaration>& layout,
                                     const std::map<std::string, std::string>& metadata)
    : impl_(std::make_unique<Impl>()) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const Declaration& tensor : layout) {
    if (tensor.name == "__metadata__" || header.contains(tensor.name)) {
      throw std::runtime_error("tensor \"" + tensor.name +
                               "\" is declared twice or has a reserved name");
    }
    const size_t bytes = declared_bytes(tensor);
    if (bytes > std::numeric_limits<size_t>::max() - offset) {
      throw std::runtime_error("the tensors together overflow 2^64 bytes");
    }
    header[tensor.name] = {{"dtype", element_name(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  impl_->expected = offset;

  // Metadata names files, whose names may be no UTF-8.
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  const size_t used = sizeof(uint64_t) + text.size();
  text.append((kDataAlignment - used % kDataAlignment) % kDataAlignment, ' ');

  impl_->path = path;
  impl_->file = std::make_unique<NewFile>(path);
  unsigned char length[sizeof(uint64_t)];
  for (size_t i = 0; i < sizeof length; ++i) {
    length[i] = static_cast<unsigned char>(static_cast<uint64_t>(text.size()) >> (8 * i));
  }
  impl_->put(length, sizeof length);
  impl_->put(text.data(), text.size());
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(std::span<const std::byte> piece) {
  if (impl_->file == nullptr)
    throw std::runtime_error(impl_->path.string() + ": is finished already");
  if (piece.size() > impl_->expected - impl_->written) {
    throw std::runtime_error(
        impl_->path.string() + ": " + std::to_string(impl_->written + piece.size()) +
        " bytes of data were written, but the layout declares " + std::to_string(impl_->expected));
  }
  impl_->put(piece.data(), piece.size());
  impl_->written += piece.size();
}

void SafetensorsWriter::finish() {
  if (impl_->file == nullptr)
    throw std::runtime_error(impl_->path.string() + ": is finished already");
  if (impl_->written != impl_->expected) {
    throw std::runtime_error(impl_->path.string() + ": the layout declares " +
                             std::to_string(impl_->expected) + " bytes of data, but only " +
                             std::to_string(impl_->written) + " were written");
  }
  impl_->file->commit();
  impl_->file.reset();
}

}  // namespace keyhole
