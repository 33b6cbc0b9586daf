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

foreach(library longspan_core longspan_kernels longspan_torch)
  if(TARGET ${library})
    string(REPLACE "longspan_" "" short ${library})
    set_target_properties(${library} PROPERTIES
      EXPORT_NAME ${short} INSTALL_RPATH "$ORIGIN"
      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
    if(SKBUILD)  # wheels cannot hold links
      set_target_properties(${library} PROPERTIES VERSION "" SOVERSION "")
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
  return()
endif()

install(TARGETS longspan_core longspan_kernels EXPORT LongspanTargets
  LIBRARY DESTINATION ${library_dir} ARCHIVE DESTINATION ${library_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/longspan
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

set(package_dir ${library_dir}/cmake/Longspan)
install(EXPORT LongspanTargets NAMESPACE Longspan:: DESTINATION ${package_dir})
if(TARGET longspan_torch)
  install(TARGETS longspan_torch EXPORT LongspanTorchTargets
    LIBRARY DESTINATION ${library_dir} ARCHIVE DESTINATION ${library_dir})
  install(EXPORT LongspanTorchTargets NAMESPACE Longspan::
    DESTINATION ${package_dir})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/LongspanTorch.cmake
    DESTINATION ${package_dir})
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
