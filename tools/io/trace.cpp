#include "tools/io/trace.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "runtime/files/element.h"
#include "tools/io/trace_format.h"

namespace keyhole::tools {
namespace {

std::string shape_text(const std::vector<size_t>& shape) {
  std::string out;
  for (const size_t axis : shape) out += (out.empty() ? "[" : ", ") + std::to_string(axis);
  return out + "]";
}

// A floating-point tensor of the file with exactly this shape.
const StoredTensor& expect(const SafetensorsFile& file, const std::string& name,
                           const std::vector<size_t>& shape) {
  const StoredTensor& view = file.tensor(name);
  if (view.shape != shape) {
    throw std::runtime_error("tensor \"" + name + "\" has the shape " + shape_text(view.shape) +
                             "; the metadata and positions demand " + shape_text(shape));
  }
  if (!is_floating(view.type)) {
    throw std::runtime_error("tensor \"" + name + "\" is " + element_name(view.type) +
                             "; needed is F32, F16 or BF16");
  }
  return view;
}

std::vector<uint32_t> read_positions(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor& view = file.tensor(name);
  if (view.type != ElementType::u32 || view.shape.size() != 1) {
    throw std::runtime_error("tensor \"" + name + "\" is " + element_name(view.type) + " " +
                             shape_text(view.shape) + "; needed is U32 of one axis");
  }
  std::vector<uint32_t> out(view.elements());
  if (!out.empty()) std::memcpy(out.data(), view.bytes.data(), view.bytes.size());
  return out;
}

StoredTensor view_of(const std::vector<float>& data, std::vector<size_t> shape) {
  return {ElementType::f32, std::move(shape), std::as_bytes(std::span(data))};
}

}  // namespace

struct Trace::Impl {
  std::unique_ptr<SafetensorsFile> file;  ///< or
  Vectors vectors;
  TraceInfo info;
  std::vector<TraceHead> heads;
  std::vector<uint32_t> query_positions;
  std::vector<uint32_t> training_positions;
};

Trace Trace::open(const std::filesystem::path& path) {
  auto impl = std::make_shared<Impl>();
  impl->file = std::make_unique<SafetensorsFile>(path);
  const SafetensorsFile& file = *impl->file;
  try {
    impl->info = from_metadata(file.metadata());
    impl->query_positions = read_positions(file, kQueryPositions);
    impl->training_positions = read_positions(file, kTrainingPositions);
    check_trace_positions(impl->info, impl->query_positions, impl->training_positions);

    const TraceInfo& info = impl->info;
    const size_t n = info.tokens;
    const size_t d = info.head_dim;
    const size_t g = info.group();
    for (const uint32_t layer : info.layers) {
      for (uint32_t kv = 0; kv < info.kv_heads; ++kv) {
        const auto name = [&](const char* part) { return trace_tensor_name(layer, kv, part); };
        TraceHead head;
        head.layer = layer;
        head.kv_head = kv;
        head.keys = expect(file, name("keys"), {n, d});
        head.values = expect(file, name("values"), {n, d});
        head.queries = expect(file, name("queries"), {impl->query_positions.size(), g, d});
        if (!impl->training_positions.empty()) {
          head.training_queries =
              expect(file, name("training_queries"), {impl->training_positions.size(), g, d});
        }
        impl->heads.push_back(std::move(head));
      }
    }
  } catch (const std::exception& e) {
    throw std::runtime_error(path.string() + ": " + e.what());
  }
  return Trace(std::move(impl));
}

Trace Trace::from_vectors(const std::string& name, Vectors vectors) {
  const size_t d = vectors.dim;
  const auto rows = [&](const std::vector<float>& data, const char* what) {
    if (d == 0 || data.size() % d != 0) {
      throw std::runtime_error(name + ": the " + what + " are not whole rows of " +
                               std::to_string(d));
    }
    return data.size() / d;
  };
  const size_t n = rows(vectors.keys, "keys");
  const size_t m = rows(vectors.queries, "queries");
  const size_t t = rows(vectors.training, "training queries");
  if (n == 0 || m == 0) {
    throw std::runtime_error(name + ": holds " + std::to_string(n) + " keys and " +
                             std::to_string(m) + " queries; needed is at least one of each");
  }
  if (n > UINT32_MAX) throw std::runtime_error(name + ": holds more than 2^32 - 1 keys");
  if (const size_t v = rows(vectors.values, "values"); v != 0 && v != n) {
    throw std::runtime_error(name + ": holds " + std::to_string(n) + " keys but " +
                             std::to_string(v) + " values");
  }

  auto impl = std::make_shared<Impl>();
  impl->vectors = std::move(vectors);
  const Vectors& data = impl->vectors;
  TraceInfo& info = impl->info;
  info.q_heads = info.kv_heads = 1;
  info.head_dim = static_cast<uint32_t>(d);
  info.scale = 1.0F / std::sqrt(static_cast<float>(d));
  info.layers = {0};
  info.tokens = static_cast<uint32_t>(n);
  info.task = "vectors";
  info.prompt = name;
  impl->query_positions.assign(m, info.tokens - 1);

  TraceHead head;
  head.keys = view_of(data.keys, {n, d});
  if (!data.values.empty()) head.values = view_of(data.values, {n, d});
  head.queries = view_of(data.queries, {m, 1, d});
  if (t != 0) head.training_queries = view_of(data.training, {t, 1, d});
  impl->heads.push_back(std::move(head));
  return Trace(std::move(impl));
}

const TraceInfo& Trace::info() const { return impl_->info; }
const std::vector<TraceHead>& Trace::heads() const { return impl_->heads; }
std::span<const uint32_t> Trace::query_positions() const { return impl_->query_positions; }
std::span<const uint32_t> Trace::training_positions() const { return impl_->training_positions; }

}  // namespace keyhole::tools
