#include "runtime/files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
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
constexpr int kMaxDepth = 4;

struct Parsed {
  std::map<std::string, TensorView> tensors;
  std::map<std::string, std::string> metadata;
};

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

std::optional<ElementType> element_by_name(const std::string& name) {
  for (const ElementType type :
       {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::i32, ElementType::u32,
        ElementType::i64, ElementType::u8, ElementType::i8}) {
    if (name == element_name(type)) return type;
  }
  return std::nullopt;
}

size_t read_header_length(std::span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes) {
    fail("the file has " + std::to_string(bytes.size()) +
         " bytes; a safetensors file begins with 8 bytes that hold the header's length");
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = length << 8U | std::to_integer<uint64_t>(bytes[i]);
  if (length > kMaxHeaderBytes) {
    fail("the header's length is " + std::to_string(length) + " bytes; at most " +
         std::to_string(kMaxHeaderBytes) + " are allowed (is this a safetensors file?)");
  }
  const uint64_t rest = bytes.size() - kLengthBytes;
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

TensorView parse_tensor(const std::string& name, const json& entry,
                        std::span<const std::byte> data) {
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

  TensorView view;
  const json& dtype = entry["dtype"];
  if (!dtype.is_string()) fail(what + ": dtype is not a string");
  const std::optional<ElementType> type = element_by_name(dtype.get_ref<const std::string&>());
  if (!type) {
    fail(what + " has the dtype " + quoted_name(dtype.get_ref<const std::string&>()) +
         "; supported are F32, F16, BF16, I32, U32, I64, U8 and I8");
  }
  view.type = *type;

  const json& shape = entry["shape"];
  if (!shape.is_array()) fail(what + ": shape is not an array");
  for (const json& axis : shape)
    view.shape.push_back(unsigned_number(axis, what + ": an axis of its shape"));

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2)
    fail(what + ": data_offsets is not an array of two numbers");
  const size_t begin = unsigned_number(offsets[0], what + ": its first offset");
  const size_t end = unsigned_number(offsets[1], what + ": its second offset");
  if (begin > end || end > data.size()) {
    fail(what + " has the offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
         "), which must ascend and end within the file's " + std::to_string(data.size()) +
         " bytes of data (is the file cut short?)");
  }
  const size_t needed = byte_count(view.type, view.shape, what);
  if (needed != end - begin) {
    fail(what + " takes " + std::to_string(needed) +
         " bytes by its shape and dtype, but its offsets span " + std::to_string(end - begin));
  }
  view.bytes = data.subspan(begin, end - begin);
  return view;
}

// Together the tensors must tile the data: what no tensor names could hide anything, and overlap
// would make a file that expands when it is loaded.
void check_tiling(const std::map<std::string, TensorView>& tensors,
                  std::span<const std::byte> data) {
  std::vector<std::pair<std::span<const std::byte>, const std::string*>> parts;
  parts.reserve(tensors.size());
  for (const auto& [name, view] : tensors) parts.emplace_back(view.bytes, &name);
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.data(), a.first.size()) < std::pair(b.first.data(), b.first.size());
  });
  size_t end = 0;
  for (const auto& [bytes, name] : parts) {
    const auto begin = static_cast<size_t>(bytes.data() - data.data());
    if (begin != end) {
      fail("tensor " + quoted_name(*name) + " begins at byte " + std::to_string(begin) +
           " of the data, but " +
           (begin < end ? "overlaps the tensor before it, which ends at "
                        : "leaves a hole after the tensor before it, which ends at ") +
           std::to_string(end));
    }
    end += bytes.size();
  }
  if (end != data.size()) {
    fail("the tensors end at byte " + std::to_string(end) + " of the data, but the file holds " +
         std::to_string(data.size()));
  }
}

Parsed parse(std::span<const std::byte> bytes) {
  const size_t header_length = read_header_length(bytes);
  const json header =
      parse_strict_json(bytes.subspan(kLengthBytes, header_length), kMaxDepth, "the header");
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + header_length);
  Parsed out;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      out.metadata = parse_metadata(entry);
    } else {
      out.tensors.emplace(name, parse_tensor(name, entry, data));
    }
  }
  check_tiling(out.tensors, data);
  return out;
}

}  // namespace

size_t TensorView::elements() const { return bytes.size() / element_size(type); }

std::vector<float> TensorView::to_f32() const {
  std::vector<float> out(elements());
  elements_to_f32(type, bytes, out);
  return out;
}

struct SafetensorsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path), path_text(path.string()) {
    try {
      parsed = parse(file.bytes());
    } catch (const std::exception& e) {
      fail(path_text + ": " + e.what());
    }
  }
  MappedFile file;
  std::string path_text;
  Parsed parsed;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(path)) {}
SafetensorsFile::~SafetensorsFile() = default;

bool SafetensorsFile::contains(const std::string& name) const {
  return impl_->parsed.tensors.count(name) != 0;
}

const TensorView& SafetensorsFile::tensor(const std::string& name) const {
  const auto found = impl_->parsed.tensors.find(name);
  if (found != impl_->parsed.tensors.end()) return found->second;
  constexpr size_t kListed = 5;
  std::string there;
  size_t listed = 0;
  for (const auto& [other, view] : impl_->parsed.tensors) {
    if (listed++ == kListed) break;
    there += (there.empty() ? "" : ", ") + quoted_name(other);
  }
  const size_t total = impl_->parsed.tensors.size();
  fail(impl_->path_text + ": there is no tensor " + quoted_name(name) + "; it holds " +
       (total == 0 ? "none" : there) +
       (total > kListed ? " and " + std::to_string(total - kListed) + " more" : ""));
}

const std::map<std::string, TensorView>& SafetensorsFile::tensors() const {
  return impl_->parsed.tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->parsed.metadata;
}

void validate_safetensors(std::span<const std::byte> bytes) { (void)parse(bytes); }

}  // namespace keyhole
