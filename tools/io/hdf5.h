// What readers and writers of HDF5 share. They use the C library, whose errors are read rather than printed. Empty in
// a build without HDF5.
#pragma once
#ifdef KEYHOLE_HDF5

#include <hdf5.h>

namespace keyhole::tools {

/// An HDF5 identifier and the function that closes it.
class Hdf5Handle {
 public:
  Hdf5Handle(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  ~Hdf5Handle() {
    if (id_ >= 0) close_(id_);
  }
  Hdf5Handle(const Hdf5Handle&) = delete;
  Hdf5Handle& operator=(const Hdf5Handle&) = delete;
  [[nodiscard]] hid_t get() const { return id_; }
  [[nodiscard]] bool valid() const { return id_ >= 0; }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

/// Keeps HDF5 from printing errors, as it does by default, while one lives.
class Hdf5Silence {
 public:
  Hdf5Silence() {
    H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~Hdf5Silence() { H5Eset_auto2(H5E_DEFAULT, function_, data_); }
  Hdf5Silence(const Hdf5Silence&) = delete;
  Hdf5Silence& operator=(const Hdf5Silence&) = delete;

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

/// Whether a dataset claims more than it can hold, because a small file may claim any shape. Chunked data that was
/// never written reads as zeros, so the stored bytes bound what an honest dataset holds; a factor of 1000 allows for
/// compression.
[[nodiscard]] inline bool hdf5_claims_too_much(hid_t dataset, hsize_t claimed_bytes) {
  return claimed_bytes / 1000 > H5Dget_storage_size(dataset);
}

}  // namespace keyhole::tools

#endif  // KEYHOLE_HDF5
