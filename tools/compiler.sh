# Sourced by what builds: the compiler that CXX names, where it can build beside torch.
#
# A compiler with a static libstdc++ only would give every library its own copy
# of it, and exceptions that cross into torch's copy crash. Take the system's.
if [[ -n ${CXX:-} && $("$CXX" -print-file-name=libstdc++.so) != /* ]]; then
  echo "${0##*/}: $CXX has no shared libstdc++; using $(command -v g++)" >&2
  export CXX=g++ CC=gcc
fi
