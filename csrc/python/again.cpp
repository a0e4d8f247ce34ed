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

// A list is copied: it may be written into.
py::object Kept(const py::object& value) {
  return PyList_CheckExact(value.ptr()) ? value.attr("copy")() : value;
}

class Sameness {
 public:
  // `own` is what is the sampler's in its group; `others` the keys of what is
  // neither that nor parameters.
  Sameness(py::dict group,
           py::dict own,
           py::dict state,
           std::vector<py::object> others)
      : group_(std::move(group)),
        own_(std::move(own)),
        state_(std::move(state)) {
    for (const py::handle p : py::list(group_["params"])) {
      params_.push_back(py::reinterpret_borrow<py::object>(p));
    }
    for (const auto& [p, dict] : state_) {
      const auto of_param = py::reinterpret_borrow<py::dict>(dict);
      std::vector<py::object> values;
      for (const auto& [key, value] : of_param) {
        values.push_back(py::reinterpret_borrow<py::object>(value));
      }
      states_.emplace_back(of_param, std::move(values));
    }
    for (py::object& key : others)
      numbers_.emplace_back(std::move(key), py::none());
    Note();
  }

  void Note() {
    for (auto& [key, value] : numbers_)
      value = Kept(group_[key].cast<py::object>());
  }

  bool has_same_numbers() const {
    for (const auto& [key, value] : numbers_) {
      PyObject* now = PyDict_GetItemWithError(group_.ptr(), key.ptr());
      if (now == nullptr || !AreEqual(value, now)) return false;
    }
    return true;
  }

  // The parameters' gradients; None if anything but these and numbers differs.
  py::object Gradients(py::handle groups, py::handle state) const {
    if (!IsOwnGroup(groups) || state.ptr() != state_.ptr() || !HasOwn() ||
        !HasSameState()) {
      return py::none();
    }
    PyObject* params = PyDict_GetItemString(group_.ptr(), "params");
    if (params == nullptr || !PyList_CheckExact(params) ||
        PyList_GET_SIZE(params) != Size(params_)) {
      return py::none();
    }
    static const py::str kGrad = "grad";
    static const py::str kRequiresGrad = "requires_grad";
    py::list grads(params_.size());
    for (Py_ssize_t i = 0; i < Size(params_); ++i) {
      const py::handle p = params_[static_cast<size_t>(i)];
      if (PyList_GET_ITEM(params, i) != p.ptr()) return py::none();
      const py::object requires_grad = p.attr(kRequiresGrad);
      py::object grad = p.attr(kGrad);
      if (requires_grad.ptr() != Py_True || grad.is_none()) return py::none();
      PyList_SET_ITEM(grads.ptr(), i, grad.release().ptr());
    }
    return grads;
  }

 private:
  template <class T>
  static Py_ssize_t Size(const std::vector<T>& items) {
    return static_cast<Py_ssize_t>(items.size());
  }

  bool IsOwnGroup(py::handle groups) const {
    return PyList_CheckExact(groups.ptr()) &&
           PyList_GET_SIZE(groups.ptr()) == 1 &&
           PyList_GET_ITEM(groups.ptr(), 0) == group_.ptr() &&
           PyDict_GET_SIZE(group_.ptr()) ==
               PyDict_GET_SIZE(own_.ptr()) + Size(numbers_) + 1;
  }

  bool HasOwn() const {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(own_.ptr(), &at, &key, &value);) {
      PyObject* now = PyDict_GetItemWithError(group_.ptr(), key);
      if (now == nullptr || !AreEqual(value, now)) return false;
    }
    return true;
  }

  bool HasSameState() const {
    if (PyDict_GET_SIZE(state_.ptr()) != Size(states_)) return false;
    PyObject *key, *value;
    auto known = states_.begin();
    for (Py_ssize_t at = 0; PyDict_Next(state_.ptr(), &at, &key, &value);
         ++known) {
      const auto& [dict, values] = *known;
      if (value != dict.ptr() || PyDict_GET_SIZE(value) != Size(values))
        return false;
      PyObject *name, *item;
      auto expected = values.begin();
      for (Py_ssize_t in = 0; PyDict_Next(value, &in, &name, &item);
           ++expected) {
        if (item != expected->ptr()) return false;
      }
    }
    return true;
  }

  py::dict group_;
  py::dict own_;
  py::dict state_;
  std::vector<py::object> params_;
  std::vector<std::pair<py::dict, std::vector<py::object>>> states_;
  std::vector<std::pair<py::object, py::object>> numbers_;
};

}  // namespace

void BindAgain(py::module_& m) {
  py::class_<Sameness>(m, "Sameness", "What a step was made of.")
      .def(py::init<py::dict, py::dict, py::dict, std::vector<py::object>>())
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
         double prior_mean,
         std::vector<int64_t> lengths,
         std::vector<int64_t> bytes,
         std::vector<int64_t> offsets,
         std::vector<double> numbers) {
        const torch_sgmcmc::PackedCall call{row,
                                            static_cast<int64_t>(looks),
                                            seed,
                                            num_chains,
                                            static_cast<int64_t>(has_means),
                                            prior_mean,
                                            std::move(lengths),
                                            std::move(bytes),
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
      py::arg("prior_mean"),
      py::arg("lengths"),
      py::arg("bytes"),
      py::arg("offsets"),
      py::arg("numbers"),
      "The memory of int64[]: csrc/core/packed_call.h.");
}
