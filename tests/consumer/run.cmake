# Installs the build tree into an empty prefix, compares the headers there with
# headers.txt, builds the consumer against it, and runs what it built.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN} failed:\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
file(STRINGS ${SOURCE}/headers.txt headers REGEX "^[^#]")
set(also "")
set(programs owners)
if(WITH_TORCH)
  set(also torch)
  list(APPEND programs shards)
else()
  list(FILTER headers EXCLUDE REGEX
    "^longspan/(torch.h|comm/|batch/|attention/|ops/)")
endif()
if(WITH_MODELS)
  set(also "torch\\;models")
  list(APPEND programs scans)
else()
  list(FILTER headers EXCLUDE REGEX "^longspan/models")
endif()
file(GLOB_RECURSE installed RELATIVE ${WORK}/prefix/include
  ${WORK}/prefix/include/*)
list(SORT headers)
list(SORT installed)
if(NOT headers STREQUAL installed)
  set(missing ${headers})
  list(REMOVE_ITEM missing ${installed})
  list(REMOVE_ITEM installed ${headers})
  message(FATAL_ERROR "what is public changed: ${SOURCE}/headers.txt also lists "
    "[${missing}], and [${installed}] is installed beside it; a header that "
    "nobody is to include belongs into detail/")
endif()
set(flags "")
if(FLAGS)
  set(flags -fsanitize=${FLAGS})
endif()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
  -DCMAKE_PREFIX_PATH=${WORK}/prefix -DALSO=${also}
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${flags}
  -DLONGSPAN_TORCH_ROOT=${LONGSPAN_TORCH_ROOT})
run(${CMAKE_COMMAND} --build ${WORK}/build)
if(WITH_TORCH)  # a machine without torch hears which part needs none
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/without
    -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DALSO=torch
    -DCMAKE_CXX_COMPILER=${COMPILER} -DLONGSPAN_PYTHON=no-python
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  if(result EQUAL 0 OR
      NOT output MATCHES "find_package\\(Longspan COMPONENTS core\\)")
    message(FATAL_ERROR "without torch, find_package said:\n${output}")
  endif()
endif()
foreach(program IN LISTS programs)
  run(${WORK}/build/${program})
endforeach()
