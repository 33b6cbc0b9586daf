# Sourced by the scripts beside it: long work as numbered phases, each with the
# time it took and the time since the start.
#
#   steps 3 test                         three phases of `make test`
#   step "C++ tests" ctest --test-dir .. one of them; returns the command's status

steps() { steps_total=$1 steps_name=$2 steps_done=0 steps_began=$SECONDS; }

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

step() {
  local title=$1 began=$SECONDS status=0
  shift
  steps_done=$((steps_done + 1))
  echo "== $steps_name $steps_done/$steps_total: $title (at $(clock $((SECONDS - steps_began))))"
  "$@" || status=$?
  local verdict=done
  ((status == 0)) || verdict=FAILED
  echo "== $steps_name $steps_done/$steps_total: $title $verdict in $(clock $((SECONDS - began)))"
  return $status
}
