#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string_view>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/nearest.h"
#include "longspan/core/document_runs.h"
#include "longspan/core/mask.h"
#include "longspan/core/moves.h"
#include "longspan/core/multiple.h"
#include "longspan/core/named_layout.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/core/tile.h"
#include "longspan/core/work.h"
#include "python/bindings/bindings.h"
#include "python/bindings/refusals.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

OwnershipKind kind_named(const std::string& name) {
  if (const auto kind = ownership_kind(name)) return *kind;
  constexpr std::array<std::string_view, 3> names{"contiguous", "head-tail",
                                                  "per-document-head-tail"};
  throw std::invalid_argument(
      join("Ownership: '", name,
           "' is not one of contiguous, head-tail, per-document-head-tail",
           did_you_mean(name, names)));
}

TokenRange range_of(int64_t begin, int64_t end) {
  check(begin <= end, "TokenRange: [", begin, ", ", end,
        ") ends before it begins");
  int64_t size = 0;
  check(!__builtin_sub_overflow(end, begin, &size), "TokenRange: [", begin,
        ", ", end, ") holds more tokens than 64 bits count");
  return {begin, end};
}

void bind_range(py::module_& m) {
  py::class_<TokenRange>(m, "TokenRange",
                         "A half-open run [begin, end) of token indices.")
      .def(py::init(&range_of), py::arg("begin"), py::arg("end"))
      .def(py::init([](const std::pair<int64_t, int64_t>& bounds) {
             return range_of(bounds.first, bounds.second);
           }),
           py::arg("bounds"))
      .def_readonly("begin", &TokenRange::begin)
      .def_readonly("end", &TokenRange::end)
      .def("__len__", &TokenRange::size)
      .def("__contains__", [](TokenRange range,
                              int64_t token) { return range.contains(token); })
      .def(
          "__iter__",
          [](TokenRange range) {
            return py::iter(py::make_tuple(range.begin, range.end));
          },
          "Unpacks as begin, end.")
      .def(py::self == py::self)
      .def("__hash__",
           [](TokenRange range) {
             return py::hash(py::make_tuple(range.begin, range.end));
           })
      .def(py::pickle(
          [](TokenRange range) {
            return py::make_tuple(range.begin, range.end);
          },
          from_state("TokenRange",
                     [](const py::tuple& state) {
                       return range_of(state[0].cast<int64_t>(),
                                       state[1].cast<int64_t>());
                     })))
      .def("__repr__", [](TokenRange range) { return join(range); });
  py::implicitly_convertible<std::pair<int64_t, int64_t>, TokenRange>();
}

void bind_packing(py::module_& m) {
  py::class_<Packing>(m, "Packing", "Documents laid end to end in one stream.")
      .def_static(
          "of",
          [](std::vector<int64_t> lengths,
             std::optional<std::vector<int64_t>> padded_lengths,
             std::optional<int64_t> tokens) {
            auto padded = padded_lengths.value_or(lengths);
            return tokens ? Packing::of(std::move(lengths), std::move(padded),
                                        *tokens)
                          : Packing::of(std::move(lengths), std::move(padded));
          },
          py::arg("lengths"), py::arg("padded_lengths") = py::none(),
          py::arg("tokens") = py::none())
      .def_static("single", &Packing::single, py::arg("tokens"))
      .def_static("rows", &Packing::rows, py::arg("rows"), py::arg("length"))
      .def_property_readonly("documents", &Packing::documents)
      .def_property_readonly("tokens", &Packing::tokens)
      .def_property_readonly("real_tokens", &Packing::real_tokens)
      .def_property_readonly("lengths",
                             [](const Packing& packing) {
                               const auto view = packing.lengths();
                               return std::vector<int64_t>(view.begin(),
                                                           view.end());
                             })
      .def_property_readonly("offsets",
                             [](const Packing& packing) {
                               const auto view = packing.offsets();
                               return std::vector<int64_t>(view.begin(),
                                                           view.end());
                             })
      .def_property_readonly("longest", &Packing::longest)
      .def_property_readonly("tail", &Packing::tail)
      .def("length", &Packing::length, py::arg("document"))
      .def("padded_length", &Packing::padded_length, py::arg("document"))
      .def("real", &Packing::real, py::arg("document"))
      .def("slot", &Packing::slot, py::arg("document"))
      .def(
          "locate",
          [](const Packing& packing, int64_t token) {
            const auto place = packing.locate(token);
            return std::pair{place.document, place.position};
          },
          py::arg("token"))
      .def(
          "token_of",
          [](const Packing& packing, int64_t document, int64_t position) {
            return packing.token_of({document, position});
          },
          py::arg("document"), py::arg("position"))
      .def("is_pad", &Packing::is_pad, py::arg("token"))
      .def("pads", &Packing::pads)
      .def("with_slots_multiple_of", &Packing::with_slots_multiple_of,
           py::arg("multiple"))
      .def("with_tokens_multiple_of", &Packing::with_tokens_multiple_of,
           py::arg("multiple"))
      .def(py::self == py::self)
      .def(py::pickle(
          [](const Packing& packing) {
            std::vector<int64_t> slots;
            for (int64_t d = 0; d < packing.documents(); ++d) {
              slots.push_back(packing.padded_length(d));
            }
            const auto lengths = packing.lengths();
            return py::make_tuple(
                std::vector<int64_t>(lengths.begin(), lengths.end()), slots,
                packing.tokens());
          },
          from_state("Packing",
                     [](const py::tuple& state) {
                       return Packing::of(state[0].cast<std::vector<int64_t>>(),
                                          state[1].cast<std::vector<int64_t>>(),
                                          state[2].cast<int64_t>());
                     })))
      .def("__repr__", &Packing::to_string);
}

