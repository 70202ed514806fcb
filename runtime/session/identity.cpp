#include "runtime/session/identity.h"

#include <cstring>

namespace keyhole::runtime {
namespace {

uint64_t hash_of(const int32_t* tokens, uint64_t count) {
  index::Checksum sum;
  sum.update(tokens, count * sizeof *tokens);
  return count == 0 ? 0 : sum.value();
}

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

/// Up to one more character than is allowed.
std::string read_model(const char* model) {
  return {model, strnlen(model, Identity::kLongestModel + 1)};
}

}  // namespace

void Identity::set(const char* new_model, const int32_t* tokens, uint64_t count, uint64_t held) {
  if ((tokens == nullptr) != (count == 0)) {
    refuse("tokens is " + std::string(tokens == nullptr ? "NULL" : "not NULL") + ", count is " +
           std::to_string(count) + ", allowed: tokens, or NULL and 0");
  }
  if (count > held) {
    refuse("count is " + std::to_string(count) + ", allowed: up to the " + std::to_string(held) +
           " tokens that the session holds");
  }
  if (new_model != nullptr) {
    std::string copy = read_model(new_model);
    if (copy.size() > kLongestModel) {
      refuse("model has more than " + std::to_string(kLongestModel) + " bytes, allowed: up to " +
             std::to_string(kLongestModel));
    }
    const uint64_t hash = hash_of(tokens, count);
    model = std::move(copy);
    token_hash = hash;
  } else {
    token_hash = hash_of(tokens, count);
  }
  token_count = count;
}

void Identity::truncate(uint64_t n) {
  if (n < token_count) token_count = token_hash = 0;
}

void Identity::save(ChecksumWriter& out) const {
  out.text(model);
  out.value(token_count);
  out.value(token_hash);
}

Identity Identity::load(ChecksumReader& in) {
  Identity identity;
  identity.model = in.text("identity");
  identity.token_count = in.value<uint64_t>("identity");
  identity.token_hash = in.value<uint64_t>("identity");
  if (identity.model.size() > kLongestModel || identity.model.find('\0') != std::string::npos ||
      (identity.token_count == 0 && identity.token_hash != 0)) {
    throw Error(Status::corrupt, "an identity that no session has");
  }
  return identity;
}

void ExpectedIdentity::check(const Identity& identity, uint32_t held) const {
  if (model != nullptr) {
    const std::string wanted = read_model(model);
    if (identity.model.empty()) {
      refuse("the file does not say of which model it is, asked for: '" + wanted + "'");
    }
    if (identity.model != wanted) {
      refuse("the file is of model '" + identity.model + "', asked for: '" + wanted + "'");
    }
  }
  if (tokens == nullptr && count == 0) return;
  if (tokens == nullptr) refuse("tokens is NULL, count is " + std::to_string(count));
  const std::string file = "the file has " + std::to_string(identity.token_count) + " tokens";
  if (identity.token_count == 0) refuse("the file does not say which tokens it has");
  // Callers could once name more tokens than there were.
  const uint64_t tokens_held = held_by_all.value_or(held);
  if (tokens_held != identity.token_count) {
    refuse("the file has " + std::to_string(tokens_held) + " tokens and names " +
           std::to_string(identity.token_count) + " of them");
  }
  if (identity.token_count > count) {
    refuse(file + ", asked for: the first of " + std::to_string(count));
  }
  if (hash_of(tokens, identity.token_count) != identity.token_hash) {
    refuse(file + " which are not the first of the " + std::to_string(count) +
           " that were asked for");
  }
}

}  // namespace keyhole::runtime
