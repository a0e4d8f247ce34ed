// Operators for lists that may have DTensors (torch_sgmcmc/chain/shards.py):
// what a step of a small parameter would spend most of its time on in Python.
#include <pybind11/pybind11.h>

#include <vector>

namespace py = pybind11;

namespace {

// What Layouts has found of some parameters.
enum Place { kSpecs, kGiven, kOffsets, kRows, kFollow };

py::object Own(PyObject* object) {
  return py::reinterpret_steal<py::object>(object);
}

PyObject* Item(PyObject* places, Place place) {
  return PyTuple_GET_ITEM(places, place);
}

// A DTensor's attribute; null and no error if it is a plain tensor.
py::object Attribute(PyObject* tensor, PyObject* name) {
  py::object value = Own(PyObject_GetAttr(tensor, name));
  if (!value && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
    PyErr_Clear();
  }
  return value;
}

// Whether a plain tensor is of the type that was found, or a DTensor has the
// spec.
bool IsKnown(PyObject* tensor, PyObject* spec) {
  static PyObject* const kSpec = PyUnicode_InternFromString("_spec");
  if (PyType_Check(spec)) {
    return Py_IS_TYPE(tensor, reinterpret_cast<PyTypeObject*>(spec));
  }
  return Attribute(tensor, kSpec).ptr() == spec;
}

// What was found of these parameters, null if it is of others, or nothing.
PyObject* Find(PyObject* known, PyObject* params, PyObject* offsets) {
  if (PyList_GET_SIZE(offsets) == 0) return nullptr;
  PyObject* places =
      PyDict_GetItemWithError(known, PyList_GET_ITEM(offsets, 0));
  if (places == nullptr) return nullptr;
  PyObject* specs = Item(places, kSpecs);
  const Py_ssize_t count = PyList_GET_SIZE(specs);
  if (PyList_GET_SIZE(params) != count ||
      PyObject_RichCompareBool(offsets, Item(places, kGiven), Py_EQ) != 1) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!IsKnown(PyList_GET_ITEM(params, i), PyList_GET_ITEM(specs, i))) {
      return nullptr;
    }
  }
  return places;
}

// The local tensors of a list that has one for each parameter, or none.
py::object Locals(PyObject* tensors, PyObject* specs) {
  static PyObject* const kLocal = PyUnicode_InternFromString("_local_tensor");
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  py::object locals = Own(PyList_New(count));
  for (Py_ssize_t i = 0; locals && i < count; ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    py::object local;
    if (!PyType_Check(PyList_GET_ITEM(specs, i))) {
      local = Attribute(tensor, kLocal);
      if (PyErr_Occurred() != nullptr) return {};
    }
    if (!local) local = py::reinterpret_borrow<py::object>(tensor);
    PyList_SET_ITEM(locals.ptr(), i, local.release().ptr());
  }
  return locals;
}

// Whether all are in row-major order; -1 with an error.
int AreContiguous(PyObject* tensors) {
  static PyObject* const kName = PyUnicode_InternFromString("is_contiguous");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const py::object is =
        Own(PyObject_CallMethodNoArgs(PyList_GET_ITEM(tensors, i), kName));
    if (!is) return -1;
    if (is.ptr() != Py_True) return 0;
  }
  return 1;
}

// on_shards(known, otherwise, operator, params, *lists, offsets, ...): calls
// the operator with local tensors, if these parameters are known and each list
// has one for each of them or none, else otherwise(operator, ...).
PyObject* OnShards(PyObject* /*self*/,
                   PyObject* const* args,
                   Py_ssize_t count,
                   PyObject* names) {
  static PyObject* const kRowsName = PyUnicode_InternFromString("rows");
  constexpr Py_ssize_t kParams = 3;  // and before it known, otherwise, operator
  if (count <= kParams) {
    PyErr_SetString(PyExc_TypeError, "on_shards: expected an operator's lists");
    return nullptr;
  }
  const Py_ssize_t all =
      count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  const auto otherwise = [&] {
    return PyObject_Vectorcall(args[1], args + 2, count - 2, names);
  };

  // What is a list is cut, but for the offsets.
  PyObject* params = args[kParams];
  Py_ssize_t offsets = -1;
  for (Py_ssize_t i = count; i < all; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i - count);
    if (PyUnicode_CompareWithASCIIString(name, "offsets") == 0) offsets = i;
  }
  if (offsets < 0 || !PyList_CheckExact(args[offsets]) ||
      !PyList_CheckExact(params)) {
    return otherwise();
  }
  PyObject* places = Find(args[0], params, args[offsets]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (places == nullptr) return otherwise();
  const auto kept = py::reinterpret_borrow<py::object>(places);

  std::vector<PyObject*> given(args + 2, args + all);
  std::vector<py::object> owned;
  owned.reserve(given.size());
  for (Py_ssize_t i = kParams; i < all; ++i) {
    if (PyTuple_Check(args[i])) return otherwise();  // of tensors, too
    if (i == offsets || !PyList_CheckExact(args[i])) continue;
    const Py_ssize_t length = PyList_GET_SIZE(args[i]);
    if (length == 0) continue;
    if (length != PyList_GET_SIZE(params)) return otherwise();
    owned.push_back(Locals(args[i], Item(places, kSpecs)));
    if (!owned.back()) return nullptr;
    given[i - 2] = owned.back().ptr();
  }
  given[offsets - 2] = Item(places, kOffsets);
  // An operator takes its time to read rows, which say nothing where elements
  // follow each other.
  int follow = Item(places, kFollow) == Py_True ? 1 : 0;
  if (follow == 1) follow = AreContiguous(given[kParams - 2]);
  if (follow < 0) return nullptr;
  auto with_rows = py::reinterpret_borrow<py::object>(names);
  if (follow == 0) {
    given.push_back(Item(places, kRows));
    with_rows = Own(PyTuple_New(all - count + 1));
    if (!with_rows) return nullptr;
    for (Py_ssize_t i = 0; i <= all - count; ++i) {
      PyObject* name = i < all - count ? PyTuple_GET_ITEM(names, i) : kRowsName;
      Py_INCREF(name);
      PyTuple_SET_ITEM(with_rows.ptr(), i, name);
    }
  }
  return PyObject_Vectorcall(
      given[0], given.data() + 1, count - kParams, with_rows.ptr());
}

PyMethodDef methods[] = {
    {"on_shards",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&OnShards)),
     METH_FASTCALL | METH_KEYWORDS,
     "Calls an operator for parameters that may be DTensors."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// Not by pybind11, whose calls would take as long as what they save.
void BindShards(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) {
    throw py::error_already_set();
  }
}
