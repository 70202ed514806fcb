// Device memory of one session, of which all its parts on a CUDA device take.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "gpu/resident.h"

namespace keyhole::gpu {

/// One account, of which every part of the session has a copy. One thread at a time.
class SessionMemory {
 public:
  /// Of the session on device `ordinal`; session is not null.
  SessionMemory(int ordinal, std::shared_ptr<SessionOnDevice> session)
      : ordinal_(ordinal), session_(std::move(session)) {}
  /// Of the session that resident tokens belong to. Throws Error(invalid_argument), which begins with `who`, where they
  /// lie on no CUDA device.
  SessionMemory(const ResidentPlace& place, const std::string& who);

  [[nodiscard]] int ordinal() const { return ordinal_; }
  [[nodiscard]] const std::shared_ptr<SessionOnDevice>& session() const { return session_; }
  /// Counts `bytes` more of device memory for `what`. Throws Error(out_of_device_memory) beyond the limit, or beyond
  /// what is free.
  void claim(size_t bytes, const char* what) const;
  /// Takes back what was claimed, and then not taken or given back.
  void release(size_t bytes) const { session_->claimed -= bytes; }

 private:
  int ordinal_;
  std::shared_ptr<SessionOnDevice> session_;
};

}  // namespace keyhole::gpu
