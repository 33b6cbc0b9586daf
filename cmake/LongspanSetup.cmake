# Compiler settings and what the machine offers.
include(GNUInstallDirs)

if(SKBUILD)  # a wheel is built for the interpreter that builds it
  set(LONGSPAN_PYTHON ${Python_EXECUTABLE})
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()

# Lines and functions for backtraces, without the variables: those take two
# thirds of the time that a source with torch's headers takes.
string(REGEX REPLACE "-g( |$)" "-g1\\1"
  CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")

find_program(LONGSPAN_CCACHE ccache)
if(LONGSPAN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The precompiled header is checked by content, so these are safe.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    ${LONGSPAN_CCACHE})
endif()

# longspan_unity(target n): n sources to a translation unit. Headers with many
# templates, torch's above all, are then instantiated once for all of them.
function(longspan_unity target batch)
  if(LONGSPAN_UNITY)
    set_target_properties(${target} PROPERTIES
      UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
  endif()
endfunction()

# Warnings and sanitizers of our own code.
add_library(longspan_flags INTERFACE)
target_compile_options(longspan_flags INTERFACE -Wall -Wextra -Wpedantic)
if(LONGSPAN_WERROR)
  target_compile_options(longspan_flags INTERFACE -Werror)
endif()
if(LONGSPAN_SANITIZE)
  string(REPLACE "," ";" LONGSPAN_SANITIZERS "${LONGSPAN_SANITIZE}")
  foreach(sanitizer IN LISTS LONGSPAN_SANITIZERS)
    if(NOT sanitizer MATCHES "^(address|undefined|thread)$")
      message(FATAL_ERROR "LONGSPAN_SANITIZE: '${sanitizer}' is not one of "
        "address, undefined, thread")
    endif()
  endforeach()
  # Such a tree is compiled more often than its programs run, and each runs once:
  # -O1 takes a third of the time that -O3 takes for kernels.
  string(REGEX REPLACE "-O[0-9]" "-O1"
    CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
  target_compile_options(longspan_flags INTERFACE
    -fsanitize=${LONGSPAN_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
  target_link_options(longspan_flags INTERFACE -fsanitize=${LONGSPAN_SANITIZE})
  if("thread" IN_LIST LONGSPAN_SANITIZERS AND
      CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Fences in torch's headers, which the sanitizer does not follow.
    target_compile_options(longspan_flags INTERFACE -Wno-tsan)
  endif()
endif()

# LibTorch, from the interpreter that has it. It brings a shared libstdc++, and
# a second, static copy in our libraries would crash on the first exception.
if(LONGSPAN_BUILD_TORCH)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so
      OUTPUT_VARIABLE shared_libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT IS_ABSOLUTE "${shared_libstdcxx}")
      message(FATAL_ERROR "Longspan: ${CMAKE_CXX_COMPILER} has no shared "
        "libstdc++, which code beside torch needs; set CXX to another compiler")
    endif()
  endif()
  set(LONGSPAN_WITHOUT_TORCH "LONGSPAN_BUILD_TORCH=OFF")
  include(LongspanTorch)
endif()

include(LongspanCuda)

# The command line needs two header-only packages.
set(LONGSPAN_HAVE_CLI OFF)
if(NOT LONGSPAN_BUILD_CLI STREQUAL "OFF")
  find_path(LONGSPAN_CLI11_INCLUDE CLI/CLI.hpp)
  find_path(LONGSPAN_JSON_INCLUDE nlohmann/json.hpp)
  if(LONGSPAN_CLI11_INCLUDE AND LONGSPAN_JSON_INCLUDE)
    set(LONGSPAN_HAVE_CLI ON)
  elseif(LONGSPAN_BUILD_CLI STREQUAL "ON")
    message(FATAL_ERROR "LONGSPAN_BUILD_CLI=ON needs CLI11 and nlohmann-json "
      "(Debian: libcli11-dev nlohmann-json3-dev)")
  else()
    message(STATUS "Longspan: no command line (CLI11 or nlohmann-json missing)")
  endif()
endif()