py::tuple ownership_state(const Ownership& ownership) {
  std::vector<std::vector<TokenRange>> ranges;
  if (ownership.kind() == OwnershipKind::ranges) {
    for (int rank = 0; rank < ownership.ranks(); ++rank) {
      ranges.push_back(ownership.ranges_of(rank));
    }
  }
  return py::make_tuple(std::string(to_string(ownership.kind())),
                        ownership.tokens(), ownership.ranks(),
                        ownership.packing(), ranges);
}

Ownership ownership_from(const py::tuple& state) {
  const OwnershipKind kind = kind_named(state[0].cast<std::string>());
  const auto tokens = state[1].cast<int64_t>();
  const int ranks = state[2].cast<int>();
  if (kind == OwnershipKind::ranges) {
    return Ownership::of_ranges(
        state[4].cast<std::vector<std::vector<TokenRange>>>());
  }
  if (kind == OwnershipKind::per_document_head_tail) {
    return Ownership::of(kind, state[3].cast<Packing>(), ranks);
  }
  return Ownership::of(kind, Packing::single(tokens), ranks);
}

void bind_ownership(py::module_& m) {
  py::class_<Ownership>(m, "Ownership",
                        "Which rank holds which tokens, in what order.")
      .def_static("contiguous", &Ownership::contiguous, py::arg("tokens"),
                  py::arg("ranks"))
      .def_static("head_tail", &Ownership::head_tail, py::arg("tokens"),
                  py::arg("ranks"))
      .def_static("per_document_head_tail", &Ownership::per_document_head_tail,
                  py::arg("packing"), py::arg("ranks"))
      .def_static("of_sizes", &Ownership::of_sizes, py::arg("sizes"))
      .def_static("of_ranges", &Ownership::of_ranges, py::arg("ranges"))
      .def_static(
          "of",
          [](const std::string& kind, const Packing& packing, int ranks) {
            return Ownership::of(kind_named(kind), packing, ranks);
          },
          py::arg("kind"), py::arg("packing"), py::arg("ranks"))
      .def_property_readonly("kind",
                             [](const Ownership& ownership) {
                               return std::string(to_string(ownership.kind()));
                             })
      .def_property_readonly("tokens", &Ownership::tokens)
      .def_property_readonly("ranks", &Ownership::ranks)
      .def("local_tokens", &Ownership::local_tokens, py::arg("rank"))
      .def("owner_of", &Ownership::owner_of, py::arg("token"))
      .def("local_of", &Ownership::local_of, py::arg("token"))
      .def("global_of", &Ownership::global_of, py::arg("rank"),
           py::arg("local"))
      .def("ranges_of", &Ownership::ranges_of, py::arg("rank"))
      .def(py::self == py::self)
      .def(py::pickle(&ownership_state,
                      from_state("Ownership", &ownership_from)))
      .def("__repr__", &Ownership::to_string);
}

