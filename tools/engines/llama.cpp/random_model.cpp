// Writes a model of random weights, for timings and for checks beside itself: any card computes it as fast as a real one
// of its shape, and next to nothing has to be brought.
//   llama-random-model 8b|1b|tiny FILE [NATS]
//   8b    shape of Llama 3 8B, Q4_K and Q6_K where llama.cpp's recipe of Q4_K_M has them
//   1b    shape of Llama 3.2 1B, the same
//   tiny  four layers of 512 components, f16
// NATS is the standard deviation of the logits of attention in the first layer (default: 1, as ordinary heads have it). It has
// no vocabulary: tokens are numbers.
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
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Shape {
  const char* name;
  uint32_t layers, width, inner, heads, kv_heads, head_dim, words;
  bool is_quantised;
};

constexpr Shape kShapes[] = {
    {"8b", 32, 4096, 14336, 32, 8, 128, 128256, true},
    {"1b", 16, 2048, 8192, 32, 8, 64, 128256, true},
    {"tiny", 4, 512, 1536, 8, 2, 64, 4096, false},
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// Blocks of 256 weights, as ggml has them.
struct Q4K {
  ggml_fp16_t d, dmin;
  uint8_t scales[12];
  uint8_t q[128];
};
static_assert(sizeof(Q4K) == 144);
struct Q6K {
  uint8_t low[128];
  uint8_t high[64];
  int8_t scales[16];
  ggml_fp16_t d;
};
static_assert(sizeof(Q6K) == 210);

/// Numbers that are random enough for weights, 8 bytes at a time.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}
  uint64_t next() {
    state_ ^= state_ << 13U;
    state_ ^= state_ >> 7U;
    state_ ^= state_ << 17U;
    return state_;
  }
  void fill(void* to, size_t bytes) {
    auto* out = static_cast<uint8_t*>(to);
    for (size_t i = 0; i < bytes; i += 8) {
      const uint64_t word = next();
      std::memcpy(out + i, &word, std::min<size_t>(8, bytes - i));
    }
  }

 private:
  uint64_t state_;
};

/// Normal numbers in f16, of which weights are drawn.
class Normal {
 public:
  Normal() : values_(1U << 14U) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(random);
  }
  [[nodiscard]] float at(uint64_t bits) const { return values_[bits % values_.size()]; }

 private:
  std::vector<float> values_;
};

/// Weights of a standard deviation of about `deviation`, mean 0.
void fill(std::vector<uint8_t>& out, ggml_type type, float deviation, uint64_t seed) {
  static const Normal normal;
  Random random(seed);
  if (type == GGML_TYPE_Q4_K) {
    // Each weight is d * 32 * q - dmin * 60, q even over 0 to 15; the scales 32 and the minima 60 are packed in 6 bits.
    Q4K block{};
    block.d = ggml_fp32_to_fp16(deviation / (32.0F * 4.61F));
    block.dmin = ggml_fp32_to_fp16(deviation / (32.0F * 4.61F) * 4.0F);
    std::memset(block.scales, 160, 4);
    std::memset(block.scales + 4, 252, 4);
    std::memset(block.scales + 8, 192, 4);
    for (size_t at = 0; at < out.size(); at += sizeof block) {
      random.fill(block.q, sizeof block.q);
      std::memcpy(out.data() + at, &block, sizeof block);
    }
  } else if (type == GGML_TYPE_Q6_K) {
    Q6K block{};
    block.d = ggml_fp32_to_fp16(deviation / (32.0F * 18.5F));
    std::memset(block.scales, 32, sizeof block.scales);
    for (size_t at = 0; at < out.size(); at += sizeof block) {
      random.fill(block.low, sizeof block.low + sizeof block.high);
      std::memcpy(out.data() + at, &block, sizeof block);
    }
  } else if (type == GGML_TYPE_F16) {
    auto* halves = reinterpret_cast<ggml_fp16_t*>(out.data());
    for (size_t i = 0; i < out.size() / 2; ++i) {
      halves[i] = ggml_fp32_to_fp16(deviation * normal.at(random.next() >> 20U));
    }
  } else {
    auto* numbers = reinterpret_cast<float*>(out.data());
    std::fill_n(numbers, out.size() / sizeof(float), 1.0F);  // norms
  }
}

struct Weight {
  ggml_tensor* tensor;
  float deviation;
  size_t offset = 0;  // in the file's data
};

