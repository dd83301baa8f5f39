// Tensors of PyTorch as this backend's binding reads and writes them: by DLPack's C interface, which is the same for
// every PyTorch since 2.10, so that one compiled module serves them all. (PyTorch's own C++ classes are not.)
#pragma once

#include <ATen/dlpack.h>
#include <Python.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../dtype.h"
#include "params.h"

namespace fastattn {
namespace {

// Thrown where an exception of Python is set.
struct PythonError {};

// A call that is well formed, but that no kernel computes: NotImplementedError.
struct NotImplemented : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// ValueError with these parts as its text where `right` is false; else the parts are not even evaluated.
#define FASTATTN_CHECK(right, ...)                                \
  do {                                                            \
    if (!(right)) throw std::invalid_argument(text(__VA_ARGS__)); \
  } while (false)

// A strong reference, which only a thread with the GIL may make or drop.
class Object {
 public:
  Object() = default;
  Object(const Object& other) : pointer_(other.pointer_) { Py_XINCREF(pointer_); }
  Object(Object&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~Object() { Py_XDECREF(pointer_); }

  static Object borrowed(PyObject* pointer) { return Object(Py_XNewRef(pointer)); }

  // What a function of Python's C interface returned, which is null where an exception is set.
  static Object result(PyObject* pointer) {
    if (!pointer) throw PythonError();
    return Object(pointer);
  }

  PyObject* get() const { return pointer_; }
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  bool is_none() const { return pointer_ == Py_None; }
  Object attribute(PyObject* name) const { return result(PyObject_GetAttr(pointer_, name)); }

 private:
  explicit Object(PyObject* pointer) : pointer_(pointer) {}
  PyObject* pointer_ = nullptr;
};

// What this module takes from PyTorch; kept for good.
struct Torch {
  PyTypeObject *tensor, *parameter;
  PyObject *is_grad_enabled, *hooks_of_saving, *empty_like, *in_fp32, *new_empty, *requires_grad, *is_neg;
  const DLPackExchangeAPI* exchange;
};
Torch torch_{};  // set once, by import_torch

void import_torch() {
  const auto of = [](const Object& from, const char* name) {
    return Object::result(PyObject_GetAttrString(from.get(), name));
  };
  const Object torch = Object::result(PyImport_ImportModule("torch"));
  Object tensor = of(torch, "Tensor"), parameter = of(of(torch, "nn"), "Parameter");
  const Object capsule = of(tensor, "__dlpack_c_exchange_api__");
  auto* const exchange =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  if (!exchange) throw PythonError();
  const auto version = exchange->header.version.major;
  if (version != DLPACK_MAJOR_VERSION || !exchange->dltensor_from_py_object_no_sync) {
    PyErr_Format(PyExc_ImportError, "this torch exchanges tensors by DLPack %u, and fastattn by DLPack %d", version,
                 DLPACK_MAJOR_VERSION);
    throw PythonError();
  }
  torch_ = {reinterpret_cast<PyTypeObject*>(tensor.release()),
            reinterpret_cast<PyTypeObject*>(parameter.release()),
            of(torch, "is_grad_enabled").release(),
            of(of(of(torch, "_C"), "_autograd"), "_top_saved_tensors_default_hooks").release(),
            of(torch, "empty_like").release(),
            Object::result(Py_BuildValue("{sO}", "dtype", of(torch, "float32").get())).release(),
            PyUnicode_InternFromString("new_empty"),
            PyUnicode_InternFromString("requires_grad"),
            PyUnicode_InternFromString("is_neg"),
            exchange};
}

using Sizes = std::vector<int64_t>;

std::string text_of(const int64_t* sizes, int64_t n) {
  std::string result = "[";
  for (int64_t i = 0; i < n; ++i) result += (i ? ", " : "") + std::to_string(sizes[i]);
  return result + "]";
}

// A dense tensor on the CPU. It keeps the tensor alive, and is read without the GIL.
class Tensor {
 public:
  Tensor(Object object, const char* name) : object_(std::move(object)), name_(name) {
    PyObject* const tensor = object_.get();
    if (!PyType_IsSubtype(Py_TYPE(tensor), torch_.tensor)) {
      PyErr_Format(PyExc_TypeError, "%s must be a Tensor, got %R", name, Py_TYPE(tensor));
      throw PythonError();
    }
    if (torch_.exchange->dltensor_from_py_object_no_sync(tensor, &view_)) {
      PyErr_Clear();
      throw std::invalid_argument(text(name, " must be dense on the CPU, got ", text_of_attribute("layout"), " on ",
                                       text_of_attribute("device")));
    }
    FASTATTN_CHECK(view_.device.device_type == kDLCPU, name, " must be dense on the CPU, got torch.strided on ",
                   text_of_attribute("device"));
    FASTATTN_CHECK(view_.data || numel() == 0, name, " must be a Tensor with memory of its own, such as clone() makes");
  }