std::string name_of(Coverage coverage) {
  switch (coverage) {
    case Coverage::none:
      return "none";
    case Coverage::some:
      return "some";
    case Coverage::all:
      return "all";
  }
  throw InternalError("a Coverage without a name");
}

const char* name_of(GroupReach reach) {
  switch (reach) {
    case GroupReach::whole_group:
      return "whole_group";
    case GroupReach::within_window:
      return "within_window";
  }
  throw InternalError("a GroupReach without a name");
}

GroupReach group_reach_named(const std::string& name) {
  for (auto reach : {GroupReach::whole_group, GroupReach::within_window}) {
    if (name == name_of(reach)) return reach;
  }
  throw std::invalid_argument(
      join("Mask: a group reach of '", name,
           "'; expected 'whole_group' or 'within_window'"));
}

void bind_layouts(py::module_& m) {
  py::class_<NamedLayout>(m, "NamedLayout",
                          "A way to cut batches that has a name.")
      .def_property_readonly(
          "name",
          [](const NamedLayout& layout) { return std::string(layout.name); })
      .def_property_readonly(
          "kind",
          [](const NamedLayout& layout) { return to_string(layout.kind); })
      .def_property_readonly(
          "form",
          [](const NamedLayout& layout) { return to_string(layout.form); })
      .def("__repr__", [](const NamedLayout& layout) {
        return join("NamedLayout(", layout.name, ")");
      });
  m.def("named_layouts", [] {
    return std::vector(named_layouts().begin(), named_layouts().end());
  });
  m.def(
      "layout_named",
      [](const std::string& who, const std::string& name) {
        return layout_named(who, name);
      },
      py::arg("who"), py::arg("name"));
}

void bind_mask(py::module_& m) {
  py::class_<Mask>(m, "Mask", "Which keys a query may see.")
      .def_static("causal", &Mask::causal, py::arg("packing"))
      .def_static("full", &Mask::full, py::arg("packing"))
      .def_static("sliding", &Mask::sliding, py::arg("packing"),
                  py::arg("window"))
      .def_static(
          "banded",
          [](const Packing& packing, std::optional<int64_t> before,
             std::optional<int64_t> after) {
            return Mask::banded(packing, {before.value_or(Band::kAll),
                                          after.value_or(Band::kAll)});
          },
          py::arg("packing"), py::arg("before") = py::none(),
          py::arg("after") = py::none())
      .def_static("compressed", &Mask::compressed, py::arg("packing"),
                  py::arg("ratio"))
      .def("with_hidden", &Mask::with_hidden, py::arg("tokens"))
      .def("with_groups", &Mask::with_groups, py::arg("groups"))
      .def("with_prefix", &Mask::with_prefix, py::arg("prefix"))
      .def(
          "with_group_reach",
          [](const Mask& mask, const std::string& reach) {
            return mask.with_group_reach(group_reach_named(reach));
          },
          py::arg("reach"),
          "What tokens of a group see of it: 'whole_group', or no further back "
          "than their window goes ('within_window').")
      .def(
          "with_seeing_pads",
          [](const Mask& mask) {
            return mask.with_pad_queries(PadQueries::see_document);
          },
          "Pad queries see what a real token in their place would see.")
      .def_property_readonly("queries", &Mask::queries)
      .def_property_readonly("keys", &Mask::keys)
      .def_property_readonly("packing", &Mask::packing)
      .def_property_readonly(
          "group_reach",
          [](const Mask& mask) { return name_of(mask.group_reach()); })
      .def_property_readonly("is_one_range", &Mask::is_one_range)
      .def("allows", &Mask::allows, py::arg("query"), py::arg("key"))
      .def("keys_of", &Mask::keys_of, py::arg("query"))
      .def("key_ranges_of", &Mask::key_ranges_of, py::arg("query"))
      .def("reach", &Mask::reach, py::arg("queries"))
      .def("pairs", &Mask::pairs, py::arg("queries"), py::arg("keys"))
      .def(
          "coverage",
          [](const Mask& mask, TokenRange queries, TokenRange keys) {
            return name_of(mask.coverage(queries, keys));
          },
          py::arg("queries"), py::arg("keys"))
      .def(py::pickle(
          [](const Mask& mask) {
            return py::make_tuple(
                mask.packing(), mask.band().before, mask.band().after,
                mask.ratio(), mask.hidden(), mask.groups(),
                mask.pad_queries() == PadQueries::see_document,
                name_of(mask.group_reach()));
          },
          from_state("Mask",
                     [](const py::tuple& state) {
                       const auto packing = state[0].cast<Packing>();
                       const auto ratio = state[3].cast<int64_t>();
                       Mask mask =
                           ratio > 0 ? Mask::compressed(packing, ratio)
                                     : Mask::banded(packing,
                                                    {state[1].cast<int64_t>(),
                                                     state[2].cast<int64_t>()});
                       using Ranges = std::vector<TokenRange>;
                       if (ratio == 0) {
                         mask = mask.with_hidden(state[4].cast<Ranges>())
                                    .with_groups(state[5].cast<Ranges>());
                       }
                       return mask
                           .with_pad_queries(state[6].cast<bool>()
                                                 ? PadQueries::see_document
                                                 : PadQueries::see_nothing)
                           .with_group_reach(
                               group_reach_named(state[7].cast<std::string>()));
                     })))
      .def("__repr__", &Mask::to_string);
}