class Model {
 public:
  Model(const Shape& shape, float nats) : shape_(shape), sharpness_(std::sqrt(nats)) {
    context_ = ggml_init({ggml_tensor_overhead() * 4096, nullptr, true});
    file_ = gguf_init_empty();
    text("general.architecture", "llama");
    text("general.name", std::string("random ") + shape.name);
    text("tokenizer.ggml.model", "no_vocab");
    number("llama.vocab_size", shape.words);
    number("llama.context_length", 1U << 20U);
    number("llama.embedding_length", shape.width);
    number("llama.block_count", shape.layers);
    number("llama.feed_forward_length", shape.inner);
    number("llama.attention.head_count", shape.heads);
    number("llama.attention.head_count_kv", shape.kv_heads);
    number("llama.attention.key_length", shape.head_dim);
    number("llama.attention.value_length", shape.head_dim);
    number("llama.rope.dimension_count", shape.head_dim);
    gguf_set_val_f32(file_, "llama.rope.freq_base", 500000.0F);
    gguf_set_val_f32(file_, "llama.attention.layer_norm_rms_epsilon", 1e-5F);
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
          fill(bytes, weight.tensor->type, weight.deviation, i + 1);
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
  void add(const std::string& name, ggml_type type, int64_t in, int64_t out, float deviation) {
    ggml_tensor* tensor = out > 0 ? ggml_new_tensor_2d(context_, type, in, out)
                                  : ggml_new_tensor_1d(context_, type, in);
    ggml_set_name(tensor, name.c_str());
    weights_.push_back({tensor, deviation});
  }
  void add_all() {
    const Shape& s = shape_;
    const ggml_type most = s.is_quantised ? GGML_TYPE_Q4_K : GGML_TYPE_F16;
    const ggml_type best = s.is_quantised ? GGML_TYPE_Q6_K : GGML_TYPE_F16;
    // By which inputs of variance 1 give outputs of variance 1.
    const float wide = 1.0F / std::sqrt(static_cast<float>(s.width));
    const float inner = 1.0F / std::sqrt(static_cast<float>(s.inner));
    const int64_t q = int64_t{s.heads} * s.head_dim;
    const int64_t kv = int64_t{s.kv_heads} * s.head_dim;
    add("token_embd.weight", most, s.width, s.words, 1.0F);
    for (uint32_t i = 0; i < s.layers; ++i) {
      const std::string block = "blk." + std::to_string(i) + ".";
      const uint32_t eighth = s.layers / 8;
      const bool more_bits = i < eighth || i >= 7 * s.layers / 8 || (i - eighth) % 3 == 2;
      add(block + "attn_norm.weight", GGML_TYPE_F32, s.width, 0, 0);
      add(block + "attn_q.weight", most, s.width, q, sharpness_ * wide);
      add(block + "attn_k.weight", most, s.width, kv, sharpness_ * wide);
      add(block + "attn_v.weight", more_bits ? best : most, s.width, kv, wide);
      add(block + "attn_output.weight", most, q, s.width, 1.0F / std::sqrt(static_cast<float>(q)));
      add(block + "ffn_norm.weight", GGML_TYPE_F32, s.width, 0, 0);
      add(block + "ffn_gate.weight", most, s.width, s.inner, wide);
      add(block + "ffn_up.weight", most, s.width, s.inner, wide);
      add(block + "ffn_down.weight", more_bits ? best : most, s.inner, s.width, inner);
    }
    add("output_norm.weight", GGML_TYPE_F32, s.width, 0, 0);
    add("output.weight", best, s.width, s.words, 2.0F * wide);
  }

  const Shape& shape_;
  float sharpness_;  // of queries, and of keys
  ggml_context* context_ = nullptr;
  gguf_context* file_ = nullptr;
  std::vector<Weight> weights_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) fail("llama-random-model 8b|1b|tiny FILE [NATS]");
  const float nats = argc == 4 ? std::strtof(argv[3], nullptr) : 1.0F;
  if (!(nats > 0.0F && nats < 100.0F)) fail("NATS: above 0 and below 100");
  const auto* shape = std::find_if(std::begin(kShapes), std::end(kShapes),
                                   [&](const Shape& s) { return std::string(argv[1]) == s.name; });
  if (shape == std::end(kShapes)) fail(std::string("no shape ") + argv[1]);
  Model(*shape, nats).write(argv[2]);
  return 0;
}
