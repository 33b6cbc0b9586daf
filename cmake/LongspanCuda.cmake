# Device code is compiled by plain calls of nvcc: CMake's own CUDA language does
# not know every pair of compiler and standard that works. Found or absent
# without fuss.
set(LONGSPAN_HAVE_CUDA OFF)
set(wanted ${LONGSPAN_BUILD_CUDA})
if(wanted STREQUAL "AUTO" AND NOT EXISTS /dev/nvidiactl)
  set(wanted OFF)  # minutes of compiling for nobody
endif()
if(NOT wanted STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE
      AND TARGET CUDA::cudart_static)
    set(LONGSPAN_HAVE_CUDA ON)
  elseif(LONGSPAN_BUILD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LONGSPAN_BUILD_CUDA=ON but there is no CUDA compiler")
  endif()
endif()

# longspan_cuda_sources(target file ...): .cu files as objects of a target, for
# Hopper and, as code that the driver compiles, for other cards since Ampere.
# Those in a hopper/ use instructions that only Hopper has. The target
# longspan_cuda builds the objects of all targets.
function(longspan_cuda_sources target)
  set(objects "")
  foreach(source IN LISTS ARGN)
    set(others -gencode=arch=compute_80,code=compute_80)
    if(source MATCHES "/hopper/")
      set(others "")
    endif()
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${object}
      COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -std=c++20 -O3 -lineinfo
        -gencode=arch=compute_90a,code=sm_90a
        ${others} -ccbin ${CMAKE_CXX_COMPILER} ${LONGSPAN_CUDA_FLAGS}
        -Xcompiler=-fPIC -I${PROJECT_SOURCE_DIR} -MD -MF ${object}.d
        -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
      DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source} DEPFILE ${object}.d
      COMMENT "Building CUDA object ${source}.o" VERBATIM)
    set_source_files_properties(${object} PROPERTIES
      EXTERNAL_OBJECT ON GENERATED ON)
    target_sources(${target} PRIVATE ${object})
    list(APPEND objects ${object})
  endforeach()
  add_custom_target(${target}_objects DEPENDS ${objects})
  if(NOT TARGET longspan_cuda)
    add_custom_target(longspan_cuda)
  endif()
  add_dependencies(longspan_cuda ${target}_objects)
  target_link_libraries(${target} PRIVATE
    $<BUILD_INTERFACE:CUDA::cudart_static>)
endfunction()