void bind_runs(py::module_& m) {
  py::class_<DocumentRun>(
      m, "DocumentRun", "A contiguous piece of one document that a rank holds.")
      .def_readonly("document", &DocumentRun::document)
      .def_readonly("tokens", &DocumentRun::tokens, "Of the stream.")
      .def_readonly("local", &DocumentRun::local,
                    "Local index of the first token.")
      .def_readonly("position", &DocumentRun::position,
                    "Position of the first token in its document.")
      .def_property_readonly(
          "before",
          [](const DocumentRun& run)
              -> std::optional<std::pair<int, TokenRange>> {
            if (run.before_rank == DocumentRun::kNobody) return std::nullopt;
            return std::pair{run.before_rank, run.before};
          },
          "The run of this document that ends where this one begins, and who "
          "holds it: (rank, tokens); None where the document begins here.")
      .def("__len__", &DocumentRun::size)
      .def(py::self == py::self)
      .def("__repr__", [](const DocumentRun& run) {
        return join("DocumentRun(document ", run.document, ", tokens ",
                    run.tokens, ", local ", run.local, ", position ",
                    run.position, ")");
      });
  m.def("runs_of", &runs_of, py::arg("packing"), py::arg("ownership"),
        py::arg("rank"));
}

void bind_work(py::module_& m) {
  py::class_<RankWork>(m, "RankWork", "What one rank has to do.")
      .def_readonly("tokens", &RankWork::tokens)
      .def_readonly("pairs", &RankWork::pairs)
      .def_readonly("foreign_keys", &RankWork::foreign_keys)
      .def("__repr__", [](const RankWork& work) {
        return join("RankWork(", work.tokens, " tokens, ", work.pairs,
                    " pairs, ", work.foreign_keys, " foreign keys)");
      });
  m.def("work_of", &work_of, py::arg("mask"), py::arg("ownership"),
        py::arg("rank"));
  m.def("work_per_rank", &work_per_rank, py::arg("mask"), py::arg("ownership"));
  m.def(
      "tiles",
      [](const Mask& mask, const Ownership& ownership, int rank, int owner) {
        check(mask.keys() == ownership.tokens() &&
                  mask.queries() == ownership.tokens(),
              "tiles: a mask of ", mask.queries(), " queries and ", mask.keys(),
              " keys over an ownership of ", ownership.tokens(), " tokens");
        std::vector<std::tuple<TokenRange, TokenRange, std::string>> list;
        for (const Tile& tile : tiles(mask, ownership, rank, owner)) {
          list.emplace_back(tile.queries, tile.keys, name_of(tile.coverage));
        }
        return list;
      },
      py::arg("mask"), py::arg("ownership"), py::arg("rank"), py::arg("owner"));
  m.def("round_up", &round_up, py::arg("value"), py::arg("multiple"));
  m.def("common_multiple", &common_multiple, py::arg("a"), py::arg("b"));
  m.def("share_multiple", &share_multiple, py::arg("ratios"));
}

}  // namespace

void bind_core(py::module_& m) {
  bind_range(m);
  bind_packing(m);
  bind_ownership(m);
  bind_layouts(m);
  bind_mask(m);
  bind_runs(m);
  bind_work(m);
}

}  // namespace longspan::python
