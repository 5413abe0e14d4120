#!/usr/bin/env bash
# Set up, then train a small GPT on real text twice from one JSON, with parameters and optimizer state on SSD: stock
# ZeRO-Infinity, then layer-major. Ends in the comparison; runs/demo keeps the JSONs, logs, metrics and ab.json.
#   bash scripts/demo.sh [STEPS]     (default 30)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
steps=${1:-30}
bash scripts/setup.sh
nvidia-smi -L >/dev/null 2>&1 || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
exec .venv/bin/ds-vertical ab --config configs/gpt_13m_cpu.json --steps "$steps" --out runs/demo -- \
    scripts/train.py --model gpt_13m --steps "$steps" --eval-every 10
