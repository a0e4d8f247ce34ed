// Whether a sampler's step is made of what the last one was made of, told
// object by object: Note [Steps that are made again] in
// torch_sgmcmc/chain/again.py.
//
// What is compared is Python's, and so is compared by its C interface: a dozen
// lookups take a third of a network's step where an interpreter makes them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/packed_call.h"
#include "python/memory.h"

namespace py = pybind11;

namespace {

// Whether they are one object, or equal.
bool AreEqual(py::handle one, py::handle other) {
  const int equal = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

py::object Interned(const char* name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
}

class Sameness {
 public:
  // `own` is what is the sampler's in its group; `others` the keys of what is
  // neither that nor parameters.
  Sameness(const py::dict& group,
           const py::dict& own,
           const py::dict& state,
           const std::vector<py::object>& others)
      : group_(Keep(group)), own_(Keep(own)), state_(Keep(state)) {
    for (const py::handle p : py::list(group["params"])) {
      params_.push_back(Keep(p));
      bytes_.push_back(p.attr(nbytes_).cast<int64_t>());
    }
    for (const auto& [p, dict] : state) {
      std::vector<PyObject*> values;
      for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(dict)) {
        values.push_back(Keep(value));
      }
      states_.emplace_back(Keep(dict), std::move(values));
    }
    for (const py::object& key : others) numbers_[key] = py::none();
    Note();
  }

  void Note() {
    const py::handle group = group_;
    for (const auto& [key, value] : numbers_) numbers_[key] = group[key];
  }

  bool has_same_numbers() const { return HasSame(numbers_); }

  // The parameters' gradients; None if anything but these and numbers differs.
  py::object Gradients(py::handle groups, py::handle state) const {
    if (!IsOwnGroup(groups) || state.ptr() != state_ || !HasSame(own_) ||
        !HasSameState()) {
      return py::none();
    }
    PyObject* params = PyDict_GetItemString(group_, "params");
    if (params == nullptr || !PyList_CheckExact(params) ||
        PyList_GET_SIZE(params) != Size(params_)) {
      return py::none();
    }
    py::list grads(params_.size());
    for (Py_ssize_t i = 0; i < Size(params_); ++i) {
      const py::handle p = params_[static_cast<size_t>(i)];
      if (PyList_GET_ITEM(params, i) != p.ptr()) return py::none();
      const py::object requires_grad = p.attr(requires_grad_);
      const py::object bytes = p.attr(nbytes_);
      py::object grad = p.attr(grad_);
      if (requires_grad.ptr() != Py_True || grad.is_none() ||
          PyLong_AsLongLong(bytes.ptr()) != bytes_[static_cast<size_t>(i)]) {
        return py::none();
      }
      PyList_SET_ITEM(grads.ptr(), i, grad.release().ptr());
    }
    return std::move(grads);
  }

  // For the garbage collector, which a parameter that knows its sampler needs.
  int Traverse(visitproc visit, void* arg) const {
    Py_VISIT(kept_.ptr());
    Py_VISIT(numbers_.ptr());
    return 0;
  }
  void Clear() {
    group_ = nullptr;
    kept_ = py::list();
    numbers_ = py::dict();
  }

 private:
  template <class T>
  static Py_ssize_t Size(const std::vector<T>& items) {
    return static_cast<Py_ssize_t>(items.size());
  }

  PyObject* Keep(py::handle object) {
    kept_.append(object);
    return object.ptr();
  }

  bool IsOwnGroup(py::handle groups) const {
    return PyList_CheckExact(groups.ptr()) &&
           PyList_GET_SIZE(groups.ptr()) == 1 && group_ != nullptr &&
           PyList_GET_ITEM(groups.ptr(), 0) == group_ &&
           PyDict_GET_SIZE(group_) ==
               PyDict_GET_SIZE(own_) + PyDict_GET_SIZE(numbers_.ptr()) + 1;
  }

  // Whether the group has these values.
  bool HasSame(py::handle values) const {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0;
         PyDict_Next(values.ptr(), &at, &key, &value) != 0;) {
      PyObject* now = PyDict_GetItemWithError(group_, key);
      if (now == nullptr || !AreEqual(value, now)) return false;
    }
    return true;
  }

  bool HasSameState() const {
    if (PyDict_GET_SIZE(state_) != Size(states_)) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    auto known = states_.begin();
    for (Py_ssize_t at = 0; PyDict_Next(state_, &at, &key, &value) != 0;
         ++known) {
      if (value != known->first || !HasValues(value, known->second)) {
        return false;
      }
    }
    return true;
  }

  static bool HasValues(PyObject* dict, const std::vector<PyObject*>& values) {
    if (PyDict_GET_SIZE(dict) != Size(values)) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    auto expected = values.begin();
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
      if (value != *expected++) return false;
    }
    return true;
  }

  py::object requires_grad_ = Interned("requires_grad");
  py::object grad_ = Interned("grad");
  py::object nbytes_ = Interned("nbytes");
  py::list kept_;  // what is pointed to below
  PyObject* group_;
  PyObject* own_;
  PyObject* state_;
  std::vector<PyObject*> params_;
  std::vector<int64_t> bytes_;  // of each
  std::vector<std::pair<PyObject*, std::vector<PyObject*>>> states_;
  py::dict numbers_;
};

// Null while it is being made.
Sameness* SamenessOf(PyObject* object) {
  const auto* instance = reinterpret_cast<py::detail::instance*>(object);
  if (!instance->simple_layout || !instance->simple_holder_constructed) {
    return nullptr;
  }
  return py::cast<Sameness*>(py::handle(object));
}

void CollectGarbage(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    const Sameness* self = SamenessOf(object);
    return self == nullptr ? 0 : self->Traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* object) {
    if (Sameness* self = SamenessOf(object)) self->Clear();
    return 0;
  };
}

}  // namespace

void BindAgain(py::module_& m) {
  py::class_<Sameness>(m,
                       "Sameness",
                       py::custom_type_setup(&CollectGarbage),
                       "What a step was made of.")
      .def(py::init<const py::dict&,
                    const py::dict&,
                    const py::dict&,
                    const std::vector<py::object>&>())
      .def("note", &Sameness::Note, "Keeps the numbers as they are now.")
      .def("has_same_numbers", &Sameness::has_same_numbers)
      .def(
          "gradients",
          &Sameness::Gradients,
          "Of the same parameters, in the groups and with the state that are "
          "given; None if anything but gradients and numbers is not the same.");

  m.def(
      "packed_call",
      [](int64_t row,
         bool looks,
         int64_t seed,
         int64_t num_chains,
         bool has_means,
         std::vector<int64_t> lengths,
         std::vector<int64_t> offsets,
         std::vector<double> numbers) {
        const torch_sgmcmc::PackedCall call{row,
                                            static_cast<int64_t>(looks),
                                            seed,
                                            num_chains,
                                            static_cast<int64_t>(has_means),
                                            std::move(lengths),
                                            std::move(offsets),
                                            std::move(numbers)};
        return torch_sgmcmc::Memory(call.Pack());
      },
      py::kw_only(),
      py::arg("row"),
      py::arg("looks"),
      py::arg("seed"),
      py::arg("num_chains"),
      py::arg("has_means"),
      py::arg("lengths"),
      py::arg("offsets"),
      py::arg("numbers"),
      "The memory of int64[]: csrc/core/packed_call.h.");
}
