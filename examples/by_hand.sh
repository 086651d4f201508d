#!/usr/bin/env bash
# A prefill worker, a decode worker and a router, each started by hand; Ctrl-C ends all three.
# `tandem up` does the same and restarts what dies: this shows what the parts are told.
#
#   examples/by_hand.sh [MODEL] [PORT]
#
# Each worker needs four ports: for routers, for probes (/health, /metrics), for the hand-off's
# control, and for its data over TCP. On machines apart each takes its default for all of them, with
# --host and CURVE keys (docs/kubernetes.md). With two GPUs put CUDA_VISIBLE_DEVICES before each.
set -euo pipefail
tandem=$(dirname "$0")/../.venv/bin/tandem
model=${1:-smollm2}
port=${2:-8000}
p=$((port + 10)) d=$((port + 20))

trap 'trap - EXIT; kill $(jobs -p) 2> /dev/null || true; wait' EXIT
"$tandem" prefill "$model" --served-model-name model --log-level warning \
    --port "$p" --probe-port $((p + 1)) --kv-control-port $((p + 2)) --kv-data-port $((p + 3)) &
"$tandem" decode "$model" --served-model-name model --log-level warning \
    --port "$d" --probe-port $((d + 1)) --kv-control-port $((d + 2)) --kv-data-port $((d + 3)) &
"$tandem" router "$model" --served-model-name model --log-level warning --port "$port" \
    --workers "127.0.0.1:$p" --workers "127.0.0.1:$d" &
echo "http://127.0.0.1:$port/ready says when it can serve"
wait -n
