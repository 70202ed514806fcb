#include "runtime/files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>

#include "runtime/files/element.h"
#include "runtime/files/mapped_file.h"
#include "runtime/files/strict_json.h"

namespace keyhole {
namespace {

using nlohmann::json;

// The format's own limit; a larger header is an attack or a damaged length.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kLengthBytes = 8;
// A file is {"name": {"shape": [n]}}; anything deeper is not a tensor list.
constexpr int kHeaderDepth = 4;

/// The content of a header.
struct Parsed {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

std::optional<ElementType> element_by_name(const std::string& name) {
  for (const ElementType type :
       {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::i32, ElementType::u32,
        ElementType::i64, ElementType::u8, ElementType::i8}) {
    if (name == element_name(type)) return type;
  }
  return std::nullopt;
}

/// begin: the first kLengthBytes bytes of a file of `size`, or as many as it has.
size_t read_header_length(std::span<const std::byte> begin, size_t size) {
  if (size < kLengthBytes) {
    fail("the file has " + std::to_string(size) +
         " bytes; a safetensors file begins with 8 bytes that hold the header's length");
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = length << 8U | std::to_integer<uint64_t>(begin[i]);
  if (length > kMaxHeaderBytes) {
    fail("the header's length is " + std::to_string(length) + " bytes; at most " +
         std::to_string(kMaxHeaderBytes) + " are allowed (is this a safetensors file?)");
  }
  const uint64_t rest = size - kLengthBytes;
  if (length > rest) {
    fail("the header's length is " + std::to_string(length) + " bytes, but only " +
         std::to_string(rest) + " follow: the file is cut short or not a safetensors file");
  }
  if (length < 2)
    fail("the header's length is " + std::to_string(length) + "; at least 2 is needed");
  return length;
}

std::map<std::string, std::string> parse_metadata(const json& entry) {
  if (!entry.is_object()) fail("__metadata__ is not an object of strings");
  std::map<std::string, std::string> out;
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) fail("__metadata__ " + quoted_name(key) + " is not a string");
    out.emplace(key, value.get<std::string>());
  }
  return out;
}

size_t unsigned_number(const json& value, const std::string& what) {
  if (!value.is_number_unsigned()) fail(what + " is not a non-negative integer below 2^64");
  return value.get<size_t>();
}

// Elements of a shape times the element's size; throws where that passes the address space.
size_t byte_count(ElementType type, const std::vector<size_t>& shape, const std::string& what) {
  size_t bytes = element_size(type);
  // A zero anywhere makes the tensor empty, however large the other axes claim to be.
  if (std::find(shape.begin(), shape.end(), 0U) != shape.end()) return 0;
  for (const size_t axis : shape) {
    if (axis > std::numeric_limits<size_t>::max() / bytes)
      fail(what + ": the shape's size overflows 2^64 bytes");
    bytes *= axis;
  }
  return bytes;
}

TensorEntry parse_tensor(const std::string& name, const json& entry, size_t data_bytes) {
  const std::string what = "tensor " + quoted_name(name);
  if (!entry.is_object()) fail(what + " is not described by an object");
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      fail(what + " has the unknown field " + quoted_name(key) +
           "; allowed are dtype, shape and data_offsets");
    }
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) fail(what + " has no " + key);
  }

  TensorEntry out;
  const json& dtype = entry["dtype"];
  if (!dtype.is_string()) fail(what + ": dtype is not a string");
  const std::optional<ElementType> type = element_by_name(dtype.get_ref<const std::string&>());
  if (!type) {
    fail(what + " has the dtype " + quoted_name(dtype.get_ref<const std::string&>()) +
         "; supported are F32, F16, BF16, I32, U32, I64, U8 and I8");
  }
  out.type = *type;

  const json& shape = entry["shape"];
  if (!shape.is_array()) fail(what + ": shape is not an array");
  for (const json& axis : shape)
    out.shape.push_back(unsigned_number(axis, what + ": an axis of its shape"));

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2)
    fail(what + ": data_offsets is not an array of two numbers");
  const size_t begin = unsigned_number(offsets[0], what + ": its first offset");
  const size_t end = unsigned_number(offsets[1], what + ": its second offset");
  if (begin > end || end > data_bytes) {
    fail(what + " has the offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
         "), which must ascend and end within the file's " + std::to_string(data_bytes) +
         " bytes of data (is the file cut short?)");
  }
  const size_t needed = byte_count(out.type, out.shape, what);
  if (needed != end - begin) {
    fail(what + " takes " + std::to_string(needed) +
         " bytes by its shape and dtype, but its offsets span " + std::to_string(end - begin));
  }
  out.begin = begin;
  out.bytes = needed;
  return out;
}

