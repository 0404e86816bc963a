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
: > "$out/errors.log"
rm -f "$out/fla.jsonl"
if ! python -c 'import sys, jax; sys.exit(jax.default_backend() != "gpu")' 2>> "$out/errors.log"; then
  echo "error: JAX finds no GPU here: pip install -r requirements-gpu.txt, and look at its driver" >&2
  exit 1
fi

bench() { # op, backend, other flags
  local op=$1 backend=$2
  shift 2
  echo "$op by $backend $*"
  if ! timeout 18 python -m tools.bench kernels --op="$op" --backend="$backend" "$@" \
    >> "$out/kernels.jsonl" 2>> "$out/errors.log"; then
    echo "  failed: $(tail -n 1 "$out/errors.log")" >&2
    failed=1
  fi
}

for dtype in bfloat16 float32; do
  for backend in gpu triton blocked; do
    bench prefix_softmax $backend --dtype=$dtype --rows=16
  done
  for backend in gpu quadratic; do
    bench taylor_attention $backend --dtype=$dtype
  done
  bench fixed_map_attention blocked --dtype=$dtype
  bench causal_attention xla --dtype=$dtype
done
bench causal_attention cudnn --dtype=bfloat16
bench prefix_softmax blocked --dtype=bfloat16 --rows=1 --length=65536
bench taylor_attention chunked --dtype=bfloat16 --rows=1 --length=65536 --direction=forward

echo "mixers"
timeout 90 python -m tools.bench mixers --dtype=bfloat16 --width=1024 --heads=16 \
  > "$out/mixers.jsonl" 2>> "$out/errors.log" || {
  echo "  failed: $(tail -n 1 "$out/errors.log")" >&2
  failed=1
}

if [[ -n ${FLA_PYTHON:-} ]]; then
  echo "flash-linear-attention"
  for rows in 8 16; do
    timeout 40 "$FLA_PYTHON" -m tools.bench fla --dtype=bfloat16 --rows=$rows \
      >> "$out/fla.jsonl" 2>> "$out/errors.log" || {
      echo "  failed: $(tail -n 1 "$out/errors.log")" >&2
      failed=1
    }
  done
fi
exit "$failed"
