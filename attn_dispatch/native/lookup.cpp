// The warm path of `attn_dispatch.routes` in C++: `find` is `find_in_python` there, and `Guard` compares what torch's
// `TensorGuards` and `PythonGuard` compare; tests/test_routes.py holds them to it. `answer` remembers the last routes
// that `find` found and answers the same call again: in a model the kernel before has emptied the caches, and each line
// of memory that is read costs, so it reads few. Built by `attn-dispatch build` against the torch that is installed,
// since it reads tensors as torch itself does. Python takes two microseconds more for it. It relies on the GIL.

#include <Python.h>

#include <ATen/Context.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace {

PyTypeObject* guard_type = nullptr;
PyObject *name_check = nullptr, *name_run = nullptr, *name_runs = nullptr;

// What surrounds a call: grad mode, and the dispatch keys that autocast, inference mode, functorch and modes add.
struct Surroundings {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  bool grad = c10::GradMode::is_enabled();

  uint64_t keys_of(const at::TensorBase& x) const {
    return ((x.key_set() | keys.included_) - keys.excluded_).raw_repr();
  }
};

// One tensor as it was when its route was made.
class Facts {
 public:
  Facts(PyObject* object, const at::TensorBase& x, const Surroundings& around, bool length_is_open)
      : type_(THPObjectPtr(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(object))))),
        keys_(around.keys_of(x)),
        dtype_(x.scalar_type()),
        device_(x.device()),
        requires_grad_(around.grad && x.requires_grad()),
        sizes_(x.sizes().begin(), x.sizes().end()) {
    if (x.dim() > 0 && x.sizes().back() > 1) {
      last_stride_ = x.strides().back();
    }
    if (length_is_open) {
      sizes_[2] = kOpen;
    }
  }

  // Whether comparing with it runs nobody's code: a subclass may answer for its sizes and device itself.
  bool is_plain() const {
    return type_.get() == THPVariableClass || type_.get() == ParameterClass;
  }

  bool hold_for(PyObject* object, const Surroundings& around) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.get()) {
      return false;  // each type that is kept is a subclass of torch.Tensor, so what follows may read it as one
    }
    const at::TensorBase& x = THPVariable_Unpack(object);
    // the keys first: they tell strided tensors from nested and sparse ones, which have no strides to be asked for
    if (around.keys_of(x) != keys_ || x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
        x.scalar_type() != dtype_ || x.device() != device_ || (around.grad && x.requires_grad()) != requires_grad_) {
      return false;
    }
    const auto sizes = x.sizes();
    if (sizes.size() != sizes_.size()) {
      return false;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != sizes_[i] && sizes_[i] != kOpen) {
        return false;
      }
    }
    return !last_stride_ || x.strides().back() == *last_stride_;
  }

 private:
  static constexpr int64_t kOpen = -1;

  THPObjectPtr type_;
  uint64_t keys_;
  at::ScalarType dtype_;
  c10::Device device_;
  bool requires_grad_;
  c10::SmallVector<int64_t, 5> sizes_;
  std::optional<int64_t> last_stride_;
};

struct Guard {
  PyObject_HEAD
  std::vector<Facts>* facts;

  bool holds_for(PyObject* const* tensors, size_t count, const Surroundings& around) const {
    if (count != facts->size()) {
      return false;
    }
    for (size_t i = 0; i < count; ++i) {
      if (!(*facts)[i].hold_for(tensors[i], around)) {
        return false;
      }
    }
    return true;
  }

  bool is_plain() const {
    return std::all_of(facts->begin(), facts->end(), [](const Facts& one) { return one.is_plain(); });
  }
};

PyObject* new_guard(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"tensors", "open_key_length", nullptr};
  PyObject* tensors = nullptr;
  int is_open = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "O!|p:Guard", const_cast<char**>(names), &PyTuple_Type, &tensors, &is_open)) {
    return nullptr;
  }
  const Surroundings around;
  auto facts = std::make_unique<std::vector<Facts>>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    // not THPVariable_Check, which believes what a proxy says of its class
    if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      PyErr_Format(PyExc_TypeError, "Guard takes tensors, got a %s", Py_TYPE(object)->tp_name);
      return nullptr;
    }
    const at::TensorBase& x = THPVariable_Unpack(object);
    const bool opens = is_open && (i == 1 || i == 2);
    if (x.is_nested() || x.layout() != at::kStrided || x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
        (opens && x.dim() != 4)) {
      PyErr_SetString(PyExc_ValueError, "Guard takes strided tensors whose sizes are numbers; an open length is of 4-D keys");
      return nullptr;
    }
    facts->emplace_back(object, x, around, opens);
  }
  auto* guard = reinterpret_cast<Guard*>(type->tp_alloc(type, 0));
  if (guard != nullptr) {
    guard->facts = facts.release();
  }
  return reinterpret_cast<PyObject*>(guard);
  END_HANDLE_TH_ERRORS
}

