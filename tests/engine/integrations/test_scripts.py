"""Scripts as their libraries' documentation writes them, run in both arms: what changes is how they are launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from processes import free_port

SCRIPTS = ROOT / "tests" / "scripts"
# as `python SCRIPT`, with the ops that are compiled already
PLAIN = (
    "import runpy, sys; from ds_vertical.compat.ops import cache; cache.activate(); del sys.argv[0];"
    " sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)
LAUNCHER = ("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
COMMON = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}
HUGGING_FACE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "trainer": HUGGING_FACE,
    "trl_sft": HUGGING_FACE,
    "three_calls": {
        **COMMON,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    },
    "accelerate_loop": {**COMMON, "train_micro_batch_size_per_gpu": 2},
}
TRAINING = """--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --num_train_epochs 1 --max_grad_norm 1.0
 --learning_rate 1e-3 --logging_steps 1 --save_strategy no --report_to none --bf16 true --use_cpu true""".split()


def config_of(script: str, folder: Path, vertical: bool) -> Path:
    """Stock's parameters and optimizer in host memory, or ours on SSD."""
    buffers = {"nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 24, "buffer_size": 2_000_000}
    zero: dict[str, Any] = {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    if vertical:
        zero |= {
            "offload_param": {"device": "nvme", **buffers},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
            "vertical_schedule": {},
        }
    else:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**CONFIGS[script], "zero_optimization": zero}))
    return path


def launch(script: str, folder: Path, vertical: bool, *arguments: str) -> str:
    """What the script printed."""
    folder.mkdir()
    config = str(config_of(script, folder, vertical))
    given = {"three_calls": ["--deepspeed", "--deepspeed_config", config], "accelerate_loop": ["--deepspeed_config", config]}
    port = str(free_port())
    how = [*LAUNCHER, "--master_port", port, "--module", "ds_vertical.run"] if vertical else ["-c", PLAIN]
    command = [sys.executable, *how, str(SCRIPTS / f"{script}.py")]
    command += [*given.get(script, ["--deepspeed", config, *TRAINING]), "--output_dir", str(folder / "out"), *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | ({} if vertical else ALONE | {"MASTER_PORT": port})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    if vertical:
        assert "vertical schedule ACTIVE" in done.stdout + done.stderr
    return done.stdout


def numbers(printed: str) -> list[str]:
    """Losses, norms and learning rates, as the script printed them."""
    return re.findall(r"'(?:loss|grad_norm|learning_rate|eval_loss)': '[^']+'|^epoch \d+ loss \S+", printed, re.MULTILINE)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that `save_model` has written."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("out/*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param("trainer", ["--eval_strategy", "steps", "--eval_steps", "5"], id="trainer"),
        pytest.param("trl_sft", [], id="trl_sft", marks=pytest.mark.slow),
        pytest.param("trl_sft", ["--lora", "true"], id="trl_sft with LoRA", marks=pytest.mark.slow),
    ],
)
def test_a_trainers_script_has_stocks_numbers_and_weights(script: str, arguments: list[str], tmp_path: Path) -> None:
    printed = {vertical: launch(script, tmp_path / str(vertical), vertical, *arguments) for vertical in (False, True)}
    assert numbers(printed[True]) == numbers(printed[False]) and len(numbers(printed[False])) > 10
    stock, ours = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert stock and stock.keys() == ours.keys()
    assert [name for name, tensor in stock.items() if not torch.equal(tensor, ours[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", ["three_calls", "accelerate_loop"])
def test_a_loops_script_prints_stocks_losses(script: str, tmp_path: Path) -> None:
    printed = {vertical: launch(script, tmp_path / str(vertical), vertical) for vertical in (False, True)}
    assert numbers(printed[True]) == numbers(printed[False]) and len(numbers(printed[False])) >= 6


LATE = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = json.loads(open(sys.argv[1]).read())
sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 2816, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
common = {"max_steps": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_grad_norm": 1.0}
args = TrainingArguments(
    "out", deepspeed=config, use_cpu=True, bf16=True, logging_steps=1, report_to=[], save_strategy="no", **common
)
print("imported ahead of the Trainer:", "deepspeed" in sys.modules)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(16 * 12).view(16, 12) % 128]
Trainer(model=model, args=args, train_dataset=rows).train()
"""


@pytest.mark.slow
def test_a_trainer_that_is_the_first_to_import_deepspeed_hands_over_whole_steps(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    config = config_of("trainer", tmp_path, True)
    command = [sys.executable, "-m", "ds_vertical.run", "late.py", str(config)]
    env = os.environ | ALONE | {"MASTER_PORT": str(free_port())}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    assert "imported ahead of the Trainer: False" in printed
    assert "vertical schedule ACTIVE: bridge Trainer" in printed and "bridge three calls" not in printed
    assert len(re.findall("'grad_norm'", printed)) == 2
