// Arrays of NumPy, PyTorch and whoever else speaks DLPack or the buffer protocol, as the library's tensors: nothing is
// copied.
#ifndef KEYHOLE_TOOLS_PYTHON_SRC_ARRAYS_H_
#define KEYHOLE_TOOLS_PYTHON_SRC_ARRAYS_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "keyhole/keyhole.h"

namespace keyhole::python {

/// An array of one call. Holds the caller's object as long as it lives; made and destroyed with the interpreter's lock.
class Array {
 public:
  enum Use { kRead, kWrite };
  /// `name` is what messages call it. None gives an array whose pointer is NULL.
  Array(nanobind::handle object, const char* name, Use use);

  /// NULL for None.
  const keyhole_tensor* pointer() const { return none_ ? nullptr : &tensor_; }
  bool none() const { return none_; }
  const keyhole_tensor& tensor() const { return tensor_; }
  /// Elements of all axes but the last: query heads of all tokens of a q. 0 for None.
  int64_t rows() const;
  /// The data of an lse, which the library takes as a plain pointer: `count` dense float32 elements, in whichever
  /// memory; NULL for None.
  float* floats(const char* name, int64_t count) const;

 private:
  template <class Imported>
  void take(const Imported& array, const char* name);

  nanobind::ndarray<nanobind::ro> read_;
  nanobind::ndarray<> written_;
  keyhole_tensor tensor_{};
  bool none_ = false;
};

/// Elements of a dense array of one type that the library takes as a plain pointer, or NULL for None.
template <class T>
class Elements {
 public:
  using Dense = nanobind::ndarray<T, nanobind::c_contig>;
  Elements(nanobind::handle object, const char* name, const char* wanted, size_t least = 0) {
    if (object.is_none()) return;
    if (!nanobind::try_cast(object, array_, false))
      throw nanobind::type_error((std::string(name) + " must be " + wanted).c_str());
    if (array_.size() < least)
      throw nanobind::value_error((std::string(name) + " has " + std::to_string(array_.size()) +
                                   " elements; " + std::to_string(least) + " are needed")
                                      .c_str());
    data_ = array_.data();
  }
  T* data() const { return data_; }
  size_t size() const { return data_ ? array_.size() : 0; }

 private:
  Dense array_;
  T* data_ = nullptr;
};

}  // namespace keyhole::python

#endif  // KEYHOLE_TOOLS_PYTHON_SRC_ARRAYS_H_