void delete_guard(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Guard*>(self)->facts;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* call_guard(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  if (kwargs != nullptr && PyDict_GET_SIZE(kwargs) > 0) {
    PyErr_SetString(PyExc_TypeError, "Guard takes tensors by position alone");
    return nullptr;
  }
  const Surroundings around;
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(args));
  return PyBool_FromLong(reinterpret_cast<Guard*>(self)->holds_for(&PyTuple_GET_ITEM(args, 0), count, around));
  END_HANDLE_TH_ERRORS
}

// --- looking for a route ---------------------------------------------------------------------------------------------

// Whether a route is for these tensors; -1 with an exception set.
int is_for(PyObject* route, PyObject* tensors, const Surroundings& around) {
  THPObjectPtr check(PyObject_GetAttr(route, name_check));
  if (!check) {
    return -1;
  }
  if (Py_TYPE(check.get()) == guard_type) {
    const auto count = static_cast<size_t>(PyTuple_GET_SIZE(tensors));
    return reinterpret_cast<Guard*>(check.get())->holds_for(&PyTuple_GET_ITEM(tensors, 0), count, around) ? 1 : 0;
  }
  THPObjectPtr verdict(PyObject_CallObject(check, tensors));  // a guard in Python
  return verdict ? PyObject_IsTrue(verdict) : -1;
}

// The run for the key length of these tensors, which the guard left open; as `run_of`.
PyObject* run_of_bucket(PyObject* runs, PyObject* key, PyObject* value) {
  const int64_t length = THPVariable_Unpack(key).size(2);
  if (THPVariable_Unpack(value).size(2) != length) {
    return nullptr;
  }
  int bits = 0;
  for (int64_t rest = length - 1; rest > 0; rest >>= 1) {
    ++bits;
  }
  THPObjectPtr index(PyLong_FromLong(bits));
  return index ? Py_XNewRef(PyDict_GetItemWithError(runs, index)) : nullptr;
}

// The run of a route that is for these tensors: a new reference; null without an exception where a bucket has none yet.
PyObject* run_of(PyObject* route, PyObject* tensors) {
  THPObjectPtr runs(PyObject_GetAttr(route, name_runs));
  if (!runs) {
    return nullptr;
  }
  if (runs.get() == Py_None) {
    return PyObject_GetAttr(route, name_run);
  }
  return run_of_bucket(runs, PyTuple_GET_ITEM(tensors, 1), PyTuple_GET_ITEM(tensors, 2));
}

// --- the routes found last -------------------------------------------------------------------------------------------

// Where the parts of the key stand that `attention` makes of a call.
enum Option {
  kMaskText, kNames, kOffset, kVariant, kCausal, kDropout, kScale, kGqa, kWindow, kSoftcap, kLayout, kLse, kWeights,
  kBackend, kContext, kDeterministic, kForwardAd, kOptions
};

// A route found lately, and the key that it was found with.
struct Recent {
  THPObjectPtr options, route, guard, run, runs;  // `runs` is null where the length is not open
};

constexpr size_t kRecent = 8;
std::array<Recent, kRecent>& recent = *new std::array<Recent, kRecent>{};  // never destroyed: Python has ended by then
size_t recent_count = 0;
uint64_t times_forgotten = 0;
PyObject *active_context = nullptr, *forward_ad = nullptr, *name_level = nullptr;
PyTypeObject* mask_type = nullptr;
PyObject *name_text = nullptr, *name_bound = nullptr, *text_of_tensor = nullptr;

