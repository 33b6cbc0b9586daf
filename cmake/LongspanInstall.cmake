# Where things go: a prefix for C++ users, or the folder of a Python wheel.
include(CMakePackageConfigHelpers)

if(SKBUILD)
  # Inside the wheel everything lives in the package `longspan`.
  set(library_dir lib)
  set(binary_dir bin)
  set(module_rpath "$ORIGIN/lib")
else()
  set(library_dir ${CMAKE_INSTALL_LIBDIR})
  set(binary_dir ${CMAKE_INSTALL_BINDIR})
endif()

foreach(library longspan_core longspan_kernels longspan_torch longspan_models)
  if(TARGET ${library})
    string(REPLACE "longspan_" "" short ${library})
    set_target_properties(${library} PROPERTIES
      EXPORT_NAME ${short} INSTALL_RPATH "$ORIGIN")
    if(NOT SKBUILD)  # wheels cannot hold links, and would hold copies
      set_target_properties(${library} PROPERTIES
        VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
    endif()
  endif()
endforeach()

if(TARGET longspan_cli)
  set_target_properties(longspan_cli PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${library_dir}")
  install(TARGETS longspan_cli RUNTIME DESTINATION ${binary_dir})
endif()

if(SKBUILD)
  install(TARGETS longspan_core longspan_kernels longspan_torch
    LIBRARY DESTINATION ${library_dir})
  set_target_properties(longspan_python PROPERTIES
    INSTALL_RPATH "${module_rpath}")
  install(TARGETS longspan_python LIBRARY DESTINATION .)
  install(FILES ${PROJECT_BINARY_DIR}/python/longspan/_built_with.py
    DESTINATION .)
  return()
endif()

install(TARGETS longspan_core longspan_kernels EXPORT LongspanTargets
  LIBRARY DESTINATION ${library_dir} ARCHIVE DESTINATION ${library_dir})

# Public headers lie beside their sources; those in detail/, the kernels, and
# all but two of ops are the library's own. tests/consumer/headers.txt lists
# what is installed, and its test compares.
function(longspan_install_headers)  # folder ...
  foreach(folder IN LISTS ARGN)
    file(GLOB headers CONFIGURE_DEPENDS
      ${PROJECT_SOURCE_DIR}/longspan/${folder}/*.h)
    install(FILES ${headers}
      DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longspan/${folder})
  endforeach()
endfunction()
longspan_install_headers(core plan draw)
install(FILES ${PROJECT_SOURCE_DIR}/longspan/longspan.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longspan)

set(package_dir ${library_dir}/cmake/Longspan)
install(EXPORT LongspanTargets NAMESPACE Longspan:: DESTINATION ${package_dir})
if(TARGET longspan_torch)
  install(TARGETS longspan_torch EXPORT LongspanTorchTargets
    LIBRARY DESTINATION ${library_dir} ARCHIVE DESTINATION ${library_dir})
  install(EXPORT LongspanTorchTargets NAMESPACE Longspan::
    DESTINATION ${package_dir})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/LongspanTorch.cmake
    DESTINATION ${package_dir})
  longspan_install_headers(comm batch attention)
  install(FILES ${PROJECT_SOURCE_DIR}/longspan/torch.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longspan)
  install(FILES
    ${PROJECT_SOURCE_DIR}/longspan/ops/key_windows.h
    ${PROJECT_SOURCE_DIR}/longspan/ops/linear_cross_entropy.h
    ${PROJECT_SOURCE_DIR}/longspan/ops/selection.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longspan/ops)
endif()
if(TARGET longspan_models)
  install(TARGETS longspan_models EXPORT LongspanTorchTargets
    LIBRARY DESTINATION ${library_dir} ARCHIVE DESTINATION ${library_dir})
  longspan_install_headers(models)
  install(FILES ${PROJECT_SOURCE_DIR}/longspan/models.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longspan)
endif()
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/LongspanConfig.cmake.in
  ${PROJECT_BINARY_DIR}/LongspanConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/LongspanConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/LongspanConfig.cmake
  ${PROJECT_BINARY_DIR}/LongspanConfigVersion.cmake
  DESTINATION ${package_dir})
