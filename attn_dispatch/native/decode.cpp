// `decode.h` as a function for Python. Built by `attn-dispatch build`, for the vector instructions that torch's own
// kernels use on this machine.

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_numbers.h>

#include <iterator>
#include <optional>

#include "decode.h"

namespace {

using flash_decode::kNoLimit;
using flash_decode::Pairs;

// A tensor whose values are not its own: of a subclass that wraps others, of a transform, without any.
bool is_wrapper(PyObject* object) {
  if (object == nullptr || !PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    return false;
  }
  const at::TensorBase& x = THPVariable_Unpack(object);
  const auto keys = x.key_set();
  return keys.has_any(c10::python_ks) || keys.has(c10::DispatchKey::FuncTorchBatched) ||
      keys.has(c10::DispatchKey::FuncTorchGradWrapper) || keys.has(c10::DispatchKey::Functionalize) ||
      x.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

at::Tensor tensor_of(PyObject* object, const char* name) {
  // not THPVariable_Check, which believes what a proxy says of its class
  const bool is_tensor = PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
  TORCH_CHECK_TYPE(is_tensor, name, " must be a tensor, got a ", Py_TYPE(object)->tp_name);
  at::Tensor x = THPVariable_Unpack(object);
  const auto keys = x.key_set();
  const bool is_readable = x.layout() == at::kStrided && x.is_cpu() && x.has_storage() && !x.is_nested();
  TORCH_CHECK_TYPE(is_readable, name, " must be a strided tensor on the CPU");
  TORCH_CHECK(
      !(c10::GradMode::is_enabled() && x.requires_grad()), name, " requires a gradient, and flash_decode has none");
  const bool is_lazy = keys.has(c10::DispatchKey::Negative) || keys.has(c10::DispatchKey::ZeroTensor);
  return is_lazy ? x.clone() : x;
}

std::optional<at::Tensor> optional_tensor(PyObject* object, const char* name, at::ScalarType dtype) {
  if (object == nullptr || object == Py_None) {
    return std::nullopt;
  }
  at::Tensor x = tensor_of(object, name);
  return x.scalar_type() == dtype ? x : x.to(dtype);
}

std::optional<at::Tensor> vector_of(PyObject* object, const char* name, at::ScalarType dtype, int64_t size) {
  auto x = optional_tensor(object, name, dtype);
  if (x) {
    const bool fits = x->dim() == 1 && (x->size(0) == size || x->size(0) == 1);
    TORCH_CHECK(fits, name, " must be [", size, "], got ", x->sizes());
    x = x->size(0) == size ? x->contiguous() : x->expand({size}).contiguous();
  }
  return x;
}

template <typename T>
Pairs<T> pairs_of(const at::Tensor& x) {
  Pairs<T> out{x.const_data_ptr<T>(), {}};
  for (int i = 0; i < 4; ++i) {
    out.strides[i] = x.size(i) == 1 ? 0 : x.stride(i);
  }
  return out;
}

int64_t number_or(PyObject* object, int64_t otherwise) {
  return object == Py_None ? otherwise : std::clamp<int64_t>(THPUtils_unpackLong(object), -kNoLimit, kNoLimit);
}

// decode(q, k, v, scale, cap, left, right, offset, lse, offsets, lengths, keep, bias, slopes, sinks); the last six may
// be left out. None is no cap, no limit, and an offset of Skv - Sq. NotImplemented for tensors that wrap others, and
// under a dispatch mode, which would see nothing of what is computed here.
PyObject* decode(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kLeast = 9, kMost = 15;
  TORCH_CHECK_TYPE(count >= kLeast && count <= kMost, "decode takes 9 to 15 arguments, got ", count);
  const auto argument = [&](Py_ssize_t i) { return i < count ? args[i] : nullptr; };
  for (const Py_ssize_t i : {0, 1, 2, 9, 10, 11, 12, 13, 14}) {
    if (is_wrapper(argument(i))) {
      Py_RETURN_NOTIMPLEMENTED;
    }
  }
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const at::Tensor q = tensor_of(args[0], "query"), k = tensor_of(args[1], "key"), v = tensor_of(args[2], "value");
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "query, key and value must have four dimensions");
  TORCH_CHECK_TYPE(
      q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), "query, key and value differ in dtype");
  const int64_t B = q.size(0), Hq = q.size(1), Sq = q.size(2), D = q.size(3);
  const int64_t Hkv = k.size(1), Skv = k.size(2), Dv = v.size(3);
  TORCH_CHECK(
      k.size(0) == B && v.size(0) == B && v.size(1) == Hkv && v.size(2) == Skv && k.size(3) == D,
      "query ", q.sizes(), ", key ", k.sizes(), " and value ", v.sizes(), " do not fit each other");
  TORCH_CHECK(q.numel() > 0 && k.numel() > 0 && v.numel() > 0, "query, key and value must have elements");
  TORCH_CHECK(Hkv > 0 && Hq % Hkv == 0, "Hq ", Hq, " is not a multiple of Hkv ", Hkv);
  TORCH_CHECK(Skv <= std::numeric_limits<int32_t>::max(), "Skv ", Skv, " is beyond an int32");
  for (const auto* x : {&q, &k, &v}) {
    TORCH_CHECK(x->stride(3) == 1 || x->size(3) == 1, "the last dimension must be contiguous");
  }
  const double scale = PyFloat_AsDouble(args[3]), cap = args[4] == Py_None ? 0.0 : PyFloat_AsDouble(args[4]);
  const int64_t left = number_or(args[5], kNoLimit), right = number_or(args[6], kNoLimit);
  const int64_t offset = number_or(args[7], Skv - Sq);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  const auto offsets = vector_of(argument(9), "offsets", at::kLong, B);
  const auto lengths = vector_of(argument(10), "lengths", at::kLong, B);
  auto keep = optional_tensor(argument(11), "keep", at::kBool);
  auto bias = optional_tensor(argument(12), "bias", at::kFloat);
  const auto slopes = vector_of(argument(13), "slopes", at::kFloat, Hq);
  const auto sinks = vector_of(argument(14), "sinks", at::kFloat, Hq);
  for (auto* pairs : {&keep, &bias}) {
    if (*pairs) {
      *pairs = (*pairs)->expand({B, Hq, Sq, Skv});
    }
  }
  at::Tensor out = at::empty({B, Hq, Sq, Dv}, q.options()), lse;
  if (args[8] == Py_True) {
    lse = at::empty({B, Hq, Sq}, q.options().dtype(at::kFloat));
  }