// Checks that the tensors together tile the data: bytes that no tensor names could hide anything, and overlapping
// ones would make a file that expands when it is loaded.
void check_tiling(const std::map<std::string, TensorEntry>& tensors, size_t data_bytes) {
  std::vector<std::pair<const TensorEntry*, const std::string*>> parts;
  parts.reserve(tensors.size());
  for (const auto& [name, entry] : tensors) parts.emplace_back(&entry, &name);
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->bytes) < std::pair(b.first->begin, b.first->bytes);
  });
  size_t end = 0;
  for (const auto& [entry, name] : parts) {
    if (entry->begin != end) {
      fail("tensor " + quoted_name(*name) + " begins at byte " + std::to_string(entry->begin) +
           " of the data, but " +
           (entry->begin < end ? "overlaps the tensor before it, which ends at "
                               : "leaves a hole after the tensor before it, which ends at ") +
           std::to_string(end));
    }
    end += entry->bytes;
  }
  if (end != data_bytes) {
    fail("the tensors end at byte " + std::to_string(end) + " of the data, but the file holds " +
         std::to_string(data_bytes));
  }
}

/// data_bytes: bytes behind the header.
Parsed parse_header(std::span<const std::byte> header_bytes, size_t data_bytes) {
  const json header = parse_strict_json(header_bytes, kHeaderDepth, "the header");
  Parsed out;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      out.metadata = parse_metadata(entry);
    } else {
      out.tensors.emplace(name, parse_tensor(name, entry, data_bytes));
    }
  }
  check_tiling(out.tensors, data_bytes);
  return out;
}

/// Parses a whole file. data: gets what follows the header.
Parsed parse_file(std::span<const std::byte> file, std::span<const std::byte>& data) {
  const size_t length =
      read_header_length(file.first(std::min(file.size(), kLengthBytes)), file.size());
  data = file.subspan(kLengthBytes + length);
  return parse_header(file.subspan(kLengthBytes, length), data.size());
}

/// Calls `body` and returns its result; where it throws because of the file's content, the text begins with the path.
template <class Body>
auto of_file(const std::string& path, const Body& body) {
  try {
    return body();
  } catch (const CannotRead&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    fail(path + ": " + e.what());
  }
}

}  // namespace

size_t StoredTensor::elements() const { return bytes.size() / element_size(type); }

std::vector<float> StoredTensor::to_f32() const {
  std::vector<float> out(elements());
  elements_to_f32(type, bytes, out);
  return out;
}

struct SafetensorsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path), path_text(path.string()) {
    std::span<const std::byte> data;
    Parsed parsed = of_file(path_text, [&] { return parse_file(file.bytes(), data); });
    for (auto& [name, entry] : parsed.tensors) {
      tensors[name] = {entry.type, std::move(entry.shape), data.subspan(entry.begin, entry.bytes)};
    }
    metadata = std::move(parsed.metadata);
  }
  MappedFile file;
  std::string path_text;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(path)) {}
SafetensorsFile::~SafetensorsFile() = default;

bool SafetensorsFile::contains(const std::string& name) const {
  return impl_->tensors.count(name) != 0;
}

const StoredTensor& SafetensorsFile::tensor(const std::string& name) const {
  const auto found = impl_->tensors.find(name);
  if (found != impl_->tensors.end()) return found->second;
  constexpr size_t kListed = 5;
  std::string there;
  size_t listed = 0;
  for (const auto& [other, view] : impl_->tensors) {
    if (listed++ == kListed) break;
    there += (there.empty() ? "" : ", ") + quoted_name(other);
  }
  const size_t total = impl_->tensors.size();
  fail(impl_->path_text + ": there is no tensor " + quoted_name(name) + "; it holds " +
       (total == 0 ? "none" : there) +
       (total > kListed ? " and " + std::to_string(total - kListed) + " more" : ""));
}

const std::map<std::string, StoredTensor>& SafetensorsFile::tensors() const {
  return impl_->tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->metadata;
}

struct SafetensorsReader::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path) {
    parsed = of_file(path.string(), [&] {
      std::vector<std::byte> begin(std::min(file.size(), kLengthBytes));
      file.read(0, begin);
      const size_t length = read_header_length(begin, file.size());
      std::vector<std::byte> header(length);
      file.read(kLengthBytes, header);
      data = kLengthBytes + length;
      return parse_header(header, file.size() - data);
    });
  }
  InputFile file;
  size_t data = 0;  ///< where it begins
  Parsed parsed;
};

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(path)) {}
SafetensorsReader::~SafetensorsReader() = default;

const std::map<std::string, TensorEntry>& SafetensorsReader::tensors() const {
  return impl_->parsed.tensors;
}
const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return impl_->parsed.metadata;
}
void SafetensorsReader::read(const TensorEntry& tensor, std::span<std::byte> to) const {
  impl_->file.read(impl_->data + tensor.begin, to.first(tensor.bytes));
}

void validate_safetensors(std::span<const std::byte> bytes) {
  std::span<const std::byte> data;
  (void)parse_file(bytes, data);
}

}  // namespace keyhole
