#!/usr/bin/env bash
# Several hosts: run the same line on each of them. HEAD is one of them, by a name or address that the others reach.
#
#     HEAD=10.0.0.1 NODES=2 examples/launch/many_nodes.sh examples/char_gpt.py ckpt_path=auto \
#         trainer.default_root_dir=/shared/runs/gpt
#
# NODES       hosts, as a number, or as LEAST:MOST for a run that goes on when some leave or come (never HEAD)
# PROCESSES   ranks on each; default: one for each GPU
# RESTARTS    how often at most; default: 3
# PORT        on HEAD, where the hosts meet; default: 29400
# JOB         a name that other runs on these hosts don't have; default: samestep
# CONF        more for torchrun's --rdzv-conf, such as last_call_timeout=10; see docs/multi-node.md
#
# All hosts need the program at the same place, and a run folder that all of them can write.
set -euo pipefail
[ $# -gt 0 ] && [ -n "${HEAD:-}" ] && [ -n "${NODES:-}" ] || { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Ranks that are told to leave have so many seconds to save before torchrun ends them; torch's default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}"

# Without it, a host that comes later finds no address: the others, whose store is there already, don't tell it again.
case "$NODES" in *:*) export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ;; esac

# Torch would go by the hosts' names, which lead to 127.0.1.1 on many hosts. The address that HEAD is reached from is sure;
# on HEAD itself it is HEAD's, and torch takes a host for the one where all meet if that is called localhost.
read -r address head < <(python3 - "$HEAD" <<'PROBE'
import socket, sys

family, _, _, _, head = socket.getaddrinfo(sys.argv[1], 1, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(head)  # sends nothing
    own = probe.getsockname()[0]
print(own, "localhost" if own == head[0] else sys.argv[1])
PROBE
)

exec torchrun --nnodes="$NODES" --nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$head:${PORT:-29400}" --rdzv-id="${JOB:-samestep}" --rdzv-conf="${CONF:-}" \
    --local-addr="$address" "$@"
