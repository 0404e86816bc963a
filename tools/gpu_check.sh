#!/usr/bin/env bash
# What only a GPU can tell, within 8 minutes (each part is cut off at its share): whether each backend
# is right there, and how fast.
#
#     tools/gpu_check.sh DIR
#
# in an environment of requirements-gpu.txt. Writes DIR/kernels.jsonl, mixers.jsonl and errors.log; a
# backend that is wrong or does not run is told and left out, and the exit status is then 1. With
# FLA_PYTHON, a Python with requirements.txt, PyTorch for CUDA and flash-linear-attention, DIR/fla.jsonl
# has that library's kernels beside ours.
set -euo pipefail

if [[ $# -ne 1 ]]; then
  echo "usage: $0 DIR" >&2
  exit 2
fi
out=$1 failed=0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
: > "$out/kernels.jsonl"
: > "$out/mixers.jsonl"
: > "$out/errors.log"
rm -f "$out/fla.jsonl"
if ! python -c 'import sys, jax; sys.exit(jax.default_backend() != "gpu")' 2>> "$out/errors.log"; then
  echo "error: JAX finds no GPU here: pip install -r requirements-gpu.txt, and look at its driver" >&2
  exit 1
fi

part() { # seconds at most, file, command
  local most=$1 file=$2 status=0
  shift 2
  timeout "$most" "$@" >> "$out/$file" 2>> "$out/errors.log" || status=$?
  if [[ $status -eq 124 ]]; then
    echo "  cut off after $most s" | tee -a "$out/errors.log" >&2
  elif [[ $status -ne 0 ]]; then
    echo "  failed: $(tail -n 1 "$out/errors.log")" >&2
  fi
  [[ $status -eq 0 ]] || failed=1
}

bench() { # seconds at most, flags
  local most=$1
  shift
  echo "kernels $*"
  part "$most" kernels.jsonl python -m tools.bench kernels "$@"
}

# Backends of one op take turns in one process. First what the answer depends on most.
prefix=(--op=prefix_softmax --backend=gpu --backend=triton --backend=blocked)
taylor=(--op=taylor_attention --backend=gpu --backend=quadratic)
attention=(--op=causal_attention --backend=xla)
fixed=(--op=fixed_map_attention)
bench 50 "${prefix[@]}" --dtype=bfloat16 --rows=16
bench 50 "${taylor[@]}" --dtype=bfloat16
bench 40 "${attention[@]}" --backend=cudnn --dtype=bfloat16
bench 30 "${fixed[@]}" --dtype=bfloat16
bench 40 "${prefix[@]}" --dtype=float32 --rows=16
bench 40 "${taylor[@]}" --dtype=float32
# Documents, heads that share their keys, and a length that no block divides.
awkward=(--dtype=bfloat16 --length=1999 --document=300 --groups=2)
bench 35 "${prefix[@]}" "${awkward[@]}"
bench 35 "${taylor[@]}" "${awkward[@]}"
bench 30 --op=taylor_attention --backend=gpu_chunked --backend=chunked --dtype=bfloat16 --rows=1 \
  --length=65536 --direction=forward

echo "mixers"
for names in "approximate non_approximate rnd_emb_qk" "fixed_seq_qk static_emb_qk mlp"; do
  # shellcheck disable=SC2086 (a word each)
  part 35 mixers.jsonl python -m tools.bench mixers --dtype=bfloat16 --width=1024 --heads=16 \
    $(printf -- '--mixer=%s ' $names)
done

if [[ -n ${FLA_PYTHON:-} ]]; then
  echo "flash-linear-attention"
  for rows in 8 16; do
    part 25 fla.jsonl "$FLA_PYTHON" -m tools.bench fla --dtype=bfloat16 --rows=$rows
  done
fi
exit "$failed"
