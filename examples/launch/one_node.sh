#!/usr/bin/env bash
# One host: a rank for each GPU, all started again from the newest checkpoint when one dies.
#
#     examples/launch/one_node.sh examples/char_gpt.py ckpt_path=auto trainer.default_root_dir=runs/gpt
#
# PROCESSES   ranks; default: one for each GPU
# RESTARTS    how often at most; default: 3
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Ranks that are told to leave have so many seconds to save before torchrun ends them; torch's default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}"

exec torchrun --standalone --nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-3}" "$@"
