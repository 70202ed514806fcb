#include "runtime/files/element.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "runtime/files/float16.h"

namespace keyhole {
namespace {

struct ElementTraits {
  const char* name;
  size_t size;
};

constexpr ElementTraits kTraits[] = {{"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I32", 4},
                                     {"U32", 4}, {"I64", 8}, {"U8", 1},   {"I8", 1}};

const ElementTraits& traits(ElementType type) { return kTraits[static_cast<size_t>(type)]; }

[[noreturn]] void refuse(ElementType type) {
  throw std::runtime_error(std::string("elements of type ") + element_name(type) +
                           " are not floating point; needed is F32, F16 or BF16");
}

// Rows of a mapped file may lie at any address, hence memcpy rather than a cast.
template <float (*convert)(uint16_t)>
void widen(const std::byte* in, std::span<float> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t element = 0;
    std::memcpy(&element, in + 2 * i, sizeof element);
    out[i] = convert(element);
  }
}

template <uint16_t (*convert)(float)>
void narrow(std::span<const float> in, std::byte* out) {
  for (size_t i = 0; i < in.size(); ++i) {
    const uint16_t element = convert(in[i]);
    std::memcpy(out + 2 * i, &element, sizeof element);
  }
}

}  // namespace

size_t element_size(ElementType type) { return traits(type).size; }
const char* element_name(ElementType type) { return traits(type).name; }

bool is_floating(ElementType type) {
  return type == ElementType::f32 || type == ElementType::f16 || type == ElementType::bf16;
}

void elements_to_f32(ElementType type, std::span<const std::byte> bytes, std::span<float> out) {
  switch (type) {
    case ElementType::f32:
      if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size_bytes());
      return;
    case ElementType::f16: return widen<f16_to_f32>(bytes.data(), out);
    case ElementType::bf16: return widen<bf16_to_f32>(bytes.data(), out);
    default: refuse(type);
  }
}

void elements_from_f32(ElementType type, std::span<const float> in, std::span<std::byte> out) {
  switch (type) {
    case ElementType::f32:
      if (!in.empty()) std::memcpy(out.data(), in.data(), in.size_bytes());
      return;
    case ElementType::f16: return narrow<f32_to_f16>(in, out.data());
    case ElementType::bf16: return narrow<f32_to_bf16>(in, out.data());
    default: refuse(type);
  }
}

}  // namespace keyhole