// Whether two options are the same: by identity, or by value where that runs nobody's code.
bool is_same(PyObject* a, PyObject* b) {
  if (a == b) {
    return true;
  }
  if (Py_TYPE(a) != Py_TYPE(b)) {
    return false;
  }
  if (PyFloat_CheckExact(a)) {
    return PyFloat_AS_DOUBLE(a) == PyFloat_AS_DOUBLE(b);
  }
  if (PyLong_CheckExact(a) || PyUnicode_CheckExact(a)) {
    return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
  }
  if (!PyTuple_CheckExact(a) || PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
    if (!is_same(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) {
      return false;
    }
  }
  return true;
}

// Keeps a route for `answer`, where its guard runs no Python, which could change what is kept while `answer` looks
// through it.
void remember(PyObject* options, PyObject* route) {
  if (!PyTuple_CheckExact(options) || PyTuple_GET_SIZE(options) != kOptions ||
      !PyTuple_CheckExact(PyTuple_GET_ITEM(options, kNames)) || PyTuple_GET_ITEM(options, kVariant) != Py_None) {
    return;
  }
  for (size_t i = 0; i < recent_count; ++i) {
    if (recent[i].route.get() == route) {  // found by options that are equal, and not the same
      THPObjectPtr older(Py_NewRef(options));
      std::swap(recent[i].options, older);  // freed when the newer are in their place: that may run anything
      return;
    }
  }
  Recent found;
  found.guard = THPObjectPtr(PyObject_GetAttr(route, name_check));
  found.run = THPObjectPtr(PyObject_GetAttr(route, name_run));
  found.runs = THPObjectPtr(PyObject_GetAttr(route, name_runs));
  if (!found.guard || !found.run || !found.runs) {
    PyErr_Clear();
    return;
  }
  if (Py_TYPE(found.guard.get()) != guard_type || !reinterpret_cast<const Guard*>(found.guard.get())->is_plain()) {
    return;
  }
  if (found.runs.get() == Py_None) {
    found.runs = THPObjectPtr();
  }
  found.options = THPObjectPtr(Py_NewRef(options));
  found.route = THPObjectPtr(Py_NewRef(route));
  const bool is_full = recent_count == kRecent;
  recent_count += is_full ? 0 : 1;
  const Recent oldest = std::exchange(recent[recent_count - 1], std::move(found));  // freed when all is in its place
  std::rotate(recent.begin(), recent.begin() + recent_count - 1, recent.begin() + recent_count);
}

PyObject* forget(PyObject* /*module*/, PyObject* /*unused*/) {
  recent_count = 0;
  ++times_forgotten;
  const std::array<Recent, kRecent> gone = std::exchange(recent, {});  // freed when none of them can be found any more
  Py_RETURN_NONE;
}

PyObject* watch(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyContextVar_CheckExact(args[0]) || !PyDict_Check(args[1]) || !PyType_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "watch takes a context variable, the names of torch.autograd.forward_ad, and Mask");
    return nullptr;
  }
  Py_XSETREF(active_context, Py_NewRef(args[0]));
  Py_XSETREF(forward_ad, Py_NewRef(args[1]));
  Py_XSETREF(mask_type, reinterpret_cast<PyTypeObject*>(Py_NewRef(args[2])));
  Py_RETURN_NONE;
}

// What `answer` is given, in this order: tensors, then options as in the key from `kCausal` to `kBackend`.
enum Given {
  kQuery, kKey, kValue, kMask, kOperands, kOffsetGiven = kOperands + 4, kOptionsGiven,
  kGiven = kOptionsGiven + kContext - kCausal
};

// What `attention` collects of a call: the tensors in the order of the guard, and names for those after the first three.
class Collected {
 public:
  // False where it is left to Python: an operand that is no plain tensor, a mask that is no mask.
  bool collect(PyObject* const* given) {
    for (int i = kQuery; i <= kValue; ++i) {
      add(nullptr, given[i]);
    }
    PyObject* mask = given[kMask];
    if (mask == Py_None) {
      text = Py_None;
    } else if (is_plain(mask)) {
      text = text_of_tensor;
      add(names[0], mask);
    } else if (!collect_mask(mask)) {
      return false;
    }
    for (int i = 0; i < 4; ++i) {
      PyObject* operand = given[kOperands + i];
      if (operand != Py_None && !(is_plain(operand) && add(names[1 + i], operand))) {
        return false;
      }
    }
    offset = given[kOffsetGiven];
    if (offset != Py_None && PyObject_TypeCheck(offset, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      if (!(is_plain(offset) && add(names[5], offset))) {
        return false;
      }
      offset = Py_None;
    }
    return true;
  }

  bool is_named_like(PyObject* others) const {
    const auto named = static_cast<Py_ssize_t>(count - kMask);
    if (PyTuple_GET_SIZE(others) != named) {
      return false;
    }
    for (Py_ssize_t i = 0; i < named; ++i) {
      if (!is_same(PyTuple_GET_ITEM(others, i), names_[i + kMask])) {
        return false;
      }
    }
    return true;
  }

  // A new dict for each call, as Python makes one: a stranger's run may write into it.
  PyObject* named() const {
    THPObjectPtr found(PyDict_New());
    for (size_t i = kMask; found && i < count; ++i) {
      if (PyDict_SetItem(found, names_[i], tensors[i]) < 0) {
        return nullptr;
      }
    }
    return found.release();
  }

  static constexpr std::array<const char*, 6> kNamesInOrder = {
      "attn_mask", "bias", "sinks", "query_lengths", "key_lengths", "q_offset"};
  static inline std::array<PyObject*, 6> names{};

  PyObject *text = nullptr, *offset = nullptr;
  size_t count = 0;
  std::array<PyObject*, 16> tensors;  // as many as `count` says

 private:
  static bool is_plain(PyObject* object) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == THPVariableClass || type == ParameterClass;
  }

