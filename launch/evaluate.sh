#!/usr/bin/env bash
# Evaluates each checkpoint of a training run as it appears, into RUN/evaluations/STEP.json. Ends
# when that of the run's last step is there, or after the one in hand once RUN/evaluations/stop is.
#
# Kill it at any moment and start it again; several may watch one run (on some network disks, from
# one machine only). To evaluate a step anew, delete its file. A step that fails is left out until
# the next start, and the exit status is then 1. POLL_SECONDS: between two looks, 30.
set -euo pipefail

if [[ $# -eq 0 || $1 == -* ]]; then
  echo "usage: $0 RUN --data_dir=DIR [--tasks=all] [other flags of deconstruct.evaluate]" >&2
  exit 2
fi
run=${1%/} out=${1%/}/evaluations
shift
if [[ ! -f $run/config.json ]]; then
  echo "error: $run is no training run: it has no config.json" >&2
  exit 1
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
rm -f "$out/stop"

child=
trap '[[ -z $child ]] || kill "$child" || true; exit 143' TERM
trap '[[ -z $child ]] || kill "$child" || true; exit 130' INT
in_child() { # so that a signal is answered at once
  local status=0
  "$@" &
  child=$!
  wait "$child" || status=$?
  child=
  return "$status"
}

stored_steps() {
  find "$run/checkpoints" -mindepth 1 -maxdepth 1 -type d -regex '.*/[0-9]+' -printf '%f\n' \
    2> /dev/null | sort -n || true
}

last_step() {
  python -c 'import json, sys; print(json.load(open(sys.argv[1]))["num_steps"])' "$run/config.json"
}

declare -A failed=()
while true; do
  last=$(last_step) worked=
  for step in $(stored_steps); do
    [[ ! -e $out/stop ]] || break
    [[ ! -e $out/$step.json && -z ${failed[$step]:-} ]] || continue
    exec 9> "$out/$step.lock" # the evaluation has it too, and keeps it if this shell is killed
    if flock --nonblock 9 && [[ ! -e $out/$step.json ]]; then
      worked=yes
      echo "evaluating step $step of $run"
      if ! in_child python -m deconstruct.evaluate "$@" \
        --checkpoint="$run" --step="$step" --output="$out/$step.json" &&
        [[ -d $run/checkpoints/$step ]]; then # training deletes old ones
        failed[$step]=yes
        echo "error: step $step failed" >&2
      fi
    fi
    exec 9>&-
  done
  if [[ -e $out/stop || -z $worked && (-e $out/$last.json || -n ${failed[$last]:-}) ]]; then
    break
  fi
  if [[ ${#failed[@]} -gt 0 ]] && ! compgen -G "$out/*.json" > /dev/null; then
    break # nothing ever worked: it is not the checkpoints
  fi
  [[ -n $worked ]] || in_child sleep "${POLL_SECONDS:-30}"
done
exit $((${#failed[@]} > 0))
