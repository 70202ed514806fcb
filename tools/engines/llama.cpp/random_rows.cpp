#include "tools/engines/llama.cpp/random_rows.h"

#include <ggml.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>

namespace keyhole::llama_cpp {
namespace {

constexpr size_t kPeriod = size_t{256} << 20U;

struct State {
  std::mutex mutex;
  std::array<float, 2> deviations{};
  std::array<int, 2> files{-1, -1};  // with the numbers of keys, and of values
};

State& state() {
  static State s;
  return s;
}

void close_file(int& file) {
  if (file >= 0) close(file);
  file = -1;
}

/// Sums of four bytes are nearly normal.
std::array<ggml_fp16_t, 1021> numbers_of_sums(float deviation) {
  const float of_sum = 2 * std::sqrt((256.0F * 256.0F - 1) / 12);
  std::array<ggml_fp16_t, 1021> numbers{};
  for (size_t sum = 0; sum < numbers.size(); ++sum) {
    numbers[sum] = ggml_fp32_to_fp16((static_cast<float>(sum) - 510) / of_sum * deviation);
  }
  return numbers;
}

int make_file(float deviation, uint64_t seed) {
  int file = memfd_create("keyhole-random-rows", MFD_CLOEXEC);
  void* data = MAP_FAILED;
  if (file >= 0 && ftruncate(file, kPeriod) == 0) {
    data = mmap(nullptr, kPeriod, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (data == MAP_FAILED) {
    close_file(file);
    throw std::runtime_error("no memory for random rows");
  }
  const auto numbers = numbers_of_sums(deviation);
  auto* row = static_cast<ggml_fp16_t*>(data);
  uint64_t random = seed;
  for (size_t i = 0; i < kPeriod / sizeof(ggml_fp16_t); i += 2) {
    random ^= random << 13U;
    random ^= random >> 7U;
    random ^= random << 17U;
    for (size_t j = 0; j < 2; ++j) {
      const uint64_t bytes = random >> (32 * j);
      row[i + j] = numbers[(bytes & 255U) + (bytes >> 8U & 255U) + (bytes >> 16U & 255U) +
                           (bytes >> 24U & 255U)];
    }
  }
  munmap(data, kPeriod);
  return file;
}

}  // namespace

void set_random_rows(float k, float v) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  for (int& file : s.files) close_file(file);  // what is mapped stays
  s.deviations = {k, v};
}

bool rows_are_random() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.deviations[0] > 0 || s.deviations[1] > 0;
}

std::byte* map_random_rows(bool values, size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int& file = s.files[values ? 1 : 0];
  if (file < 0) file = make_file(s.deviations[values ? 1 : 0], values ? 0xC0FFEE : 0xDECADE);
  void* all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) throw std::runtime_error("no address space for random rows");
  for (size_t at = 0; at < bytes; at += kPeriod) {
    if (mmap(static_cast<std::byte*>(all) + at, std::min(kPeriod, bytes - at),
             PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file,
             0) == MAP_FAILED) {
      munmap(all, bytes);
      throw std::runtime_error("no address space for random rows");
    }
  }
  return static_cast<std::byte*>(all);
}

}  // namespace keyhole::llama_cpp
