#include "index/serial.h"

// Compiled in from its header: users of the library link nothing more, and no name of it is
// exported.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <istream>
#include <ostream>

#include "cpu/types.h"

namespace keyhole::index {

struct Checksum::State {
  XXH3_state_t xxh3;
};

void Checksum::Free::operator()(State* state) const { delete state; }

Checksum::Checksum() : state_(new State) { XXH3_64bits_reset(&state_->xxh3); }

void Checksum::update(const void* data, size_t bytes) {
  XXH3_64bits_update(&state_->xxh3, data, bytes);
}

uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh3); }

uint64_t Checksum::of(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

void Writer::bytes(const void* data, size_t n) {
  if (n == 0) return;
  out_.write(static_cast<const char*>(data), static_cast<std::streamsize>(n));
  checksum_.update(data, n);
}

void Writer::finish() {
  const uint64_t sum = checksum_.value();
  out_.write(reinterpret_cast<const char*>(&sum), sizeof sum);
  if (!out_) throw Error(Status::io, "the index could not be written: the stream has failed");
}

void Reader::bytes(void* data, size_t n) {
  if (n == 0) return;
  in_.read(static_cast<char*>(data), static_cast<std::streamsize>(n));
  require_sound(static_cast<size_t>(in_.gcount()) == n, "cut short");
  checksum_.update(data, n);
}

std::string Reader::get_text(size_t longest) {
  const auto size = get<uint32_t>();
  require_sound(size <= longest, "a text is too long");
  std::string text(size, '\0');
  bytes(text.data(), size);
  return text;
}

void Reader::finish() {
  const uint64_t expected = checksum_.value();
  const bool is_same = get<uint64_t>() == expected;
  require_sound(is_same || !checks_sums, "the checksum does not match");
}

void require_sound(bool ok, const char* what) {
  if (!ok) throw Error(Status::corrupt, std::string("saved index: ") + what);
}

}  // namespace keyhole::index
