#!/usr/bin/env bash
# What a machine with an NVIDIA GPU is to show, in stages of at most 10 minutes each; a bare one without network will do.
#   bash scripts/gpu_check.sh --stage tests|debug|ab4|ab16 [--wheels DIR] [--out DIR] [--print] [--dry-run]
# tests: the tests marked gpu, under torch's CUDA sanitizer. debug: a step in which each wait for the device is named by its
# line. ab4, ab16: a Llama against stock at 2048 tokens and 4 or 16 micro-batches; the result goes to benchmarks/gpu, with the
# GPU's utilisation and its peak over the budget. --wheels: install the *.whl of DIR first, from nowhere else. --print: only say what would run.
# --dry-run: the same commands with a small model on the CPU; the result goes to OUT/record.json.
# PYTHON=... chooses the interpreter, which has torch (.venv's, where there is one); LIMIT_S=... other seconds for a stage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage= wheels= out= prints= dry=
while [ $# -gt 0 ]; do
    case $1 in
        --stage) stage=$2; shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --print) prints=1; shift ;;
        --dry-run) dry=1; shift ;;
        *) echo "gpu_check.sh: $1: no such option; the head of this file has all" >&2; exit 2 ;;
    esac
done
case $stage in
    tests | debug | ab4 | ab16) ;;
    *) echo "gpu_check.sh: --stage ${stage:-(none)}: write tests, debug, ab4 or ab16" >&2; exit 2 ;;
esac
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${out:-runs/gpu/$stage}
limit_s=${LIMIT_S:-600}
export MAX_JOBS=${MAX_JOBS:-$(nproc)} # files that are compiled at a time
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} DS_ACCELERATOR=cuda
[ -z "$dry" ] || export DS_ACCELERATOR=cpu

answers=() # to Ctrl-C, which what a script starts in the background ignores; older ones of env cannot change that
env --default-signal=INT true 2>/dev/null && answers=(env --default-signal=INT)

reserve_s=30 # of the stage's time, to answer in
case $stage in ab*) reserve_s=70 ;; esac # twice launch.py's _GRACE_S, and the rest
usage= group= # process ids of what an end of this script is to end
trap '[ -z "$usage$group" ] || kill -TERM -- ${usage:+"$usage"} ${group:+"-$group"} 2>/dev/null || true' EXIT

run() { # one command, within what is left of the stage's time
    printf '%s\n' "$*"
    [ -z "$prints" ] || return 0
    if [ "$SECONDS" -ge $((limit_s - reserve_s)) ]; then # 0 would be no limit to timeout
        echo "gpu_check.sh: the stage's $limit_s seconds are over" >&2
        exit 124
    fi
    local status=0
    # Ctrl-C to this process alone, once: a second one would cut pytest's answer off, which tells what has failed so far. Behind
    # it an end to what is left of its group; ab's arms have groups of their own, which ab ends in the reserve.
    setsid "${answers[@]}" timeout --foreground -s INT -k $((reserve_s - 5)) $((limit_s - reserve_s - SECONDS)) "$@" &
    group=$!
    wait "$group" || status=$?
    kill -KILL -- "-$group" 2>/dev/null || true
    group=
    [ "$status" -ne 137 ] || [ "$SECONDS" -lt $((limit_s - reserve_s)) ] || status=124 # killed by timeout
    return "$status"
}

