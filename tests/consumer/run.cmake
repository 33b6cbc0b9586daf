# Installs the build tree into an empty prefix, builds the consumer against it,
# and runs what it built.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN} failed:\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
set(also "")
set(programs owners)
if(WITH_TORCH)
  set(also torch)
  list(APPEND programs shards)
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
foreach(program IN LISTS programs)
  run(${WORK}/build/${program})
endforeach()
