// libFuzzer: any header of a classifier file, before data of any length, is either that of the model's classifiers or
// refused by an Error with a text. The input ends with a byte that fills the data, and two of the data's length; what
// comes before is the header's JSON, whose length is put before it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "cpu/kernels.h"
#include "runtime/engine/classifier_file.h"

namespace {

void require(bool ok) {
  if (!ok) std::abort();
}

/// A file in memory, for code that takes paths.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("classifiers", MFD_CLOEXEC)) { require(fd_ >= 0); }
  void set(const std::string& bytes) const {
    require(ftruncate(fd_, 0) == 0);
    require(pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  [[nodiscard]] std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  static const MemoryFile file;
  static const keyhole::runtime::ModelShape model = [] {
    keyhole::runtime::ModelShape m;
    m.layers = 1;
    m.q_heads = 2;
    m.kv_heads = 1;
    m.head_dim = 64;
    return m;
  }();
  const size_t header = size - 3;
  const size_t filled = data[size - 2] + 256U * data[size - 1];
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header >> (8 * i)));
  bytes.append(reinterpret_cast<const char*>(data), header);
  bytes.append(filled, static_cast<char>(data[header]));
  file.set(bytes);
  try {
    static const std::vector<keyhole::index::RopeParams> rope(1);
    (void)keyhole::runtime::Classifiers(file.path(), model, rope,
                                        keyhole::cpu::select_kernels(nullptr));
  } catch (const keyhole::Error& e) {
    require(*e.what() != '\0' && e.status() != keyhole::Status::internal);
  }
  return 0;
}
