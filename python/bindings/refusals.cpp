#include "python/bindings/refusals.h"

#include <array>
#include <string>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace longspan::python {

namespace {

using Plain = PyObject* (*)(PyObject*, PyObject*, PyObject*);
using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

/// pybind11's own way into every function, and the names of those that come by
/// us first, by the object that holds what pybind11 knows of a function.
struct Known {
  struct Function {
    std::string name, signature;
  };
  PyCFunction dispatch = nullptr;
  std::unordered_map<PyObject*, Function> functions;
};

Known& known() {
  static auto* const all = new Known;  // outlives the interpreter's last calls
  return *all;
}

/// Replaces the error of pybind11 that is set, where it is one about arguments.
template <class Arguments>
void reword(PyObject* function, const Arguments& arguments) {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) return;
  py::error_already_set error;
  try {
    const std::string text = py::str(error.value());
    const auto found = known().functions.find(function);
    // The second is what a sequence without a length says of itself.
    const bool misfits = text.find("(): incompatible ") != std::string::npos;
    if ((misfits || text.find("has no len()") != std::string::npos) &&
        found != known().functions.end()) {
      const std::pair<py::tuple, py::dict> given = arguments();
      const py::object words =
          py::module_::import("longspan._arguments")
              .attr("mismatch")(found->second.name,
                                misfits ? text : found->second.signature,
                                given.first, given.second);
      PyErr_SetObject(PyExc_TypeError, words.ptr());
      return;
    }
  } catch (py::error_already_set&) {
    // pybind11's words are better than none.
  }
  error.restore();
}

PyObject* plain(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* const result = reinterpret_cast<Plain>(
      reinterpret_cast<void (*)()>(known().dispatch))(self, args, kwargs);
  if (result == nullptr) {
    reword(self, [&] {
      return std::pair(py::reinterpret_borrow<py::tuple>(args),
                       kwargs == nullptr
                           ? py::dict()
                           : py::reinterpret_borrow<py::dict>(kwargs));
    });
  }
  return result;
}

PyObject* fast(PyObject* self, PyObject* const* args, Py_ssize_t count,
               PyObject* names) {
  PyObject* const result = reinterpret_cast<Fast>(
      reinterpret_cast<void (*)()>(known().dispatch))(self, args, count, names);
  if (result == nullptr) {
    reword(self, [&] {
      const Py_ssize_t in_order =
          PyVectorcall_NARGS(static_cast<std::size_t>(count));
      py::tuple positional(in_order);
      for (Py_ssize_t i = 0; i < in_order; ++i) {
        positional[static_cast<std::size_t>(i)] =
            py::reinterpret_borrow<py::object>(args[i]);
      }
      py::dict named;
      const Py_ssize_t more = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
      for (Py_ssize_t i = 0; i < more; ++i) {
        named[py::handle(PyTuple_GET_ITEM(names, i))] =
            py::reinterpret_borrow<py::object>(args[in_order + i]);
      }
      return std::pair(std::move(positional), std::move(named));
    });
  }
  return result;
}

void hook(py::handle object, const std::string& name) {
  PyObject* function = object.ptr();
  if (PyInstanceMethod_Check(function)) {
    function = PyInstanceMethod_GET_FUNCTION(function);
  }
  if (!PyCFunction_Check(function)) return;
  PyMethodDef* const definition =
      reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  if (definition->ml_meth == known().dispatch) {
    const bool is_fast = (definition->ml_flags & METH_FASTCALL) != 0;
    definition->ml_meth = reinterpret_cast<PyCFunction>(
        is_fast ? reinterpret_cast<void (*)()>(&fast)
                : reinterpret_cast<void (*)()>(&plain));
  }
  known().functions.emplace(
      PyCFunction_GET_SELF(function),
      Known::Function{name,
                      definition->ml_doc == nullptr ? "" : definition->ml_doc});
}

// pybind11 asks a class for memory when it finds an object without a value, but
// does not say which class: so each has a function of its own.
constexpr std::size_t kMostClasses = 64;
std::array<std::string, kMostClasses> class_names;

template <std::size_t number>
void* refuse(std::size_t /*size*/) {
  throw py::type_error(
      join(class_names[number], ": this object was made by __new__ alone and ",
           "has no value; call the class, or a function that returns one"));
}

template <std::size_t... number>
void* (*refusal(std::size_t which,
                std::index_sequence<number...> /*all*/))(std::size_t) {
  constexpr std::array<void* (*)(std::size_t), kMostClasses> all{
      &refuse<number>...};
  return all.at(which);
}

/// Stands where a class has no constructor that Python may call.
int no_constructor(PyObject* self, PyObject* /*args*/, PyObject* /*kwargs*/) {
  const std::string name = py::str(py::type::of(self).attr("__name__"));
  PyErr_SetString(
      PyExc_TypeError,
      join(name, ": cannot be called; functions return such values").c_str());
  return -1;
}

/// Python's own way for the old protocols 0 and 1 ends the process inside of
/// pybind11, so every protocol goes this one.
void add_reduce(const py::object& type, const std::string& name) {
  const bool pickles = type.attr("__dict__").contains("__getstate__");
  type.attr("__reduce__") = py::cpp_function(
      [=](const py::object& self) {
        if (!pickles) throw py::type_error(name + ": cannot be pickled");
        return py::make_tuple(py::module_::import("copyreg").attr("__newobj__"),
                              py::make_tuple(py::type::of(self)),
                              self.attr("__getstate__")());
      },
      py::name("__reduce__"), py::is_method(type));
}

}  // namespace

void name_refusals(py::module_& m) {
  const py::object some = m.attr("round_up");
  known().dispatch =
      reinterpret_cast<PyCFunctionObject*>(some.ptr())->m_ml->ml_meth;
  std::size_t classes = 0;
  for (const auto& [key, value] : py::dict(m.attr("__dict__"))) {
    const std::string name = py::str(key);
    if (!PyType_Check(value.ptr())) {
      hook(value, name);
      continue;
    }
    auto* const type = reinterpret_cast<PyTypeObject*>(value.ptr());
    auto* const info = py::detail::get_type_info(type);
    if (info == nullptr || name.find("Error") != std::string::npos) continue;
    promise(classes < kMostClasses, "more than ", kMostClasses, " classes");
    class_names[classes] = name;
    if (type->tp_init == &py::detail::pybind11_object_init) {
      type->tp_init = &no_constructor;
    }
    info->operator_new =
        refusal(classes++, std::make_index_sequence<kMostClasses>());
    add_reduce(py::reinterpret_borrow<py::object>(value), name);
    for (const auto& [attribute, member] : py::dict(value.attr("__dict__"))) {
      const std::string whole =
          name + "." + py::str(attribute).cast<std::string>();
      if (Py_IS_TYPE(member.ptr(), &PyStaticMethod_Type)) {
        hook(member.attr("__func__"), whole);
      } else if (Py_IS_TYPE(member.ptr(), &PyProperty_Type)) {
        hook(member.attr("fget"), whole);
      } else {
        hook(member, whole);
      }
    }
  }
}

}  // namespace longspan::python
