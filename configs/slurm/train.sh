#!/bin/bash
# Trains a config on one node of Slurm or on several, from the folder where it is submitted:
#
#   sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 configs/slurm/train.sh CONFIG [KEY.SUB=VALUE ...]
#
# `rayapp submit CONFIG --slurm` checks the config first and then runs the same. The script starts a Ray over all nodes of
# the job, trains on it, and ends it. Options of sbatch win over the #SBATCH lines below.
#
# Slurm sends USR1 when the job is preempted, and 600 s before its time limit: the run finishes its step and saves, and the
# job goes back into the queue and later continues from its checkpoint. Preemption sends USR1 only if the cluster sets
# preempt_send_user_signal and a GraceTime (docs/operate.md); else the work since the last checkpoint is lost.
#
# Variables:
#   RAYAPP_PYTHON          Python with rayapp on every node (default: python)
#   RAYAPP_IMAGE           image in which everything runs, with Apptainer: a .sif file, or docker://...
#   RAYAPP_APPTAINER_ARGS  more arguments of `apptainer exec`, e.g. "--nv --bind /scratch"
#   RAYAPP_INTERFACE       network interface between the nodes, e.g. ib0 (default: the one of the route to another node)
#   RAYAPP_MAX_RESTARTS    how often the job may go back into the queue (default: 100)
#
#SBATCH --job-name=rayapp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
# shellcheck disable=SC2329 # functions that srun and traps call
set -euo pipefail

[ $# -gt 0 ] || { echo "give a config: sbatch configs/slurm/train.sh CONFIG [KEY.SUB=VALUE ...]" >&2; exit 2; }
python=("${RAYAPP_PYTHON:-python}")
if [ -n "${RAYAPP_IMAGE:-}" ]; then
    # shellcheck disable=SC2206 # several arguments in one variable
    python=(apptainer exec --pwd "$PWD" --bind "$PWD" ${RAYAPP_APPTAINER_ARGS:-} "$RAYAPP_IMAGE" "${python[@]}")
fi

# Prints the address by which other nodes reach this one. The first address of a node may be docker0's, which all share.
address_towards() {
    "${@:2}" -c 'import os, socket, sys, psutil
if name := os.environ.get("RAYAPP_INTERFACE"):
    found = {each: [one.address for one in many if one.family == socket.AF_INET]
             for each, many in psutil.net_if_addrs().items()}
    if not found.get(name):
        sys.exit(f"RAYAPP_INTERFACE is {name}, but the interfaces with an IPv4 address are "
                 + ", ".join(each for each in found if found[each]))
    print(found[name][0])
else:
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    probe.connect((sys.argv[1], 9))
    print(probe.getsockname()[0])' "$1"
}
other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxm1 "$SLURMD_NODENAME" || true)
if [ -n "$other" ]; then other=$(scontrol show node "$other" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'); fi
address=$(address_towards "${other:-127.0.0.1}" "${python[@]}")

# Two jobs may share a node: each Ray has ports of its own, and a token, without which it would run anybody's code.
port=$((20000 + SLURM_JOB_ID % 1000 * 10))
export RAY_ADDRESS=$address:$port RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(umask 077 && "${python[@]}" -m ray.scripts.scripts get-auth-token --generate)}
export RAY_AUTH_TOKEN

# Runs on every node. Ray gives a node 30 s to start, which imports from a slow file system exceed: hence three tries.
start_node() {
    local port=${RAY_ADDRESS##*:} options began
    options=(--num-cpus="$SLURM_CPUS_ON_NODE" --min-worker-port=0 --max-worker-port=0 --disable-usage-stats)
    if [ "$SLURM_NODEID" = 0 ]; then
        options+=(--head --node-ip-address="${RAY_ADDRESS%:*}" --port="$port" --dashboard-port=$((port + 1)))
        options+=(--ray-client-server-port=$((port + 2)))
    else
        options+=(--address="$RAY_ADDRESS" --node-ip-address="$(address_towards "${RAY_ADDRESS%:*}" "$@")")
        until (: <"/dev/tcp/${RAY_ADDRESS%:*}/$port") 2>/dev/null; do sleep 1; done
    fi
    for _ in 1 2 3; do
        began=$SECONDS
        "$@" -m ray.scripts.scripts start --block "${options[@]}" --dashboard-agent-listen-port=$((port + 3)) || true
        if ((SECONDS - began > 300)); then break; fi
    done
    echo "Ray ended on $(hostname)" >&2
    return 1
}
export -f start_node address_towards

driver='' stopped_by=''
stop() {
    stopped_by=$1
    if [ -n "$driver" ]; then kill -TERM "$driver" 2>/dev/null || true; fi
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM

srun --kill-on-bad-exit=1 --cpu-bind=none --ntasks-per-node=1 bash -c 'start_node "$@"' start_node "${python[@]}" &
ray=$!
end_ray() {
    kill "$ray" 2>/dev/null || true
    wait "$ray" 2>/dev/null || true
}
trap end_ray EXIT

all_nodes='import sys, ray; ray.init(logging_level="CRITICAL", log_to_driver=False); sys.exit(len([n for n in ray.nodes() if n["Alive"]]) < int(sys.argv[1]))'
until "${python[@]}" -c "$all_nodes" "$SLURM_NNODES" >/dev/null 2>&1; do
    if [ -n "$stopped_by" ]; then break; fi
    kill -0 "$ray" 2>/dev/null || { echo "Ray did not start on all $SLURM_NNODES nodes: see the lines above" >&2; exit 1; }
    sleep 2
done

status=130
if [ -z "$stopped_by" ]; then
    "${python[@]}" -m rayapp train "$@" &
    driver=$!
    if [ -n "$stopped_by" ]; then kill -TERM "$driver" 2>/dev/null || true; fi
    # A signal interrupts `wait`: wait again until the driver has ended.
    while status=0; wait "$driver" || status=$?; kill -0 "$driver" 2>/dev/null; do :; done
fi

if [ "$stopped_by" = USR1 ] && [ "$status" = 130 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${RAYAPP_MAX_RESTARTS:-100}" ]; then
        echo "job $SLURM_JOB_ID goes back into the queue, and later continues from its checkpoint"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "job $SLURM_JOB_ID is not queued again: RAYAPP_MAX_RESTARTS is ${RAYAPP_MAX_RESTARTS:-100}" >&2
    fi
fi
exit "$status"
