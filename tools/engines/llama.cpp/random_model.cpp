// Writes a model of random weights, for timings and for checks beside itself: any card computes it as fast as a real
// one of its shape, and next to nothing has to be brought.
//   llama-random-model 8b|1b|30b-a3b|27b|32b|tiny|tiny-hybrid|tiny-mtp FILE [NATS]
//   8b    shape of Llama 3 8B, Q4_K and Q6_K where llama.cpp's recipe of Q4_K_M has them
//   1b    shape of Llama 3.2 1B, the same
//   30b-a3b  shape of Qwen3 30B-A3B, a mixture of 128 experts, the same
//   27b   shape of Qwen3.5 27B, a hybrid: 16 of 64 layers have a cache, with 24 query and 4 KV heads of 256; the same
//   32b   shape of Qwen3 32B without its norms of queries and keys: 64 layers, 64 query and 8 KV heads of 128; the same
//   tiny, tiny-hybrid  four layers of 512 components, f16
//   tiny-mtp  tiny-hybrid with a layer behind them that drafts the next tokens (--spec-type draft-mtp). Its layers add
//         less to what they get, so that the last token alone foresees a part of the next ones, as the drafting layer
//         does
// NATS is the standard deviation of the logits of attention in the first layer (default: 1, as ordinary heads have it).
// The quantised ones have no vocabulary: tokens are numbers.
#include <fcntl.h>
#include <ggml.h>
#include <gguf.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "tools/engines/llama.cpp/random_weights.h"

