#!/usr/bin/env bash
# What a machine with an NVIDIA GPU is to show, in stages of at most 10 minutes each; a bare one without network will do.
#   bash scripts/gpu_check.sh --stage tests|debug|ab4|ab16 [--wheels DIR] [--out DIR] [--print] [--dry-run]
# tests: the tests marked gpu, under torch's CUDA sanitizer. debug: a step in which each wait for the device is named by its
# line. ab4, ab16: a Llama against stock at 2048 tokens and 4 or 16 micro-batches, with the GPU's utilisation beside it; the
# result goes to benchmarks/gpu. --wheels: install the *.whl of DIR first, from nowhere else. --print: only say what would run.
# --dry-run: the same commands with a small model on the CPU.
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
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} DS_ACCELERATOR=cuda
[ -z "$dry" ] || export DS_ACCELERATOR=cpu

run() { # one command, within what is left of the stage's time
    printf '%s\n' "$*"
    [ -z "$prints" ] || return 0
    if [ "$SECONDS" -ge "$limit_s" ]; then # 0 would be no limit to timeout
        echo "gpu_check.sh: the stage's $limit_s seconds are over" >&2
        exit 124
    fi
    timeout $((limit_s - SECONDS)) "$@"
}

[ -z "$wheels" ] || run "$python" -m pip install --no-index --no-deps "$wheels"/*.whl
[ -n "$prints" ] || mkdir -p "$out"

# both arms: no clipping and on_nonfinite "stop", so that 64 GiB of disk hold one generation of files
compare() { # micro-batches, layers, width, inner width, heads
    local config=configs/llama_3_8b_gpu.json steps=3 usage=
    local settings=(gradient_accumulation_steps="$1" gradient_clipping=0.0 'vertical_schedule.on_nonfinite="stop"')
    local script=(scripts/train.py --model llama --seq 2048 --dims num_hidden_layers="$2" hidden_size="$3"
        intermediate_size="$4" num_attention_heads="$5" num_key_value_heads="$5" vocab_size=32000)
    local buffers=$((32000 * $3))
    settings+=("zero_optimization.offload_param.buffer_size=$buffers" "zero_optimization.reduce_bucket_size=$buffers")
    if [ -n "$dry" ]; then
        config=configs/gpt_13m_cpu.json steps=2
        settings=(gradient_accumulation_steps="$1" gradient_clipping=0.0 'vertical_schedule.on_nonfinite="stop"')
        script=(scripts/train.py --model gpt_13m --seq 8)
    elif [ -z "$prints" ]; then
        nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used --format=csv -l 1 >"$out/usage.csv" &
        usage=$!
        # shellcheck disable=SC2064  # the number of now
        trap "kill $usage 2>/dev/null || true" EXIT
    fi
    local sets=()
    for each in "${settings[@]}"; do sets+=(--set "$each"); done
    run "$python" -m ds_vertical.cli.main ab --config "$config" "${sets[@]}" --steps "$steps" --no-bound --out "$out/ab" \
        -- "${script[@]}"
    [ -z "$usage" ] || kill "$usage" 2>/dev/null || true
    [ -n "$dry" ] || run "$python" benchmarks/portable.py "$out/ab/ab.json" "benchmarks/gpu/${stage}_$(date +%F).json"
}

case $stage in
    tests)
        only=(-m gpu tests)
        [ -z "$dry" ] || only=(--collect-only tests/engine/test_gpu_engine.py)
        # processes that the tests start have the accelerator; pytest's own computes on the CPU
        run env DS_ACCELERATOR=cpu TORCH_CUDA_SANITIZER=1 "$python" -m pytest -q -p no:cacheprovider "${only[@]}" ;;
    debug) run "$python" scripts/gpu_waits.py --config configs/gpt_13m_cpu.json --model gpt_13m ;;
    ab4) compare 4 32 2560 6912 20 ;;  # 2.7 B parameters
    ab16) compare 16 24 2048 5504 16 ;;  # 1.3 B
esac
