#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "longspan/batch/cut.h"
#include "longspan/batch/derive.h"
#include "longspan/batch/groups.h"
#include "longspan/batch/lay_out.h"
#include "longspan/batch/pack.h"
#include "longspan/batch/row_batch.h"
#include "longspan/batch/shard.h"
#include "longspan/batch/shift.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/move_tokens.h"
#include "python/bindings/bindings.h"
#include "python/bindings/refusals.h"
#include "python/bindings/scalar.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_table(py::module_& m) {
  py::class_<TokenTensor>(m, "TokenTensor",
                          "A tensor with one entry for each token.")
      .def_readonly("key", &TokenTensor::key)
      .def_readonly("axis", &TokenTensor::axis)
      .def_property_readonly("fill",
                             [](const TokenTensor& row) -> py::object {
                               if (row.fill.kind == Fill::Kind::counting) {
                                 return py::str("counting");
                               }
                               const at::Scalar value = row.fill.value;
                               if (value.isBoolean())
                                 return py::bool_(value.toBool());
                               if (value.isFloatingPoint())
                                 return py::float_(value.toDouble());
                               return py::int_(value.toLong());
                             })
      .def("__repr__", [](const TokenTensor& row) {
        return join("TokenTensor(", row.key, ", axis ", row.axis, ")");
      });
  py::class_<TokenTable>(m, "TokenTable",
                         "Per-token tensors with their axis and pad value.")
      .def(py::init(&TokenTable::standard))
      .def(
          "with_tensor",
          [](const TokenTable& table, std::string key, int64_t axis,
             const py::object& fill) {
            TokenTensor row{.key = std::move(key), .axis = axis, .fill = {}};
            if (py::isinstance<py::str>(fill)) {
              check(fill.equal(py::str("counting")),
                    "TokenTable: fill is a number or 'counting'");
              row.fill = Fill::counting();
            } else {
              row.fill.value = scalar_of(fill, "TokenTable");
            }
            return table.with(std::move(row));
          },
          py::arg("key"), py::kw_only(), py::arg("axis") = 1,
          py::arg("fill") = 0)
      .def_property_readonly("rows", &TokenTable::rows)
      .def("__repr__", [](const TokenTable& table) {
        std::string text = "TokenTable(";
        for (const TokenTensor& row : table.rows()) {
          text += (&row == &table.rows().front() ? "" : ", ") + row.key;
        }
        return text + ")";
      });
}

py::tuple cut_state(const Cut& cut) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> runs;
  for (const Run& run : cut.placement.runs()) {
    runs.emplace_back(run.source, run.target, run.length);
  }
  return py::make_tuple(to_string(cut.form), cut.rows, cut.length, cut.packings,
                        runs, cut.placement.source_tokens(), cut.ownership,
                        cut.rank);
}

Cut cut_from(const py::tuple& state) {
  const auto ownership = state[6].cast<Ownership>();
  std::vector<Run> runs;
  for (const auto& [source, target, length] :
       state[4].cast<std::vector<std::tuple<int64_t, int64_t, int64_t>>>()) {
    runs.push_back({source, target, length});
  }
  return {.form = form_named("Cut", state[0].cast<std::string>()),
          .rows = state[1].cast<int64_t>(),
          .length = state[2].cast<int64_t>(),
          .packings = state[3].cast<std::vector<Packing>>(),
          .placement = Moves::of(std::move(runs), state[5].cast<int64_t>(),
                                 ownership.tokens()),
          .ownership = ownership,
          .rank = state[7].cast<int>()};
}

void bind_cut(py::module_& m) {
  py::class_<Cut>(m, "Cut",
                  "How one rank's tensors lie in the batch as loaded.")
      .def_property_readonly("form",
                             [](const Cut& cut) { return to_string(cut.form); })
      .def_readonly("rows", &Cut::rows)
      .def_readonly("length", &Cut::length)
      .def_readonly("packings", &Cut::packings)
      .def_readonly("ownership", &Cut::ownership)
      .def_readonly("rank", &Cut::rank)
      .def_property_readonly("ranks", &Cut::ranks)
      .def_property_readonly("local_tokens", &Cut::local_tokens)
      .def_property_readonly("axis", &Cut::axis)
      .def("global_tokens", &Cut::global_tokens)
      .def(py::pickle(&cut_state, from_state("Cut", &cut_from)))
      .def("__repr__", &Cut::to_string);
}