namespace keyhole::llama_cpp {
namespace {

enum class Kind : uint8_t {
  kPlain,    // Llama's
  kExperts,  // Qwen 3's mixture
  kHybrid,   // Qwen 3.5's: three of four layers have a recurrent state in the place of a cache
};

struct Shape {
  const char* name;
  Kind kind;
  uint32_t layers, width, inner, heads, kv_heads, head_dim, words;
  bool is_quantised;
  uint32_t drafting = 0;  // layers behind the others, of which the model itself reads none
  float added = 1.0F;     // by a layer to its input, beside what matrices of variance 1 add
};

constexpr Shape kShapes[] = {
    {"8b", Kind::kPlain, 32, 4096, 14336, 32, 8, 128, 128256, true},
    {"1b", Kind::kPlain, 16, 2048, 8192, 32, 8, 64, 128256, true},
    {"30b-a3b", Kind::kExperts, 48, 2048, 768, 32, 4, 128, 151936, true},
    {"27b", Kind::kHybrid, 64, 5120, 17408, 24, 4, 256, 248320, true},
    {"32b", Kind::kPlain, 64, 5120, 25600, 64, 8, 128, 151936, true},
    {"tiny", Kind::kPlain, 4, 512, 1536, 8, 2, 64, 4096, false},
    {"tiny-hybrid", Kind::kHybrid, 4, 512, 1536, 6, 1, 256, 4096, false},
    {"tiny-mtp", Kind::kHybrid, 4, 512, 1536, 6, 1, 256, 4096, false, 1, 0.25F},
};
constexpr uint32_t kExperts = 128;
constexpr uint32_t kExpertsOfAToken = 8;
constexpr uint32_t kFullLayerEvery = 4;
constexpr uint32_t kStateSize = 128;  // of a head of a recurrent layer
constexpr uint32_t kConvolved = 4;    // tokens

const char* architecture(Kind kind) {
  switch (kind) {
    case Kind::kExperts: return "qwen3moe";
    case Kind::kHybrid: return "qwen35";
    default: return "llama";
  }
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

struct Weight {
  ggml_tensor* tensor;
  float deviation;
  float diagonal = 0.0F;  // added to where a row and a column of the same number meet, in f16
  size_t offset = 0;      // in the file's data
};

class Model {
 public:
  Model(const Shape& shape, float nats)
      : shape_(shape),
        most_(shape.is_quantised ? GGML_TYPE_Q4_K : GGML_TYPE_F16),
        best_(shape.is_quantised ? GGML_TYPE_Q6_K : GGML_TYPE_F16),
        sharpness_(std::sqrt(nats)) {
    context_ = ggml_init({ggml_tensor_overhead() * 4096, nullptr, true});
    file_ = gguf_init_empty();
    text("general.architecture", architecture(shape.kind));
    text("general.name", std::string("random ") + shape.name);
    if (shape.is_quantised) {
      text("tokenizer.ggml.model", "no_vocab");
    } else {
      add_vocabulary();
    }
    of_kind("vocab_size", shape.words);
    of_kind("context_length", 1U << 20U);
    of_kind("embedding_length", shape.width);
    of_kind("block_count", shape.layers + shape.drafting);
    if (shape.drafting > 0) of_kind("nextn_predict_layers", shape.drafting);
    of_kind("feed_forward_length", shape.inner);
    of_kind("attention.head_count", shape.heads);
    of_kind("attention.head_count_kv", shape.kv_heads);
    of_kind("attention.key_length", shape.head_dim);
    of_kind("attention.value_length", shape.head_dim);
    of_kind("rope.dimension_count",
            shape.kind == Kind::kHybrid ? shape.head_dim / 4 : shape.head_dim);
    of_kind("rope.freq_base", shape.kind == Kind::kPlain ? 500000.0F : 1e7F);
    of_kind("attention.layer_norm_rms_epsilon", 1e-5F);
    if (shape.kind == Kind::kExperts) {
      of_kind("expert_count", kExperts);
      of_kind("expert_used_count", kExpertsOfAToken);
      of_kind("expert_feed_forward_length", shape.inner);
    }
    if (shape.kind == Kind::kHybrid) {
      of_kind("full_attention_interval", kFullLayerEvery);
      constexpr uint32_t kSections[] = {11, 11, 10, 0};
      gguf_set_arr_data(file_, key("rope.dimension_sections").c_str(), GGUF_TYPE_UINT32, kSections,
                        4);
      of_kind("ssm.conv_kernel", kConvolved);
      of_kind("ssm.state_size", kStateSize);
      of_kind("ssm.group_count", state_keys());
      of_kind("ssm.time_step_rank", state_values());
      of_kind("ssm.inner_size", state_values() * kStateSize);
    }
    number("general.quantization_version", 2);
    number("general.file_type", shape.is_quantised ? 15 : 1);
    add_all();
  }

  void write(const std::string& path) {
    for (Weight& weight : weights_) gguf_add_tensor(file_, weight.tensor);
    if (!gguf_write_to_file(file_, path.c_str(), true)) fail(path + " cannot be written");
    const auto begin = gguf_get_meta_size(file_);
    const int out = ::open(path.c_str(), O_WRONLY);
    if (out < 0) fail(path + " cannot be written");
    for (size_t i = 0; i < weights_.size(); ++i) {
      weights_[i].offset = gguf_get_tensor_offset(file_, static_cast<int64_t>(i));
    }
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t) {
      threads.emplace_back([&] {
        for (size_t i = next++; i < weights_.size(); i = next++) {
          const Weight& weight = weights_[i];
          std::vector<uint8_t> bytes(ggml_nbytes(weight.tensor));
          fill_random(bytes, weight.tensor->type, weight.deviation, i + 1);
          if (weight.diagonal != 0.0F) add_diagonal(bytes, weight);
          size_t done = 0;
          while (done < bytes.size()) {
            const ssize_t n = ::pwrite(out, bytes.data() + done, bytes.size() - done,
                                       static_cast<off_t>(begin + weight.offset + done));
            if (n <= 0) fail(path + " cannot be written");
            done += static_cast<size_t>(n);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    // The data end on a multiple of the alignment.
    const Weight& last = weights_.back();
    const size_t end = begin + last.offset + ggml_nbytes(last.tensor);
    const size_t alignment = gguf_get_alignment(file_);
    if (::ftruncate(out, static_cast<off_t>((end + alignment - 1) / alignment * alignment)) != 0 ||
        ::close(out) != 0) {
      fail(path + " cannot be written");
    }
  }

 private:
  void text(const char* key, const std::string& value) {
    gguf_set_val_str(file_, key, value.c_str());
  }
  void number(const char* key, uint32_t value) { gguf_set_val_u32(file_, key, value); }
  [[nodiscard]] std::string key(const char* name) const {
    return std::string(architecture(shape_.kind)) + "." + name;
  }
  /// All bytes are tokens, so that any text has some; all others are words that no text has.
  void add_vocabulary() {
    constexpr int32_t kNormal = 1;
    constexpr int32_t kUnknown = 2;
    constexpr int32_t kControl = 3;
    constexpr int32_t kByte = 6;
    std::vector<std::string> words{"<unk>", "<s>", "</s>"};
    std::vector<int32_t> types{kUnknown, kControl, kControl};
    for (int byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", byte);
      words.emplace_back(name);
      types.push_back(kByte);
    }
    while (words.size() < shape_.words) {
      words.push_back("[" + std::to_string(words.size()) + "]");
      types.push_back(kNormal);
    }
    std::vector<const char*> texts;
    for (const std::string& word : words) texts.push_back(word.c_str());
    // Scores order merges. No two tokens of a text make a third one, as brackets and digits are bytes, never words.
    const std::vector<float> scores(words.size(), -1e6F);
    text("tokenizer.ggml.model", "llama");
    gguf_set_arr_str(file_, "tokenizer.ggml.tokens", texts.data(), texts.size());
    gguf_set_arr_data(file_, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(),
                      scores.size());
    gguf_set_arr_data(file_, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(),
                      types.size());
    number("tokenizer.ggml.bos_token_id", 1);
    number("tokenizer.ggml.eos_token_id", 2);
  }
  static void add_diagonal(std::vector<uint8_t>& bytes, const Weight& weight) {
    auto* halves = reinterpret_cast<ggml_fp16_t*>(bytes.data());
    for (int64_t row = 0; row < weight.tensor->ne[1]; ++row) {
      ggml_fp16_t& at = halves[row * weight.tensor->ne[0] + row];
      at = ggml_fp32_to_fp16(ggml_fp16_to_fp32(at) + weight.diagonal);
    }
  }
  void of_kind(const char* name, uint32_t value) { number(key(name).c_str(), value); }
  void of_kind(const char* name, float value) { gguf_set_val_f32(file_, key(name).c_str(), value); }

  /// Heads of a recurrent layer: keys, and values, of kStateSize components.
  [[nodiscard]] uint32_t state_keys() const { return shape_.width / 320; }
  [[nodiscard]] uint32_t state_values() const { return 3 * state_keys(); }

  void add(const std::string& name, ggml_type type, std::initializer_list<int64_t> extents,
           float deviation) {
    ggml_tensor* tensor =
        ggml_new_tensor(context_, type, static_cast<int>(extents.size()), std::data(extents));
    ggml_set_name(tensor, name.c_str());
    weights_.push_back({tensor, deviation});
  }
  /// A matrix by which inputs of variance 1 have outputs of variance `gain` squared.
  void matrix(const std::string& name, ggml_type type, int64_t in, int64_t out, float gain = 1.0F) {
    add(name, type, {in, out}, gain / std::sqrt(static_cast<float>(in)));
  }
  void numbers(const std::string& name, int64_t count, float value = 1.0F) {
    add(name, GGML_TYPE_F32, {count}, value);
  }

  void add_all() {
    const Shape& s = shape_;
    add("token_embd.weight", most_, {s.width, s.words}, 1.0F);
    for (uint32_t i = 0; i < s.layers + s.drafting; ++i) {
      const std::string block = "blk." + std::to_string(i) + ".";
      const uint32_t eighth = s.layers / 8;
      const bool more_bits = i < eighth || i >= 7 * s.layers / 8 || (i - eighth) % 3 == 2;
      numbers(block + "attn_norm.weight", s.width);
      if (i < s.layers && s.kind == Kind::kHybrid && (i + 1) % kFullLayerEvery != 0) {
        add_recurrent(block);
      } else {
        add_attention(block, more_bits ? best_ : most_);
      }
      numbers(block + (s.kind == Kind::kHybrid ? "post_attention_norm" : "ffn_norm") + ".weight",
              s.width);
      add_products(block, more_bits ? best_ : most_);
      if (i >= s.layers) add_drafting(block);
    }
    numbers("output_norm.weight", s.width);
    matrix("output.weight", best_, s.width, s.words, 2.0F);
  }

  void add_attention(const std::string& block, ggml_type of_values) {
    const Shape& s = shape_;
    const int64_t q = int64_t{s.heads} * s.head_dim;
    const int64_t kv = int64_t{s.kv_heads} * s.head_dim;
    const bool has_norms = s.kind != Kind::kPlain;
    const float gain = has_norms ? 1.0F : sharpness_;
    // Hybrids have a gate for each component of the output beside the queries.
    matrix(block + "attn_q.weight", most_, s.width, s.kind == Kind::kHybrid ? 2 * q : q, gain);
    matrix(block + "attn_k.weight", most_, s.width, kv, gain);
    matrix(block + "attn_v.weight", of_values, s.width, kv);
    matrix(block + "attn_output.weight", most_, q, s.width, s.added);
    if (has_norms) {
      numbers(block + "attn_q_norm.weight", s.head_dim, sharpness_);
      numbers(block + "attn_k_norm.weight", s.head_dim, sharpness_);
    }
  }

  void add_recurrent(const std::string& block) {
    const int64_t width = shape_.width;
    const int64_t values = int64_t{state_values()} * kStateSize;
    const int64_t convolved = 2 * int64_t{state_keys()} * kStateSize + values;
    matrix(block + "attn_qkv.weight", most_, width, convolved);
    matrix(block + "attn_gate.weight", most_, width, values);
    add(block + "ssm_conv1d.weight", GGML_TYPE_F32, {kConvolved, convolved}, 0.5F);
    numbers(block + "ssm_dt.bias", state_values(), 0.0F);
    numbers(block + "ssm_a", state_values(), -1.0F);
    matrix(block + "ssm_beta.weight", most_, width, state_values());
    matrix(block + "ssm_alpha.weight", most_, width, state_values());
    numbers(block + "ssm_norm.weight", kStateSize);
    matrix(block + "ssm_out.weight", most_, values, width, shape_.added);
  }

  /// What a drafting layer has beside what a full layer has. It gets the embedding of a token, and a little of the
  /// model's output before it.
  void add_drafting(const std::string& block) {
    const int64_t width = shape_.width;
    numbers(block + "nextn.enorm.weight", width);
    numbers(block + "nextn.hnorm.weight", width);
    matrix(block + "nextn.eh_proj.weight", GGML_TYPE_F16, 2 * width, width, shape_.added);
    weights_.back().diagonal = 1.0F;
    numbers(block + "nextn.shared_head_norm.weight", width);
  }

  void add_products(const std::string& block, ggml_type of_last) {
    const Shape& s = shape_;
    if (s.kind != Kind::kExperts) {
      matrix(block + "ffn_gate.weight", most_, s.width, s.inner);
      matrix(block + "ffn_up.weight", most_, s.width, s.inner);
      matrix(block + "ffn_down.weight", of_last, s.inner, s.width, s.added);
      return;
    }
    const float wide = 1.0F / std::sqrt(static_cast<float>(s.width));
    add(block + "ffn_gate_inp.weight", GGML_TYPE_F16, {s.width, kExperts}, wide);
    add(block + "ffn_gate_exps.weight", most_, {s.width, s.inner, kExperts}, wide);
    add(block + "ffn_up_exps.weight", most_, {s.width, s.inner, kExperts}, wide);
    add(block + "ffn_down_exps.weight", of_last, {s.inner, s.width, kExperts},
        1.0F / std::sqrt(static_cast<float>(s.inner)));
  }

  const Shape& shape_;
  ggml_type most_, best_;  // Q4_K_M has more bits in some matrices
  float sharpness_;        // of queries, and of keys
  ggml_context* context_ = nullptr;
  gguf_context* file_ = nullptr;
  std::vector<Weight> weights_;
};

}  // namespace
}  // namespace keyhole::llama_cpp

int main(int argc, char** argv) {
  using namespace keyhole::llama_cpp;  // NOLINT(google-build-using-namespace)
  if (argc != 3 && argc != 4)
    fail("llama-random-model 8b|1b|30b-a3b|27b|32b|tiny|tiny-hybrid|tiny-mtp FILE [NATS]");
  const float nats = argc == 4 ? std::strtof(argv[3], nullptr) : 1.0F;
  if (!(nats > 0.0F && nats < 100.0F)) fail("NATS: above 0 and below 100");
  const auto* shape = std::find_if(std::begin(kShapes), std::end(kShapes),
                                   [&](const Shape& s) { return std::string(argv[1]) == s.name; });
  if (shape == std::end(kShapes)) fail(std::string("no shape ") + argv[1]);
  Model(*shape, nats).write(argv[2]);
  return 0;
}