  bool add(PyObject* name, PyObject* tensor) {
    if (count == tensors.size()) {
      return false;
    }
    names_[count] = name;
    tensors[count++] = tensor;
    return true;
  }

  // The text of the bound mask and its tensors, which the mask keeps once it was asked for them.
  bool collect_mask(PyObject* mask) {
    if (mask_type == nullptr || !PyObject_TypeCheck(mask, mask_type)) {
      return false;
    }
    bound_ = THPObjectPtr(PyObject_GetAttr(mask, name_bound));
    if (!bound_ || !PyTuple_CheckExact(bound_.get()) || PyTuple_GET_SIZE(bound_.get()) != 2) {
      return false;
    }
    PyObject* held = PyTuple_GET_ITEM(bound_.get(), 1);
    text_ = THPObjectPtr(PyObject_GetAttr(PyTuple_GET_ITEM(bound_.get(), 0), name_text));
    if (!text_ || !PyDict_CheckExact(held)) {
      return false;
    }
    text = text_;
    PyObject *name = nullptr, *tensor = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(held, &i, &name, &tensor);) {
      if (!(is_plain(tensor) && add(name, tensor))) {
        return false;
      }
    }
    return true;
  }

  std::array<PyObject*, 16> names_;
  THPObjectPtr bound_, text_;
};

// Whether a route is for a call with these arguments.
bool is_for(
    const Recent& route, const Collected& call, PyObject* const* given, PyObject* context, PyObject* level,
    const Surroundings& around) {
  auto* const* options = &PyTuple_GET_ITEM(const_cast<PyObject*>(route.options.get()), 0);
  if (!is_same(options[kMaskText], call.text) || !is_same(options[kOffset], call.offset) ||
      !call.is_named_like(options[kNames])) {
    return false;
  }
  for (int i = kCausal; i <= kBackend; ++i) {
    if (!is_same(options[i], given[kOptionsGiven + i - kCausal])) {
      return false;
    }
  }
  PyObject* deterministic = at::globalContext().deterministicAlgorithms() ? Py_True : Py_False;
  if (options[kContext] != context || options[kDeterministic] != deterministic || !is_same(options[kForwardAd], level)) {
    return false;
  }
  return reinterpret_cast<const Guard*>(route.guard.get())->holds_for(call.tensors.data(), call.count, around);
}

// answer(query, key, value, attn_mask, bias, sinks, query_lengths, key_lengths, q_offset, is_causal, dropout_p, scale,
// enable_gqa, window, softcap, layout, return_lse, return_weights, backend): the result of a call of softmax attention
// whose route was found lately; NotImplemented where none was.
PyObject* answer(PyObject* /*module*/, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != kGiven) {
    PyErr_Format(PyExc_TypeError, "answer takes %d arguments, got %zd", static_cast<int>(kGiven), count);
    return nullptr;
  }
  Collected call;
  if (forward_ad == nullptr || recent_count == 0 || !call.collect(given)) {
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  }
  PyObject* level = PyDict_GetItemWithError(forward_ad, name_level);
  PyObject* found_context = nullptr;
  if (level == nullptr || PyContextVar_Get(active_context, Py_None, &found_context) < 0) {
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  }
  THPObjectPtr context(found_context);
  const Surroundings around;
  for (size_t i = 0; i < recent_count; ++i) {
    if (!is_for(recent[i], call, given, context, level, around)) {
      continue;
    }
    THPObjectPtr run(
        recent[i].runs ? run_of_bucket(recent[i].runs, given[kKey], given[kValue]) : Py_NewRef(recent[i].run.get()));
    if (!run) {
      if (PyErr_Occurred()) {
        return nullptr;
      }
      continue;  // its bucket has none yet
    }
    if (i > 0) {
      std::swap(recent[i], recent[0]);
    }
    THPObjectPtr named(call.named());
    if (!named) {
      return nullptr;
    }
    PyObject* args[] = {given[kQuery], given[kKey], given[kValue], named};
    return PyObject_Vectorcall(run, args, 4, nullptr);
  }
  Py_RETURN_NOTIMPLEMENTED;
  END_HANDLE_TH_ERRORS
}