void bind_batches(py::module_& m) {
  py::class_<RowBatch>(m, "RowBatch", "Rows as loaded, understood.")
      .def_readonly("rows", &RowBatch::rows)
      .def_readonly("length", &RowBatch::length)
      .def_property_readonly(
          "documents",
          [](const RowBatch& batch) {
            std::vector<std::tuple<int64_t, TokenRange, TokenRange>> list;
            for (const RowDocument& document : batch.documents) {
              list.emplace_back(document.row, document.real, document.slot);
            }
            return list;
          })
      .def_readonly("tokens", &RowBatch::tokens)
      .def_readonly("payload", &RowBatch::payload);
  py::class_<PackedBatch>(m, "PackedBatch",
                          "One stream of documents, or padded rows.")
      .def_property_readonly(
          "form",
          [](const PackedBatch& batch) { return to_string(batch.form); })
      .def_readonly("source", &PackedBatch::source)
      .def_readonly("packings", &PackedBatch::packings)
      .def_property_readonly("tokens", &PackedBatch::tokens)
      .def("tensor", &PackedBatch::tensor, py::arg("key"))
      .def("__getitem__", &PackedBatch::tensor)
      .def("__repr__", [](const PackedBatch& batch) {
        return join(
            "PackedBatch(", to_string(batch.form), ", ", batch.tokens(),
            batch.form == Form::rows ? " tokens in each row)" : " tokens)");
      });
  py::class_<LocalBatch>(m, "LocalBatch", "One rank's share of a batch.")
      .def_readonly("tokens", &LocalBatch::tokens)
      .def_readonly("payload", &LocalBatch::payload)
      .def_readonly("cut", &LocalBatch::cut);

  m.def(
      "read_rows",
      [](const NamedTensors& batch, const TokenTable& table, int64_t sentinel,
         std::vector<std::string> pass_through) {
        return read_rows(batch, {.table = table,
                                 .sentinel = sentinel,
                                 .pass_through = std::move(pass_through)});
      },
      py::arg("batch"), py::arg("table"), py::arg("sentinel"),
      py::arg("pass_through"), NoGil());
  m.def("chunks", &chunks, py::arg("batch"), py::arg("count"));
  m.def(
      "shift_left",
      [](const RowBatch& batch, const std::string& key,
         const std::string& as_key, int64_t steps, bool within_documents) {
        return shift_left(batch, key, as_key, steps,
                          within_documents ? Border::document : Border::row);
      },
      py::arg("batch"), py::arg("key"), py::arg("as_key"), py::arg("steps") = 1,
      py::arg("within_documents") = false, NoGil());
  m.def("clear_pads", &clear_pads, py::arg("batch"), py::arg("key"), NoGil());
  m.def(
      "pack",
      [](const RowBatch& batch, const std::string& form) {
        return pack(batch, form_named("pack", form));
      },
      py::arg("batch"), py::arg("form"));
  m.def(
      "pad",
      [](const PackedBatch& batch, int64_t slot_multiple,
         int64_t total_multiple) {
        return pad(batch, {slot_multiple, total_multiple});
      },
      py::arg("batch"), py::arg("slot_multiple") = 1,
      py::arg("total_multiple") = 1);
  m.def(
      "pad_for",
      [](const PackedBatch& batch, const std::string& layout, int ranks,
         int64_t share) {
        return pad(batch, layout_named("pad", layout), ranks, share);
      },
      py::arg("batch"), py::arg("layout"), py::arg("ranks"),
      py::arg("share") = 1);
  m.def(
      "pad_to",
      [](const PackedBatch& batch, const Ownership& ownership) {
        return pad(batch, ownership);
      },
      py::arg("batch"), py::arg("ownership"));
  const auto pair_of = [](LaidOut laid) {
    return std::pair{std::move(laid.packed), std::move(laid.ownership)};
  };
  m.def(
      "lay_out",
      [=](const RowBatch& batch, const std::string& layout, int ranks,
          int64_t share) {
        return pair_of(
            lay_out(batch, layout_named("shard", layout), ranks, share));
      },
      py::arg("batch"), py::arg("layout"), py::arg("ranks"),
      py::arg("share") = 1);
  m.def(
      "lay_out",
      [=](const RowBatch& batch, const Ownership& ownership,
          const std::string& form) {
        return pair_of(lay_out(batch, ownership, form_named("shard", form)));
      },
      py::arg("batch"), py::arg("ownership"), py::arg("form"));
  m.def(
      "fitting_layout",
      [](const RowBatch& batch, int ranks, int64_t share) {
        return fitting_layout(batch, ranks, share).name;
      },
      py::arg("batch"), py::arg("ranks"), py::arg("share") = 1);
  m.def("groups_of", &groups_of, py::arg("batch"), py::arg("key"),
        py::arg("kinds"));
  m.def("shard", &shard, py::arg("batch"), py::arg("ownership"),
        py::arg("rank"), NoGil());
  m.def(
      "unshard",
      [](const std::vector<at::Tensor>& shards, const Cut& cut, bool trim,
         const py::object& fill, std::optional<int64_t> axis) {
        const UnshardOptions options{
            .trim = trim, .fill = scalar_of(fill, "unshard"), .axis = axis};
        const py::gil_scoped_release release;
        // One tensor may hold all shares.
        return shards.size() == 1 ? unshard(shards[0], cut, options)
                                  : unshard(shards, cut, options);
      },
      py::arg("shards"), py::arg("cut"), py::arg("trim") = true,
      py::arg("fill") = 0, py::arg("axis") = py::none());
}

void check_entries(const char* who, int64_t tokens) {
  check(tokens <= kMostEntries, who, ": an array of ", tokens,
        " tokens; at most ", kMostEntries, " are written out");
}

void bind_derived(py::module_& m) {
  const auto add = [&](const char* name,
                       at::Tensor (*written)(const Packing&)) {
    m.def(
        name,
        [=](const Packing& packing) {
          check_entries(name, packing.tokens());
          return written(packing);
        },
        py::arg("packing"));
  };
  add("padding_mask", &padding_mask);
  add("position_ids", &position_ids);
  add("document_ids", &document_ids);
  m.def("cumulative_lengths", &cumulative_lengths, py::arg("packing"));
  m.def("cumulative_padded_lengths", &cumulative_padded_lengths,
        py::arg("packing"));
  // A method of Ownership that needs tensors, so it is added here.
  const py::object ownership = m.attr("Ownership");
  ownership.attr("tokens_of") = py::cpp_function(
      [](const Ownership& owners, int rank) {
        check_entries("Ownership.tokens_of", owners.local_tokens(rank));
        return token_indices(owners, rank);
      },
      py::name("tokens_of"), py::is_method(ownership), py::arg("rank"));
}

}  // namespace

void bind_batch(py::module_& m) {
  bind_table(m);
  bind_cut(m);
  bind_batches(m);
  bind_derived(m);
}

}  // namespace longspan::python
