# Sourced: python_tests OPTION ... runs pytest over the tests in Python against the tree
# that $build names, with $python, and leaves what happened in $results.

use_tree() {
  export PYTHONPATH=$PWD/$build/python LONGSPAN_CLI=$PWD/$build/cli/longspan
  export LONGSPAN_BUILD=$PWD/$build
}

# One test more than there are cores where pytest-xdist is there, since many wait for
# processes or deadlines; ranks are threads or processes of one test, so one thread of
# torch each is enough.
python_tests() {
  local many=()
  use_tree
  if "$python" -c 'import xdist' 2>/dev/null; then
    many=(-n "$(($(nproc) + 1))" --dist worksteal)
    export OMP_NUM_THREADS=1
  fi
  "$python" -m pytest -q -p no:cacheprovider "${many[@]}" tests/python \
    compat/nemo/tests --junitxml="$results/pytest.xml" "$@"
}
