// torch_sgmcmc._C's checksums.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "host/crc32.h"

namespace py = pybind11;

// NOLINTNEXTLINE(misc-use-internal-linkage): csrc/bindings/module.cpp calls it.
void BindStore(py::module_& m) {
  m.def(
      "crc32",
      [](uintptr_t at, size_t size) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): what data_ptr() gives.
        return torch_sgmcmc::Crc32(reinterpret_cast<const void*>(at), size);
      },
      py::arg("at"),
      py::arg("size"),
      py::call_guard<py::gil_scoped_release>(),
      "The CRC-32 of so many bytes at this address on the host.");
}
