#include "index/serial.h"

#include <cstring>
#include <istream>
#include <ostream>

#include "cpu/types.h"

namespace keyhole::index {

void Checksum::update(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  while (bytes > 0 && length_ % 8 != 0) {
    word_ |= uint64_t{*p++} << (8 * (length_ % 8));
    --bytes;
    if (++length_ % 8 == 0) {
      mix(word_);
      word_ = 0;
    }
  }
  for (; bytes >= 8; bytes -= 8, p += 8, length_ += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    mix(word);
  }
  for (; bytes > 0; --bytes, ++length_) word_ |= uint64_t{*p++} << (8 * (length_ % 8));
}

uint64_t Checksum::value() const {
  Checksum last = *this;
  last.mix(word_);
  last.mix(length_);
  return last.state_;
}

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
  require_sound(get<uint64_t>() == expected, "the checksum does not match");
}

void require_sound(bool ok, const char* what) {
  if (!ok) throw Error(Status::corrupt, std::string("saved index: ") + what);
}

}  // namespace keyhole::index
