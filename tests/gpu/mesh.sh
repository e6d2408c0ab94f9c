#!/bin/bash
# Kills over a mesh of GPUs, in both abort modes: prints one line for each thing that worked, or did not.
#
#   tests/gpu/mesh.sh                                       one machine with 2 to 8 GPUs
#   STORE=first:7070 WORK=/shared/mesh tests/gpu/mesh.sh first     of two such machines, this one first
#   STORE=first:7070 WORK=/shared/mesh tests/gpu/mesh.sh second    on the other one, at the same time
#
# A job has hosts that share the GPUs equally. Two of them are a replica, with the state in shards on their GPUs: two
# replicas of four hosts, or one of two hosts (fewer than four GPUs on one machine). Between two machines WORK is a
# folder that both see. Variables: PLATFORM=cpu tries the script itself; PYTHON, the interpreter of the environment (python).
set -u
ROLE=${1:-alone}
PLATFORM=${PLATFORM:-gpu}
PYTHON=${PYTHON:-python}
STORE=${STORE:-127.0.0.1:7070}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK"
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$ROOT RESILIENT_JAX_TOKEN=${RESILIENT_JAX_TOKEN:-mesh}
SHARE_S=${SHARE_S:-600} # longest wait for a change, with programs compiled anew
FAILURES=0

run() { "$PYTHON" -c 'import sys; from resilient_jax.cli.main import main; main()' "$@"; }
say() { printf '%-7s %s\n' "$1" "$2"; [ "$1" = worked ] || FAILURES=$((FAILURES + 1)); }
check() { # what, command...: a line that says whether the command succeeded
    local what=$1 began=$SECONDS
    shift
    if "$@" >"$WORK/last.log" 2>&1; then say worked "$what ($((SECONDS - began)) s)"; else say FAILED "$what: $(tail -n 1 "$WORK/last.log")"; fi
}

if [ "$PLATFORM" = cpu ]; then GPUS=4; else GPUS=$(nvidia-smi --list-gpus | wc -l); fi
[ "$GPUS" -ge 2 ] || { echo "found $GPUS GPUs, expected 2 to 8"; exit 2; }
if [ "$ROLE" = alone ] && [ "$GPUS" -lt 4 ]; then HOSTS=2; else HOSTS=4; fi
if [ "$ROLE" = alone ]; then DEVICES=$((GPUS / HOSTS)); else DEVICES=$((GPUS / 2)); fi
TRAIN=("$ROOT/tests/support/scripts/mesh_loop.py")
WORDS=(hosts=2 "axes=fsdp:$((2 * DEVICES))")
CONFIG='max_restarts = 1000\nmax_host_losses = 1000\nrestart_backoff_s = 0.0\nmin_hosts = 2\n'

start() { # MODE: starts the hosts of this machine in the background, in processes of $JOBS
    local mode=$1 folder=$WORK/$1 number
    mkdir -p "$folder"
    printf "${CONFIG}abort = \"$mode\"\n" >"$WORK/$mode-$ROLE.toml"
    JOBS=()
    if [ "$ROLE" = alone ]; then
        run launch --platform "$PLATFORM" --hosts "$HOSTS" --devices-per-host "$DEVICES" --run-dir "$folder/run" \
            --config "$WORK/$mode-$ROLE.toml" "${TRAIN[@]}" "$folder" "${WORDS[@]}" >"$folder/launch.log" 2>&1 &
        JOBS+=($!)
        TARGET=("$folder/run")
        return
    fi
    TARGET=(--store "$STORE" --job "mesh-$mode")
    for number in 0 1; do
        local options=(--platform "$PLATFORM" --devices-per-host "$DEVICES" --num-hosts "$HOSTS")
        [ "$ROLE$number" = first0 ] && options+=(--serve-store)
        local visible
        visible=$(seq -s , $((number * DEVICES)) $(((number + 1) * DEVICES - 1)))
        CUDA_VISIBLE_DEVICES=$visible run agent --store "$STORE" --job "mesh-$mode" --host-name "$ROLE-$number" \
            "${options[@]}" --run-dir "$folder/$ROLE-$number" --config "$WORK/$mode-$ROLE.toml" \
            "${TRAIN[@]}" "$folder" "${WORDS[@]}" >"$folder/$ROLE-$number.log" 2>&1 &
        JOBS+=($!)
    done
}

