#include "index/types/factory.h"

#include <array>

#include "index/spec.h"
#include "index/types/codes.h"
#include "index/types/flat.h"
#include "index/types/hnsw.h"
#include "index/types/ivf.h"
#include "index/types/roargraph.h"
#include "index/types/saap.h"
#include "index/types/sparq.h"

namespace keyhole::index {
namespace {

/// A type is its declaration and two functions; this table is the only place that lists the types.
struct Type {
  const TypeDecl* decl;
  std::unique_ptr<Index> (*make)(const Spec&, uint32_t dim, DType dtype, const Context&);
  size_t (*estimate)(const Spec&, size_t count, uint32_t dim, DType dtype);
};

constexpr std::array kTypes = {
    Type{&kFlatType, make_flat, estimate_flat},
    Type{&kIvfType, make_ivf, estimate_ivf},
    Type{&kHnswType, make_hnsw, estimate_hnsw},
    Type{&kRoarGraphType, make_roargraph, estimate_roargraph},
    Type{&kSaapType, make_saap, estimate_saap},
    Type{&kSparqType, make_sparq, estimate_sparq},
    Type{&kCodesType, make_codes, estimate_codes},
};

Spec parse(std::string_view text, std::string_view also = {}) {
  std::array<const TypeDecl*, kTypes.size()> decls;
  for (size_t i = 0; i < kTypes.size(); ++i) decls[i] = kTypes[i].decl;
  return Spec::parse(text, decls, also);
}

const Type& type_of(const Spec& spec) {
  size_t i = 0;
  while (kTypes[i].decl != &spec.type()) ++i;
  return kTypes[i];
}

void check_shape(uint32_t dim, DType dtype) {
  if (!is_supported_head_dim(dim)) {
    throw Error(Status::invalid_argument,
                "an index for head dimension " + std::to_string(dim) + "; allowed: " + kHeadDims);
  }
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
    throw Error(Status::invalid_argument, std::string("an index for keys of ") + dtype_name(dtype) +
                                              "; allowed: f32, f16, bf16");
  }
}

}  // namespace

std::unique_ptr<Index> make_index(std::string_view spec, uint32_t dim, DType dtype,
                                  const Context& context) {
  const Spec parsed = parse(spec);
  check_shape(dim, dtype);
  return type_of(parsed).make(parsed, dim, dtype, context);
}

void check_spec(std::string_view spec, std::string_view also) {
  static_cast<void>(parse(spec, also));
}

std::optional<CodeBits> code_bits(std::string_view spec) {
  const Spec parsed = parse(spec);
  if (&parsed.type() != &kCodesType) return std::nullopt;
  return code_bits(parsed);
}

CodeListing code_listing(std::string_view spec) {
  const Spec parsed = parse(spec);
  return &parsed.type() == &kCodesType ? code_listing(parsed) : CodeListing{};
}

uint32_t first_rows(std::string_view spec) {
  const Spec parsed = parse(spec);
  return &parsed.type() == &kCodesType ? first_rows(parsed) : 0;
}

bool undoes_rope(std::string_view spec) {
  const Spec parsed = parse(spec);
  const std::span<const ParamDecl> params = parsed.type().params;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].name == "rope" && value_text(params[i], parsed[i]) == "undo") return true;
  }
  return false;
}

size_t estimate_bytes(std::string_view spec, size_t count, uint32_t dim, DType dtype) {
  const Spec parsed = parse(spec);
  check_shape(dim, dtype);
  return type_of(parsed).estimate(parsed, count, dim, dtype);
}

const std::vector<TypeHelp>& index_types() {
  static const std::vector<TypeHelp> types = [] {
    std::vector<TypeHelp> list;
    for (const Type& type : kTypes) {
      TypeHelp help{std::string(type.decl->name), std::string(type.decl->meaning), {}};
      for (const ParamDecl& param : type.decl->params) {
        help.params.push_back({std::string(param.name), value_text(param, param.fallback),
                               allowed_text(param), std::string(param.meaning)});
      }
      list.push_back(std::move(help));
    }
    return list;
  }();
  return types;
}

}  // namespace keyhole::index
