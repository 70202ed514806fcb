#include "tools/io/trace_format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

namespace keyhole::tools {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

// Shortest text that reads back as the same number, in any locale.
template <class Number>
std::string text_of(Number number) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

class Metadata {
 public:
  explicit Metadata(const std::map<std::string, std::string>& map) : map_(map) {}

  [[nodiscard]] const std::string& text(const std::string& key) const {
    const auto found = map_.find(key);
    if (found == map_.end()) fail("the metadata lack \"" + key + "\" (is this a trace?)");
    return found->second;
  }

  template <class Number>
  [[nodiscard]] Number number(const std::string& key) const {
    return parse<Number>(key, text(key));
  }

  [[nodiscard]] std::vector<uint32_t> list(const std::string& key) const {
    const std::string& all = text(key);
    std::vector<uint32_t> out;
    for (size_t begin = 0; begin <= all.size();) {
      const size_t end = std::min(all.find(',', begin), all.size());
      out.push_back(parse<uint32_t>(key, all.substr(begin, end - begin)));
      begin = end + 1;
    }
    return out;
  }

 private:
  template <class Number>
  static Number parse(const std::string& key, const std::string& text) {
    Number number{};
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || rest != end) {
      fail("the metadata's \"" + key + "\" is \"" + text + "\", which is not a number of its kind");
    }
    return number;
  }

  const std::map<std::string, std::string>& map_;
};

void require(bool condition, const std::string& what, const std::string& seen,
             const std::string& needed) {
  if (!condition) fail("the trace's " + what + " is " + seen + "; needed is " + needed);
}

}  // namespace

std::string trace_tensor_name(uint32_t layer, uint32_t kv_head, const char* part) {
  return "layer." + std::to_string(layer) + ".kv." + std::to_string(kv_head) + "." + part;
}

std::map<std::string, std::string> to_metadata(const TraceInfo& info) {
  std::string layers;
  for (const uint32_t layer : info.layers) layers += (layers.empty() ? "" : ",") + text_of(layer);
  return {{"keyhole_trace", kTraceVersion},
          {"q_heads", text_of(info.q_heads)},
          {"kv_heads", text_of(info.kv_heads)},
          {"head_dim", text_of(info.head_dim)},
          {"scale", text_of(info.scale)},
          {"softcap", text_of(info.softcap)},
          {"rope_theta", text_of(info.rope.theta)},
          {"rope_scaling", info.rope.scaling},
          {"rope_factor", text_of(info.rope.factor)},
          {"rope_low_freq_factor", text_of(info.rope.low_freq_factor)},
          {"rope_high_freq_factor", text_of(info.rope.high_freq_factor)},
          {"rope_original_context", text_of(info.rope.original_context)},
          {"layers", layers},
          {"tokens", text_of(info.tokens)},
          {"model", info.model},
          {"task", info.task},
          {"prompt", info.prompt},
          {"seed", text_of(info.seed)}};
}

TraceInfo from_metadata(const std::map<std::string, std::string>& metadata) {
  const Metadata m(metadata);
  if (const std::string& version = m.text("keyhole_trace"); version != kTraceVersion) {
    fail("the trace's format version is \"" + version + "\"; this build reads " + kTraceVersion);
  }
  TraceInfo info;
  info.q_heads = m.number<uint32_t>("q_heads");
  info.kv_heads = m.number<uint32_t>("kv_heads");
  info.head_dim = m.number<uint32_t>("head_dim");
  info.scale = m.number<float>("scale");
  info.softcap = m.number<float>("softcap");
  info.rope.theta = m.number<float>("rope_theta");
  info.rope.scaling = m.text("rope_scaling");
  info.rope.factor = m.number<float>("rope_factor");
  info.rope.low_freq_factor = m.number<float>("rope_low_freq_factor");
  info.rope.high_freq_factor = m.number<float>("rope_high_freq_factor");
  info.rope.original_context = m.number<uint32_t>("rope_original_context");
  info.layers = m.list("layers");
  info.tokens = m.number<uint32_t>("tokens");
  info.model = m.text("model");
  info.task = m.text("task");
  info.prompt = m.text("prompt");
  info.seed = m.number<uint64_t>("seed");
  check_trace_info(info);
  return info;
}

void check_trace_info(const TraceInfo& info) {
  require(info.q_heads > 0, "q_heads", "0", "at least 1");
  require(info.kv_heads > 0 && info.q_heads % info.kv_heads == 0, "kv_heads",
          text_of(info.kv_heads), "a divisor of q_heads, " + text_of(info.q_heads));
  require(info.head_dim > 0 && info.head_dim <= 65536, "head_dim", text_of(info.head_dim),
          "1..65536");
  require(std::isfinite(info.scale) && info.scale > 0, "scale", text_of(info.scale),
          "a positive number");
  require(std::isfinite(info.softcap) && info.softcap >= 0, "softcap", text_of(info.softcap),
          "0 or more");
  const std::string& scaling = info.rope.scaling;
  require(scaling == "none" || scaling == "linear" || scaling == "llama3", "rope_scaling",
          "\"" + scaling + "\"", "none, linear or llama3");
  require(info.tokens > 0, "number of tokens", "0", "at least 1");
  require(!info.layers.empty(), "number of layers", "0", "at least 1");
  for (size_t i = 1; i < info.layers.size(); ++i) {
    require(info.layers[i - 1] < info.layers[i], "list of layers",
            text_of(info.layers[i - 1]) + " before " + text_of(info.layers[i]), "ascending order");
  }
}

void check_trace_positions(const TraceInfo& info, std::span<const uint32_t> queries,
                           std::span<const uint32_t> training) {
  require(!queries.empty(), "number of queries", "0", "at least 1");
  for (const auto& positions : {queries, training}) {
    for (size_t i = 1; i < positions.size(); ++i) {
      require(positions[i - 1] <= positions[i], "sequence of positions",
              text_of(positions[i - 1]) + " before " + text_of(positions[i]), "ascending order");
    }
  }
  require(queries.back() < info.tokens, "last query position", text_of(queries.back()),
          "below the number of tokens, " + text_of(info.tokens));
  require(training.empty() || training.back() < queries.front(), "last training position",
          training.empty() ? "" : text_of(training.back()),
          "below the first query's, " + text_of(queries.front()));
}

}  // namespace keyhole::tools
