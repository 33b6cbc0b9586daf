# Python modules, and one build tree of packages as they would be installed.
# pybind11 is the one that torch carries: its version decides whether tensors
# can pass.
execute_process(
  COMMAND ${LONGSPAN_PYTHON} -c
    "import sysconfig as s; print(s.get_path('include')); print(s.get_config_var('EXT_SUFFIX'))"
  OUTPUT_VARIABLE python_facts OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" python_facts "${python_facts}")
list(GET python_facts 0 LONGSPAN_PYTHON_INCLUDE)
list(GET python_facts 1 LONGSPAN_PYTHON_SUFFIX)
find_library(LONGSPAN_LIB_torch_python torch_python
  PATHS "${LONGSPAN_TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)

# longspan_python_module(target NAME _C PACKAGE longspan SOURCES ...
# LIBRARIES ...): an extension module of a package.
function(longspan_python_module target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAME;PACKAGE" "SOURCES;LIBRARIES")
  add_library(${target} MODULE ${arg_SOURCES})
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME ${arg_NAME} PREFIX "" SUFFIX "${LONGSPAN_PYTHON_SUFFIX}"
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/python/${arg_PACKAGE}
    CXX_VISIBILITY_PRESET hidden)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_include_directories(${target} SYSTEM PRIVATE
    ${LONGSPAN_PYTHON_INCLUDE})
  target_compile_definitions(${target} PRIVATE
    TORCH_API_INCLUDE_EXTENSION_H TORCH_EXTENSION_NAME=${arg_NAME}
    LONGSPAN_VERSION="${PROJECT_VERSION}")
  target_link_libraries(${target} PRIVATE
    ${arg_LIBRARIES} longspan_flags ${LONGSPAN_LIB_torch_python})
endfunction()

# longspan_python_package(folder package): links to the Python files of a folder
# in the build tree.
function(longspan_python_package folder package)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${folder}
    ${folder}/*.py ${folder}/*.pyi ${folder}/py.typed)
  foreach(file IN LISTS files)
    set(link ${PROJECT_BINARY_DIR}/python/${package}/${file})
    get_filename_component(place ${link} DIRECTORY)
    file(MAKE_DIRECTORY ${place})
    file(CREATE_LINK ${folder}/${file} ${link} SYMBOLIC)
  endforeach()
endfunction()
