#!/usr/bin/env bash
# Several hosts: run the same line on each of them. HEAD is one of them, by a name or address that the others reach.
#
#     HEAD=10.0.0.1 NODES=2 examples/launch/many_nodes.sh examples/char_gpt.py ckpt_path=auto \
#         trainer.default_root_dir=/shared/runs/gpt
#
# NODES       hosts, as a number, or as LEAST:MOST for a run that goes on when some leave or come
# PROCESSES   ranks on each; default: one for each GPU
# RESTARTS    how often at most; default: 3
# PORT        on HEAD, where the hosts meet; default: 29400
# JOB         a name that other runs on these hosts don't have; default: samestep
#
# All hosts need the program at the same place, and a run folder that all of them can write.
set -euo pipefail
[ $# -gt 0 ] && [ -n "${HEAD:-}" ] && [ -n "${NODES:-}" ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Ranks that are told to leave have so many seconds to save before torchrun ends them; torch's default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}"

exec torchrun --nnodes="$NODES" --nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29400}" --rdzv-id="${JOB:-samestep}" "$@"