// --- the table -------------------------------------------------------------------------------------------------------

// The run of the first route for these options and tensors; null without an exception when there is none.
PyObject* search(PyObject* table, PyObject* options, PyObject* tensors) {
  THPObjectPtr routes(Py_XNewRef(PyDict_GetItemWithError(table, options)));
  if (!routes) {
    return nullptr;
  }
  const Surroundings around;
  const uint64_t before = times_forgotten;  // a guard in Python may let another thread clear the table
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(routes.get()); ++i) {
    PyObject* route = PyTuple_GET_ITEM(routes.get(), i);
    const int verdict = is_for(route, tensors, around);
    if (verdict < 0) {
      return nullptr;
    }
    if (verdict > 0) {
      PyObject* run = run_of(route, tensors);
      if (run != nullptr) {
        if (times_forgotten == before) {
          remember(options, route);
        }
        return run;
      }
      if (PyErr_Occurred()) {
        return nullptr;
      }
    }
  }
  return nullptr;
}

PyObject* find(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !PyDict_Check(args[0]) || !PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "find takes a dict, a key and a tuple of tensors");
    return nullptr;
  }
  PyObject* run = search(args[0], args[1], args[2]);
  if (run != nullptr) {
    return run;
  }
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
      return nullptr;
    }
    PyErr_Clear();  // an unhashable or non-tensor argument: the slow path knows what to say of it
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"find", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(find)), METH_FASTCALL,
     "find(table, options, tensors) -> run | None"},
    {"answer", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(answer)), METH_FASTCALL,
     "answer(query, key, value, attn_mask, bias, sinks, query_lengths, key_lengths, q_offset, *options) -> result | "
     "NotImplemented"},
    {"forget", forget, METH_NOARGS, "forget() -> None: what `find` found lately."},
    {"watch", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(watch)), METH_FASTCALL,
     "watch(context, forward_ad, Mask) -> None: where `answer` reads the end of the key, and what a mask is."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot guard_slots[] = {
    {Py_tp_doc, const_cast<char*>("Guard(tensors, open_key_length=False): called with tensors, says if they are alike.")},
    {Py_tp_new, reinterpret_cast<void*>(new_guard)},
    {Py_tp_dealloc, reinterpret_cast<void*>(delete_guard)},
    {Py_tp_call, reinterpret_cast<void*>(call_guard)},
    {0, nullptr}};

PyType_Spec guard_spec = {"attn_dispatch.native._lookup.Guard", sizeof(Guard), 0, Py_TPFLAGS_DEFAULT, guard_slots};

int fill_module(PyObject* module) {
  name_check = PyUnicode_InternFromString("check");
  name_run = PyUnicode_InternFromString("run");
  name_runs = PyUnicode_InternFromString("runs");
  name_text = PyUnicode_InternFromString("text");
  name_bound = PyUnicode_InternFromString("_bound");
  text_of_tensor = PyUnicode_InternFromString("tensor");
  name_level = PyUnicode_InternFromString("_current_level");
  for (size_t i = 0; i < Collected::names.size(); ++i) {
    Collected::names[i] = PyUnicode_InternFromString(Collected::kNamesInOrder[i]);
  }
  guard_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&guard_spec));
  if (!name_check || !name_run || !name_runs || !name_text || !name_bound || !text_of_tensor || !name_level ||
      guard_type == nullptr || PyErr_Occurred()) {
    return -1;
  }
  return PyModule_AddObjectRef(module, "Guard", reinterpret_cast<PyObject*>(guard_type));
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill_module)}, {0, nullptr}};
PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_lookup", nullptr, 0, methods, module_slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__lookup() {
  return PyModuleDef_Init(&module_def);
}