  const auto compute_as = [&](auto zero) {
    using T = decltype(zero);
    const auto data = [](const auto& x) { return x->template const_data_ptr<float>(); };
    const flash_decode::Call<T> call{
        B, Hq, Hkv, Sq, Skv, D, Dv,
        pairs_of<T>(q), pairs_of<T>(k), pairs_of<T>(v),
        static_cast<float>(scale), static_cast<float>(cap),
        left, right, offset,
        offsets ? offsets->const_data_ptr<int64_t>() : nullptr,
        lengths ? lengths->const_data_ptr<int64_t>() : nullptr,
        keep ? pairs_of<uint8_t>(keep->view(at::kByte)) : Pairs<uint8_t>{},
        bias ? pairs_of<float>(*bias) : Pairs<float>{},
        slopes ? data(slopes) : nullptr,
        sinks ? data(sinks) : nullptr,
        out.mutable_data_ptr<T>(),
        lse.defined() ? lse.mutable_data_ptr<float>() : nullptr};
    flash_decode::compute(call);
  };
  {
    pybind11::gil_scoped_release no_gil;
    RECORD_FUNCTION("attn_dispatch::flash_decode", (std::vector<c10::IValue>{q, k, v}));  // for torch.profiler
    if (q.scalar_type() == at::kFloat) {
      compute_as(0.f);
    } else if (q.scalar_type() == at::kBFloat16) {
      compute_as(at::BFloat16(0.f));
    } else if (q.scalar_type() == at::kHalf) {
      compute_as(at::Half(0.f));
    } else {
      TORCH_CHECK_TYPE(false, "decode takes float32, bfloat16 and float16, got ", q.scalar_type());
    }
  }
  if (!lse.defined()) {
    return THPVariable_Wrap(std::move(out));
  }
  THPObjectPtr first(THPVariable_Wrap(std::move(out))), second(THPVariable_Wrap(std::move(lse)));
  return first && second ? PyTuple_Pack(2, first.get(), second.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

// plain(otherwise, scale, cap, left, right, offset, q, k, v, operands): `decode` without more tensors, as the run of a
// plan takes them when `functools.partial` has bound the first six: no frame of Python lies between a call and the
// kernel. `otherwise` is called with the last four where `decode` does not compute it.
PyObject* plain(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  constexpr Py_ssize_t kBound = 6, kGiven = 4;
  if (count != kBound + kGiven) {
    PyErr_Format(PyExc_TypeError, "plain takes %zd arguments, got %zd", kBound + kGiven, count);
    return nullptr;
  }
  PyObject* const* given = args + kBound;
  PyObject* const all[] = {given[0], given[1], given[2], args[1], args[2], args[3], args[4], args[5], Py_False};
  PyObject* result = decode(module, all, std::size(all));
  if (result != Py_NotImplemented) {
    return result;
  }
  Py_DECREF(result);
  return PyObject_Vectorcall(args[0], given, kGiven, nullptr);
}

PyMethodDef methods[] = {
    {"plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(plain)), METH_FASTCALL,
     "plain(otherwise, scale, cap, left, right, offset, q, k, v, operands) -> out"},
    {"decode", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(decode)), METH_FASTCALL,
     "decode(q, k, v, scale, cap, left, right, offset, lse, offsets, lengths, keep, bias, slopes, sinks) -> out | "
     "(out, lse)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_decode", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__decode() {
  return PyModuleDef_Init(&module_def);
}