  const char* name() const { return name_; }
  PyObject* object() const { return object_.get(); }
  int64_t dim() const { return view_.ndim; }
  int64_t size(int64_t i) const { return view_.shape[i < 0 ? i + dim() : i]; }
  int64_t stride(int64_t i) const { return view_.strides[i < 0 ? i + dim() : i]; }
  char* data() const { return static_cast<char*>(view_.data) + view_.byte_offset; }
  int64_t element_size() const { return view_.dtype.bits / 8; }

  int64_t numel() const {
    int64_t result = 1;
    for (int64_t i = 0; i < dim(); ++i) result *= size(i);
    return result;
  }

  bool has_sizes(const Sizes& sizes) const {
    return dim() == int64_t(sizes.size()) && std::equal(sizes.begin(), sizes.end(), view_.shape);
  }

  bool is(DLDataTypeCode code, int bits) const { return view_.dtype.code == code && view_.dtype.bits == bits; }
  bool is_floating() const { return view_.dtype.code == kDLFloat || view_.dtype.code == kDLBfloat; }
  bool is_bool() const { return is(kDLBool, 8); }
  bool same_dtype(const Tensor& other) const {
    return view_.dtype.code == other.view_.dtype.code && view_.dtype.bits == other.view_.dtype.bits;
  }

  // Of those that the kernels compute with.
  std::optional<DType> dtype() const {
    if (is(kDLFloat, 32)) return DType::f32;
    if (is(kDLBfloat, 16)) return DType::bf16;
    if (is(kDLFloat, 16)) return DType::f16;
    return {};
  }

  // Whether some memory may belong to both.
  bool may_overlap(const Tensor& other) const { return data() < other.end() && other.data() < end(); }

  // Whether each element has memory of its own, of those that differ in one index only.
  bool is_writable() const {
    for (int64_t i = 0; i < dim(); ++i) {
      if (stride(i) == 0 && size(i) > 1) return false;
    }
    return true;
  }

  // Whether the elements of a row lie side by side.
  bool has_rows() const { return stride(-1) == 1 || size(-1) <= 1; }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dim() - 1; i >= 0; expected *= size(i--)) {
      if (size(i) != 1 && stride(i) != expected) return numel() == 0;
    }
    return true;
  }

  // The same with its dimensions in another order.
  bool is_contiguous(const std::array<int, 4>& order) const {
    int64_t expected = 1;
    for (int i = 3; i >= 0; expected *= size(order[i--])) {
      if (size(order[i]) != 1 && stride(order[i]) != expected) return false;
    }
    return true;
  }

  // What this method of it, such as "contiguous", returns.
  Tensor after(const char* method) const {
    return {Object::result(PyObject_CallMethod(object_.get(), method, nullptr)), name_};
  }
  Tensor contiguous() const { return is_contiguous() ? *this : after("contiguous"); }
  Tensor in_rows() const { return has_rows() ? *this : after("contiguous"); }
  // For `table_of`. What is repeated in memory is not copied more than once.
  Tensor in_table() const {
    if (dim() == 0 || stride(-1) == 0 || has_rows()) return *this;
    Object once = object_;
    for (int64_t i = 0; i < dim(); ++i) {
      if (stride(i) == 0 && size(i) > 1)
        once = Object::result(PyObject_CallMethod(once.get(), "narrow", "LLL", i, 0LL, 1LL));
    }
    return Tensor(std::move(once), name_).after("contiguous");
  }
  Tensor as_float() const { return is(kDLFloat, 32) ? *this : after("float"); }
  Tensor as_long() const { return is(kDLInt, 64) ? *this : after("long"); }

  // The same memory as a tensor of these sizes and strides, whose methods are still those of this one.
  Tensor viewed(const Sizes& sizes, const Sizes& strides) const {
    Tensor result(*this);
    result.shape_ = std::make_shared<std::pair<Sizes, Sizes>>(sizes, strides);
    result.view_.ndim = int32_t(sizes.size());
    result.view_.shape = result.shape_->first.data(), result.view_.strides = result.shape_->second.data();
    return result;
  }