[ -z "$wheels" ] || run "$python" -m pip install --no-index --no-deps "$wheels"/*.whl
[ -n "$prints" ] || mkdir -p "$out"
# Ahead of all else. On 16 cores the ops of both devices, compiled at the same time, took 120 s (2026-11-27); an op has as many
# files at a time as is its share of all. 70 s are assumed for one device.
build=(-m ds_vertical.cli.main build-ops)
case $stage in # shellcheck disable=SC2016  # the inner shell reads its own arguments
    tests) run bash -c 'DS_ACCELERATOR=cpu "$@" & "$@" && wait "$!"' both "$python" "${build[@]}" ;;
    *) run "$python" "${build[@]}" ;;
esac

# both arms: no clipping and on_nonfinite "stop", so that 64 GiB of disk hold one generation of files
#
# How many steps fit, by what was measured of 1.04 billion parameters at M = 16, on 2026-11-26 on an SSD of 1.5 GB/s read and
# 1.8 GB/s write. Stock: 49 s of set-up, and 70 s a step, of (4 M + 16) bytes read and 18 written for each parameter. The vertical
# arm: 42 s of set-up, 11 and 13 s for its two steps, and 11 s or more to end. All of it is taken to grow with parameters, and stock's steps
# with bytes. The first step is not counted. With 60 s for the ops, and 70 s in reserve, of 600 s:
#   ab4, 2.1 billion, 2 steps:   60 s, stock 99 + 2 * 71 s, vertical 85 + 48 + 22 s: 456 s
#   ab16, 1.3 billion, 2 steps:  60 s, stock 61 + 2 * 88 s, vertical 52 + 30 + 14 s: 393 s
compare() { # micro-batches, steps, layers, width, inner width, heads
    local config=configs/llama_3_8b_gpu.json steps=$2
    local settings=(gradient_accumulation_steps="$1" gradient_clipping=0.0 'vertical_schedule.on_nonfinite="stop"')
    local script=(scripts/train.py --deterministic --model llama --seq 2048 --dims num_hidden_layers="$3" hidden_size="$4"
        intermediate_size="$5" num_attention_heads="$6" num_key_value_heads="$6" vocab_size=32000)
    local buffers=$((32000 * $4))
    settings+=("zero_optimization.offload_param.buffer_size=$buffers" "zero_optimization.reduce_bucket_size=$buffers")
    if [ -n "$dry" ]; then
        config=configs/gpt_13m_cpu.json steps=2
        settings=(gradient_accumulation_steps="$1" gradient_clipping=0.0 'vertical_schedule.on_nonfinite="stop"')
        script=(scripts/train.py --deterministic --model gpt_13m --seq 8)
    fi
    if [ -z "$prints" ] && command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used --format=csv -l 1 >"$out/usage.csv" &
        usage=$!
    fi
    local sets=()
    for each in "${settings[@]}"; do sets+=(--set "$each"); done
    run "$python" -m ds_vertical.cli.main ab --config "$config" "${sets[@]}" --steps "$steps" --no-bound --out "$out/ab" \
        -- "${script[@]}"
    local target
    target=benchmarks/gpu/${stage}_$(date +%F).json
    [ -z "$dry" ] || target=$out/record.json
    run "$python" benchmarks/gpu_record.py "$out/ab" "$out/usage.csv" "$target" # utilisation, and the peak over the budget
}

case $stage in
    tests)
        # only these files: others import what a bare machine may not have
        mapfile -t only < <(grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
        only=(-m gpu "${only[@]}")
        [ -z "$dry" ] || only=(--collect-only tests/engine/test_gpu_engine.py)
        workers=() cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # a test is a process or two that set an engine up
        if "$python" -c 'import xdist' 2>/dev/null && [ "$cores" -ge 4 ]; then
            workers=(-n $((cores < 16 ? cores / 2 : 12)) --dist worksteal)
        fi
        # processes that the tests start have the accelerator; pytest's own computes on the CPU
        run env DS_ACCELERATOR=cpu TORCH_CUDA_SANITIZER=1 "$python" -m pytest -v --tb=short --durations=0 -p no:cacheprovider \
            "${workers[@]}" "${only[@]}" ;;
    debug) run "$python" scripts/gpu_waits.py --config configs/gpt_13m_cpu.json --model gpt_13m ;;
    ab4) compare 4 2 24 2560 6912 20 ;;  # 2.1 B parameters
    ab16) compare 16 2 24 2048 5504 16 ;;  # 1.3 B
esac
