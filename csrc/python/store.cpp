// torch_sgmcmc._C's part of the store.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/crc32.h"
#include "host/draw_index.h"
#include "host/draw_layout.h"
#include "host/draw_schedule.h"
#include "store/chain_writer.h"

namespace py = pybind11;
using torch_sgmcmc::ChainWriter;
using torch_sgmcmc::DrawIndex;
using torch_sgmcmc::DrawLayout;
using torch_sgmcmc::DrawRecord;
using torch_sgmcmc::DrawSchedule;
using torch_sgmcmc::StoredTensor;

namespace {

// NOLINTNEXTLINE(performance-no-int-to-ptr): what data_ptr() gives.
const void* Memory(uintptr_t at) { return reinterpret_cast<const void*>(at); }

using WithoutGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

// NOLINTNEXTLINE(misc-use-internal-linkage): csrc/python/module.cpp calls it.
void BindStore(py::module_& m) {
  m.def(
      "crc32",
      [](uintptr_t at, size_t size) {
        return torch_sgmcmc::Crc32(Memory(at), size);
      },
      py::arg("at"),
      py::arg("size"),
      WithoutGil(),
      "The CRC-32 of so many bytes at this address on the host.");

  py::class_<DrawSchedule>(
      m, "DrawSchedule", "Which steps are stored (csrc/host/draw_schedule.h).")
      .def(py::init<int64_t, int64_t, int64_t>(),
           py::arg("burn_in"),
           py::arg("every"),
           py::arg("max_samples"))
      .def("number", &DrawSchedule::Number, py::arg("count"))
      .def("interval", &DrawSchedule::Interval, py::arg("number"))
      .def("keeps", &DrawSchedule::Keeps, py::arg("count"))
      .def("thins", &DrawSchedule::Thins, py::arg("count"));

  using Tensors =
      std::vector<std::tuple<std::string, std::string, std::vector<int64_t>>>;
  py::class_<DrawLayout>(
      m, "DrawLayout", "A draw's file (csrc/host/draw_layout.h).")
      .def(py::init([](const Tensors& tensors) {
             std::vector<StoredTensor> all;
             all.reserve(tensors.size());
             for (const auto& [name, dtype, shape] : tensors) {
               all.push_back({name, dtype, shape});
             }
             return DrawLayout(std::move(all));
           }),
           py::arg("tensors"),
           "Of (name, dtype, shape) of each tensor.")
      .def_property_readonly("tensors",
                             [](const DrawLayout& layout) {
                               Tensors all;
                               for (const StoredTensor& t : layout.tensors()) {
                                 all.emplace_back(t.name, t.dtype, t.shape);
                               }
                               return all;
                             })
      .def_property_readonly("header_size", &DrawLayout::header_size)
      .def_property_readonly("size", &DrawLayout::size)
      .def_property_readonly("draws_per_file", &DrawLayout::draws_per_file)
      .def_property_readonly("begins", &DrawLayout::begins)
      .def(
          "header",
          [](const DrawLayout& layout, const std::vector<uint32_t>& sums) {
            return py::bytes(layout.Header(sums));
          },
          py::arg("sums"))
      .def(
          "sums",
          [](const DrawLayout& layout, uintptr_t header) {
            return layout.Sums({static_cast<const char*>(Memory(header)),
                                layout.header_size()});
          },
          py::arg("header"),
          "The tensors' sums in the header at this address.")
      .def(
          "altered",
          [](const DrawLayout& layout, uintptr_t draw) {
            return layout.Altered(
                {static_cast<const char*>(Memory(draw)), layout.size()});
          },
          py::arg("draw"),
          "Tensors of the draw at this address that are not as their sums say.")
      .def(
          "difference",
          [](const DrawLayout& layout, const DrawLayout& there) {
            return torch_sgmcmc::Difference(layout.tensors(), there.tensors());
          },
          py::arg("there"));

  py::class_<DrawRecord>(
      m,
      "DrawRecord",
      "What the index says of a draw (csrc/host/draw_index.h).")
      .def(py::init([](int64_t number,
                       int64_t step,
                       double lr,
                       double temperature,
                       double weight,
                       double loss,
                       const std::vector<double>& prior_precision) {
             return DrawRecord{
                 number, step, lr, temperature, weight, loss, prior_precision};
           }),
           py::kw_only(),
           py::arg("number"),
           py::arg("step"),
           py::arg("lr"),
           py::arg("temperature"),
           py::arg("weight"),
           py::arg("loss"),
           py::arg("prior_precision"))
      .def_readonly("number", &DrawRecord::number)
      .def_readonly("step", &DrawRecord::step)
      .def_readonly("lr", &DrawRecord::lr)
      .def_readonly("temperature", &DrawRecord::temperature)
      .def_readonly("weight", &DrawRecord::weight)
      .def_readonly("loss", &DrawRecord::loss)
      .def_property_readonly(
          "prior_precision",
          [](const DrawRecord& record) {
            return py::tuple(py::cast(record.prior_precision));
          })
      .def_readonly("crc32", &DrawRecord::crc32)
      .def_property_readonly("file",
                             [](const DrawRecord& record) {
                               return torch_sgmcmc::DrawFileName(record);
                             })
      .def_property_readonly(
          "slot", [](const DrawRecord& record) -> std::optional<int64_t> {
            if (!record.shares()) return std::nullopt;
            return record.slot;
          });

  py::class_<DrawIndex>(
      m, "DrawIndex", "What a chain has stored (csrc/host/draw_index.h).")
      .def_readonly("layout", &DrawIndex::layout)
      .def_readonly("draws", &DrawIndex::draws)
      .def_readonly("damaged", &DrawIndex::damaged);
  m.def("read_index",
        &torch_sgmcmc::ReadIndex,
        py::arg("store"),
        py::arg("chain"));
  m.def("chains_in", &torch_sgmcmc::ChainsIn, py::arg("store"));
  m.def("chain_folder",
        &torch_sgmcmc::ChainFolder,
        py::arg("store"),
        py::arg("chain"));

  py::class_<ChainWriter>(
      m, "ChainWriter", "Writes a chain's draws (csrc/store/chain_writer.h).")
      .def(py::init<const std::string&, int64_t, const DrawLayout&>(),
           py::arg("store"),
           py::arg("chain"),
           py::arg("layout"))
      .def_property_readonly("num_draws", &ChainWriter::num_draws)
      .def_property_readonly("last", &ChainWriter::last)
      .def_property_readonly("layout", &ChainWriter::layout)
      .def_property_readonly("folder", &ChainWriter::folder)
      .def("check", &ChainWriter::Check)
      .def(
          "append",
          [](ChainWriter& writer,
             const DrawRecord& record,
             const std::vector<uintptr_t>& tensors) {
            std::vector<const void*> memory;
            memory.reserve(tensors.size());
            for (const uintptr_t at : tensors) memory.push_back(Memory(at));
            writer.Append(record, memory);
          },
          py::arg("record"),
          py::arg("tensors"),
          WithoutGil(),
          "Stores a draw: the address of each tensor, in the layout's order.")
      .def("thin", &ChainWriter::Thin, py::arg("interval"), WithoutGil())
      .def("checkpoint",
           [](ChainWriter& writer) {
             const auto position = writer.Checkpoint();
             return std::make_tuple(position.size, position.crc32);
           })
      .def(
          "cut_back",
          [](ChainWriter& writer, uint64_t size, uint32_t sum) {
            return writer.CutBack({size, sum});
          },
          py::arg("size"),
          py::arg("crc32"))
      .def("restart", &ChainWriter::Restart)
      .def("close", &ChainWriter::Close);
}