  // "float32", for messages.
  std::string dtype_name() const { return text_of_attribute("dtype").substr(sizeof("torch")); }
  std::string sizes_text() const { return text_of(view_.shape, dim()); }

  void check_sizes(const Sizes& sizes) const {
    FASTATTN_CHECK(has_sizes(sizes), name_, " must be ", text_of(sizes.data(), sizes.size()), ", got ", sizes_text());
  }

  // For a tensor that the kernels write: of these sizes, in fp32 unless another dtype is given, contiguous.
  template <class T = float>
  T* output(const Sizes& sizes, DLDataTypeCode code = kDLFloat, int bits = 32) const {
    check_sizes(sizes);
    const char* const expected = code == kDLBool ? "bool" : code == kDLInt ? "int64" : "float32";
    FASTATTN_CHECK(is(code, bits) && is_contiguous(), name_, " must be contiguous and ", expected, ", got ",
                   dtype_name(), " with strides ", text_of(view_.strides, dim()));
    return reinterpret_cast<T*>(data());
  }

  // Exactly a Tensor or a Parameter, and its values are those in its memory.
  static bool is_plain(PyObject* object) {
    if (Py_TYPE(object) != torch_.tensor && Py_TYPE(object) != torch_.parameter) return false;
    return Object::result(PyObject_CallMethodObjArgs(object, torch_.is_neg, nullptr)).get() == Py_False;
  }

  static bool wants_gradient(PyObject* object) {
    if (Object::result(PyObject_GetAttr(object, torch_.requires_grad)).get() != Py_True) return false;
    return Object::result(PyObject_CallObject(torch_.is_grad_enabled, nullptr)).get() == Py_True;
  }

 private:
  const char* end() const {
    int64_t last = 0;
    for (int64_t i = 0; i < dim(); ++i) last += (size(i) - 1) * stride(i);
    return numel() == 0 ? data() : data() + (last + 1) * element_size();
  }

  std::string text_of_attribute(const char* name) const {
    const Object attribute = Object::result(PyObject_GetAttrString(object_.get(), name));
    const Object as_text = Object::result(PyObject_Str(attribute.get()));
    const char* const utf8 = PyUnicode_AsUTF8AndSize(as_text.get(), nullptr);
    if (!utf8) throw PythonError();
    return utf8;
  }

  Object object_;
  const char* name_;
  DLTensor view_{};
  std::shared_ptr<std::pair<Sizes, Sizes>> shape_;  // of a view
};
using MaybeTensor = std::optional<Tensor>;

template <class Rows>
Rows rows_of(const Tensor& x) {
  FASTATTN_CHECK(x.dim() == 4 && x.has_rows(), x.name(), " must be [B, H, N, D] with a last stride of 1, got ",
                 x.sizes_text());
  const auto dtype = x.dtype();
  if (!dtype) throw NotImplemented(text(x.name(), " must be float32, bfloat16 or float16, got ", x.dtype_name()));
  return {x.data(), *dtype, x.stride(0), x.stride(1), x.stride(2)};
}

// Of a tensor that the kernels write.
Output output_rows(const Tensor& x, DType dtype) {
  const Output result = rows_of<Output>(x);
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8"};  // as DType numbers them
  FASTATTN_CHECK(result.dtype == dtype, x.name(), " must be ", kNames[int(dtype)], ", got ", x.dtype_name());
  return result;
}

// `x`, which broadcasts to these sizes, and whose rows lie side by side or are one entry for all keys.
Table table_of(const Tensor& x, const Sizes& sizes) {
  int64_t strides[4] = {};
  const int64_t missing = 4 - x.dim();
  bool fits = missing >= 0;
  for (int64_t i = 0; fits && i < x.dim(); ++i) {
    const int64_t size = sizes[missing + i];
    fits = x.size(i) == size || x.size(i) == 1;
    if (x.size(i) == size && size != 1) strides[missing + i] = x.element_size() * x.stride(i);
  }
  FASTATTN_CHECK(fits, x.name(), " must broadcast to ", text_of(sizes.data(), sizes.size()), ", got ", x.sizes_text());
  return {x.data(), strides[0], strides[1], strides[2], x.dim() == 0 || x.size(-1) == 1 || x.stride(-1) == 0};
}

}  // namespace
}  // namespace fastattn