ask() { # prints of the running job: generation, newest step, leader, another host than the leader; fails until all train
    run status "${TARGET[@]}" --json | "$PYTHON" -c '
import json, sys
report, hosts, after = json.load(sys.stdin), int(sys.argv[1]), int(sys.argv[2])
generation = report["generation"]
members = [member["host"] for member in generation["membership"]["members"]]
workers = [status["worker"] for status in report["hosts"] if status["worker"]]
done = [worker for worker in workers if worker["report"]["generation"] == generation["number"] and worker["report"]["place"]["has_finished_step"]]
if generation["phase"] != "active" or len(members) != hosts or len(done) != hosts or generation["number"] <= after:
    sys.exit(1)
step = max(status["progress"]["step"] for status in report["hosts"])
others = [host for host in members if host != report["leader"]]
print(generation["number"], step, report["leader"], others[-1])' "$HOSTS" "$1" 2>/dev/null
}

wait_training() { # AFTER: waits until all hosts have made a step in a generation after this one
    local end=$((SECONDS + SHARE_S)) found
    while [ "$SECONDS" -lt "$end" ]; do
        if found=$(ask "$1"); then
            read -r GENERATION STEP LEADER OTHER <<<"$found"
            return 0
        fi
        kill -0 "${JOBS[0]}" 2>/dev/null || { echo "the job ended: see $WORK"; return 1; }
        sleep 1
    done
    echo "not all $HOSTS hosts trained within $SHARE_S s: see $WORK"
    return 1
}

kill_part() { # PART HOST: kills, and waits until all train again
    local before=$GENERATION
    run kill "${TARGET[@]}" "$1" "$2" && wait_training "$before"
}

end() { # FOLDER STEPS: lets the job end, and waits for it
    local code=0 job
    echo "$2" >"$1/stop"
    for job in "${JOBS[@]}"; do wait "$job" || code=$?; done
    return "$code"
}

compare() { # FOLDERS: every box of the state has one digest for each step, whoever computed it
    "$PYTHON" -c '
import collections, json, pathlib, sys
found = collections.defaultdict(set)
for folder in sys.argv[1:]:
    for path in pathlib.Path(folder).glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for box, digest in row["digests"].items():
                found[row["step"], box].add(digest)
wrong = sorted({step for (step, _), digests in found.items() if len(digests) > 1})
print(f"{len(found)} boxes, steps with other bits: {wrong}")
sys.exit(bool(wrong) or not found)' "$@"
}

check "doctor on $ROLE" run doctor --json
for mode in interrupt replace; do
    start "$mode"
    if [ "$ROLE" = second ]; then
        check "$mode: the job of this machine's hosts ended well" wait "${JOBS[@]}"
        continue
    fi
    GENERATION=0 STEP=0 LEADER='' OTHER=''
    check "$mode: $HOSTS hosts x $DEVICES devices train, replicas of 2 hosts" wait_training 0
    check "$mode: a worker is killed, all train again" kill_part worker "$OTHER"
    check "$mode: the worker of the leader's host is killed, all train again" kill_part worker "$LEADER"
    check "$mode: the coordination service is killed, all train again" kill_part service leader
    [ "$ROLE" = alone ] && check "$mode: a host is killed, all train again" kill_part host "$OTHER"
    check "$mode: the job ends" end "$WORK/$mode" $((STEP + 40))
    check "$mode: the same bits on all replicas, and after each kill" compare "$WORK/$mode"
done
if [ "$ROLE" != second ]; then
    check "both modes have the same bits" compare "$WORK/interrupt" "$WORK/replace"
fi
echo "$FAILURES failed; logs in $WORK"
[ "$FAILURES" -eq 0 ]
