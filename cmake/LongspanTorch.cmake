# Defines the imported target Longspan::libtorch from the torch package of
# LONGSPAN_PYTHON. torch's own package file is not used: it drags in a CUDA
# toolkit search that fails on machines where only the libraries are installed.
# LONGSPAN_WITHOUT_TORCH says what the reader may do who has none.
if(NOT TARGET Longspan::libtorch)
  if(NOT LONGSPAN_TORCH_ROOT)
    execute_process(
      COMMAND ${LONGSPAN_PYTHON} -c
        "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE LONGSPAN_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
      RESULT_VARIABLE LONGSPAN_TORCH_RESULT ERROR_QUIET)
    if(NOT LONGSPAN_TORCH_RESULT EQUAL 0)
      message(FATAL_ERROR "Longspan: ${LONGSPAN_PYTHON} has no torch; set "
        "LONGSPAN_PYTHON to an interpreter with torch >= 2.11, or "
        "LONGSPAN_TORCH_ROOT to a LibTorch folder; without torch there is "
        "${LONGSPAN_WITHOUT_TORCH}")
    endif()
  endif()
  foreach(name torch torch_cpu c10)
    find_library(LONGSPAN_LIB_${name} ${name}
      PATHS "${LONGSPAN_TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
    list(APPEND LONGSPAN_TORCH_LIBRARIES "${LONGSPAN_LIB_${name}}")
  endforeach()
  # Only where torch has CUDA.
  find_library(LONGSPAN_LIB_c10_cuda c10_cuda
    PATHS "${LONGSPAN_TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE)
  if(LONGSPAN_LIB_c10_cuda)
    # A program finds by its own path only what it links itself.
    list(APPEND LONGSPAN_TORCH_LIBRARIES "${LONGSPAN_LIB_c10_cuda}")
  endif()
  add_library(Longspan::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(Longspan::libtorch SYSTEM INTERFACE
    "${LONGSPAN_TORCH_ROOT}/include"
    "${LONGSPAN_TORCH_ROOT}/include/torch/csrc/api/include")
  target_compile_definitions(Longspan::libtorch INTERFACE
    _GLIBCXX_USE_CXX11_ABI=1)
  # The operators of torch are looked up at load time: keep every library.
  target_link_options(Longspan::libtorch INTERFACE -Wl,--no-as-needed)
  target_link_libraries(Longspan::libtorch INTERFACE
    ${LONGSPAN_TORCH_LIBRARIES})
endif()
