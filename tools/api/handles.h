// The library's C handles and statuses in the manner of C++.
#pragma once

#include <keyhole/index.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace keyhole::tools {

/// A failed call of the library, with its own text.
class LibraryError : public std::runtime_error {
 public:
  explicit LibraryError(keyhole_status status)
      : std::runtime_error(keyhole_last_error()), status_(status) {}
  [[nodiscard]] keyhole_status status() const { return status_; }

 private:
  keyhole_status status_;
};

inline void check(keyhole_status status) {
  if (status != KEYHOLE_OK) throw LibraryError(status);
}

template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};

using Engine = std::unique_ptr<keyhole_engine, Destroy<keyhole_engine_destroy>>;
using Session = std::unique_ptr<keyhole_session, Destroy<keyhole_session_destroy>>;
using IndexHandle = std::unique_ptr<keyhole_index, Destroy<keyhole_index_destroy>>;

[[nodiscard]] inline Engine make_engine(const keyhole_engine_config& config) {
  keyhole_engine* engine = nullptr;
  check(keyhole_engine_create(&config, &engine));
  return Engine(engine);
}

[[nodiscard]] inline Session make_session(const Engine& engine,
                                          const keyhole_session_config& config) {
  keyhole_session* session = nullptr;
  check(keyhole_session_create(engine.get(), &config, &session));
  return Session(session);
}

[[nodiscard]] inline IndexHandle make_index(const Engine& engine, const std::string& spec,
                                            uint32_t layer, uint32_t kv_head) {
  keyhole_index* index = nullptr;
  check(keyhole_index_create(engine.get(), spec.c_str(), layer, kv_head, &index));
  return IndexHandle(index);
}

}  // namespace keyhole::tools
