// The guard of a step plan (torch_sgmcmc/core/step_plan.py): compares param
// groups, parameters and state object by object. In Python a dozen lookups
// would take a third of a small network's step.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/packed_step.h"

namespace py = pybind11;

namespace torch_sgmcmc {
namespace {

py::object Interned(const char* name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
}

// True for immutable objects.
bool IsPlain(PyObject* object) {
  return object == Py_None || PyBool_Check(object) ||
         PyFloat_CheckExact(object) || PyLong_CheckExact(object) ||
         PyUnicode_CheckExact(object);
}

// True if two values are of the same plain type, and equal.
bool IsUnchanged(PyObject* known, PyObject* now) {
  if (!IsPlain(known)) return false;
  if (known == now) return true;
  if (Py_TYPE(known) != Py_TYPE(now)) return false;
  const int equal = PyObject_RichCompareBool(known, now, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

bool IsPositive(PyObject* object) {
  return PyFloat_CheckExact(object) && PyFloat_AS_DOUBLE(object) > 0 &&
         std::isfinite(PyFloat_AS_DOUBLE(object));
}

using Items = std::vector<std::pair<PyObject*, PyObject*>>;

struct Parameter {
  PyObject* tensor;
  PyObject* dtype;
  int64_t bytes;
  bool requires_grad;
};

struct Group {
  PyObject* dict;
  Py_ssize_t size;
  bool is_updated;  // its lr is not 0
  std::vector<Parameter> params;
  Items owned;  // what the sampler shows in the group: compared by identity
  // Hyperparameters: compared by type and value.
  std::vector<std::pair<PyObject*, py::object>> values;
};

struct State {
  PyObject* param;
  PyObject* dict;
  Items items;
};

class PlanGuard {
 public:
  // `owned` are the sampler's values in each group, `is_updated` whether the
  // plan has the group, `hyperparameters` the packed keys.
  PlanGuard(const py::list& groups, const std::vector<py::dict>& owned,
            const std::vector<bool>& is_updated,
            const std::vector<py::str>& hyperparameters, const py::dict& state)
      : state_(Keep(state)) {
    for (size_t i = 0; i < owned.size(); ++i) {
      const auto dict = py::reinterpret_borrow<py::dict>(groups[i]);
      Group group{Keep(dict), PyDict_Size(dict.ptr()), is_updated[i], {}, {},
                  {}};
      for (const py::handle p : py::list(dict["params"])) {
        group.params.push_back({Keep(p), Keep(p.attr(dtype_)),
                                p.attr(nbytes_).cast<int64_t>(),
                                p.attr(requires_grad_).cast<bool>()});
      }
      for (const auto& [key, value] : owned[i]) {
        group.owned.emplace_back(Keep(key), Keep(value));
      }
      for (const py::str& key : hyperparameters) {
        if (dict.contains(key)) group.values.emplace_back(Keep(key), dict[key]);
      }
      groups_.push_back(std::move(group));
    }
    for (const auto& [p, dict] : state) {
      State kept{Keep(p), Keep(dict), {}};
      for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(dict)) {
        kept.items.emplace_back(Keep(key), Keep(value));
      }
      states_.push_back(std::move(kept));
    }
  }

  // A value of the key `besides` may have changed from a float > 0 to another.
  bool HasSameValues(const std::optional<py::str>& besides) const {
    for (const Group& group : groups_) {
      for (const auto& [key, value] : group.values) {
        PyObject* now = PyDict_GetItemWithError(group.dict, key);
        if (now == nullptr) return false;
        if (!IsUnchanged(value.ptr(), now) &&
            !(besides && PyUnicode_Compare(key, besides->ptr()) == 0 &&
              IsPositive(value.ptr()) && IsPositive(now))) {
          return false;
        }
      }
    }
    return true;
  }

  void Note() {
    for (Group& group : groups_) {
      for (auto& [key, value] : group.values) {
        PyObject* now = PyDict_GetItemWithError(group.dict, key);
        if (now != nullptr) value = py::reinterpret_borrow<py::object>(now);
      }
    }
  }

  // The gradients of the plan's parameters; None if anything but gradients and
  // hyperparameters has changed.
  py::object Gradients(py::handle groups, py::handle state) const {
    if (state.ptr() != state_ || !PyList_CheckExact(groups.ptr()) ||
        PyList_GET_SIZE(groups.ptr()) != Size(groups_) || !HasSameState()) {
      return py::none();
    }
    py::list grads;
    for (Py_ssize_t i = 0; i < Size(groups_); ++i) {
      const Group& group = groups_[static_cast<size_t>(i)];
      if (PyList_GET_ITEM(groups.ptr(), i) != group.dict ||
          !AddGradients(group, grads)) {
        return py::none();
      }
    }
    return grads;
  }

  // For the garbage collector: a parameter may refer to its sampler.
  int Traverse(visitproc visit, void* arg) const {
    Py_VISIT(kept_.ptr());
    for (const Group& group : groups_) {
      for (const auto& [key, value] : group.values) Py_VISIT(value.ptr());
    }
    return 0;
  }
  void Clear() {
    state_ = nullptr;
    groups_.clear();
    states_.clear();
    kept_ = py::list();
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

  bool AddGradients(const Group& group, py::list& grads) const {
    if (PyDict_Size(group.dict) != group.size) return false;
    for (const auto& [key, value] : group.owned) {
      if (PyDict_GetItemWithError(group.dict, key) != value) return false;
    }
    PyObject* params = PyDict_GetItem(group.dict, params_.ptr());
    if (params == nullptr || !PyList_CheckExact(params) ||
        PyList_GET_SIZE(params) != Size(group.params)) {
      return false;
    }
    for (Py_ssize_t i = 0; i < Size(group.params); ++i) {
      const Parameter& known = group.params[static_cast<size_t>(i)];
      const py::handle p = known.tensor;
      if (PyList_GET_ITEM(params, i) != p.ptr()) return false;
      const py::object requires_grad = p.attr(requires_grad_);
      if ((requires_grad.ptr() == Py_True) != known.requires_grad) return false;
      if (!known.requires_grad || !group.is_updated) continue;
      const py::object bytes = p.attr(nbytes_);
      const py::object dtype = p.attr(dtype_);
      const py::object grad = p.attr(grad_);
      if (grad.is_none() || dtype.ptr() != known.dtype ||
          PyLong_AsLongLong(bytes.ptr()) != known.bytes) {
        return false;
      }
      grads.append(grad);
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
      if (key != known->param || value != known->dict ||
          !HasItems(value, known->items)) {
        return false;
      }
    }
    return true;
  }

  // Compares names by identity; another string of the same name rebuilds the
  // plan.
  static bool HasItems(PyObject* dict, const Items& items) {
    if (PyDict_GET_SIZE(dict) != Size(items)) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    auto expected = items.begin();
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;
         ++expected) {
      if (key != expected->first || value != expected->second) return false;
    }
    return true;
  }

  py::object params_ = Interned("params");
  py::object requires_grad_ = Interned("requires_grad");
  py::object grad_ = Interned("grad");
  py::object nbytes_ = Interned("nbytes");
  py::object dtype_ = Interned("dtype");
  py::list kept_;  // what is pointed to below
  PyObject* state_;
  std::vector<Group> groups_;
  std::vector<State> states_;
};

// Null during construction.
PlanGuard* GuardOf(PyObject* object) {
  const auto* instance = reinterpret_cast<py::detail::instance*>(object);
  if (!instance->simple_layout || !instance->simple_holder_constructed) {
    return nullptr;
  }
  return py::cast<PlanGuard*>(py::handle(object));
}

void CollectGarbage(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    const PlanGuard* self = GuardOf(object);
    return self == nullptr ? 0 : self->Traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* object) {
    if (PlanGuard* self = GuardOf(object)) self->Clear();
    return 0;
  };
}

}  // namespace

void BindPlanGuard(py::module_& m) {
  py::class_<PlanGuard>(m, "PlanGuard", py::custom_type_setup(&CollectGarbage),
                        "What a step plan was made of.")
      .def(py::init<const py::list&, const std::vector<py::dict>&,
                    const std::vector<bool>&, const std::vector<py::str>&,
                    const py::dict&>())
      .def("note", &PlanGuard::Note, "Takes hyperparameters as they are now.")
      .def("has_same_values", &PlanGuard::HasSameValues,
           py::arg("besides") = py::none(),
           "Whether hyperparameters are of the same types and values, besides "
           "one that is finite and > 0.")
      .def("gradients", &PlanGuard::Gradients,
           "Returns the gradients of the plan's parameters; None if anything "
           "but gradients and hyperparameters has changed.");

  using Call = std::tuple<int64_t,               // row
                          bool,                  // has_means
                          std::vector<int64_t>,  // lengths
                          std::vector<int64_t>,  // offsets
                          std::vector<int64_t>,  // rows
                          std::vector<double>>;  // numbers
  m.def(
      "packed_step",
      [](bool checks, int64_t seed, int64_t num_chains,
         const std::vector<Call>& calls) {
        PackedStep step{static_cast<int64_t>(checks), seed, num_chains, {}};
        for (const auto& [op, has_means, lengths, offsets, rows, numbers] :
             calls) {
          step.calls.push_back({op, static_cast<int64_t>(has_means), lengths,
                                offsets, rows, numbers});
        }
        const std::vector<int64_t> numbers = step.Pack();
        return py::bytearray(reinterpret_cast<const char*>(numbers.data()),
                             numbers.size() * sizeof(int64_t));
      },
      py::kw_only(), py::arg("checks"), py::arg("seed"), py::arg("num_chains"),
      py::arg("calls"),
      "The memory of int64[]: csrc/launch/packed_step.h. A call is (op, "
      "has_means, lengths, offsets, rows, numbers).");
}

}  // namespace torch_sgmcmc
