"""Scripts as their libraries' documentation writes them, run in both arms: what changes is how they are launched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import forks
import pytest
import torch
from library_scripts import SCRIPTS, TRAINING, config_of, pretrained_model
from processes import free_port

import ds_vertical

# as `python SCRIPT`, with the ops that are compiled already
PLAIN = (
    "import runpy, sys; from ds_vertical.compat.ops import cache; cache.activate(); del sys.argv[0];"
    " sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)
PRETRAINED = "a folder that `save_pretrained` has written"
LAUNCHER = ("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1")
EVALUATING = ["--eval_strategy", "steps", "--eval_steps", "2"]
pytestmark = pytest.mark.timeout(620)  # two arms of 280 s at most
Start = Callable[[Path, list[str], Mapping[str, str], float], subprocess.CompletedProcess[str]]
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def launch(script: str, folder: Path, vertical: bool, *arguments: str, launcher: bool = True) -> str:
    """What the script printed. Stock's arm is a fork; ours starts by DeepSpeed's launcher, or alone, as a user's does."""
    folder.mkdir()
    config = str(config_of(script, folder, vertical))
    given = {"three_calls": ["--deepspeed", "--deepspeed_config", config], "accelerate_loop": ["--deepspeed_config", config]}
    port = str(free_port())
    options = ["--no_local_rank"] if script == "accelerate_loop" else []  # which takes none
    launcher = launcher and vertical
    alone = ["-m", "ds_vertical.run"] if vertical else ["-c", PLAIN]
    how = [*LAUNCHER, "--master_port", port, *options, "--module", "ds_vertical.run"] if launcher else alone
    command = [sys.executable, *how, str(SCRIPTS / f"{script}.py")]
    command += [*given.get(script, ["--deepspeed", config, *TRAINING]), "--output_dir", str(folder / "out"), *arguments]
    bridge = "three calls" if script in given else "Trainer"
    start = subprocess_in if vertical else forks.run
    return ran(command, folder, bridge if vertical else None, {} if launcher else ALONE | {"MASTER_PORT": port}, start)


def subprocess_in(folder: Path, command: list[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def ran(
    command: list[str], folder: Path, bridge: str | None, variables: Mapping[str, str], start: Start = subprocess_in
) -> str:
    """What a command printed that ends well, and trains through this bridge; None: in DeepSpeed's own order."""
    done = start(folder, command, os.environ | {"HF_HUB_OFFLINE": "1"} | variables, 280)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    assert ("vertical schedule ACTIVE" in printed) == (bridge is not None)
    told = re.findall(r"ACTIVE: bridge (.+)", printed)
    assert told == ([] if bridge is None else [f"{bridge}, 3 layers, M = 4 micro-batches a step"])
    return done.stdout


def numbers(printed: str) -> list[str]:
    """Losses, norms and learning rates, as the script printed them."""
    return re.findall(r"'(?:loss|grad_norm|learning_rate|eval_loss)': '[^']+'|^epoch \d+ loss \S+", printed, re.MULTILINE)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that `save_model` has written."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("out/*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("script", "arguments", "launcher"),
    [
        pytest.param("trainer", EVALUATING, False, id="trainer"),  # the launcher's two processes cost as much as the script's
        pytest.param("trainer", EVALUATING, True, id="trainer by the launcher", marks=pytest.mark.slow),
        pytest.param("trainer", ["--model_name_or_path", PRETRAINED], True, id="trainer, pretrained", marks=pytest.mark.slow),
        pytest.param("trl_sft", [], False, id="trl_sft", marks=pytest.mark.slow),
        pytest.param("trl_sft", ["--lora", "true"], False, id="trl_sft with LoRA"),  # TRL and PEFT in one
        pytest.param("trl_sft", ["--lora", "true"], True, id="trl_sft with LoRA by the launcher", marks=pytest.mark.slow),
        pytest.param("lora", [], False, id="lora", marks=pytest.mark.slow),
        pytest.param("lora", [], True, id="lora by the launcher", marks=pytest.mark.slow),
    ],
)
def test_a_trainers_script_has_stocks_numbers_and_weights(
    script: str, arguments: list[str], launcher: bool, tmp_path: Path
) -> None:
    if PRETRAINED in arguments:
        arguments = [str(pretrained_model(tmp_path / "model")) if each == PRETRAINED else each for each in arguments]
    printed = {}
    for vertical in (False, True):
        printed[vertical] = launch(script, tmp_path / str(vertical), vertical, *arguments, launcher=launcher)
    assert numbers(printed[True]) == numbers(printed[False]) and len(numbers(printed[False])) > 10
    stock, ours = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert stock and stock.keys() == ours.keys()
    assert [name for name, tensor in stock.items() if not torch.equal(tensor, ours[name])] == []


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of the checkpoint that the script has saved."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    assert ds_vertical.VerticalEngine  # once it is there, DeepSpeed's function reads our checkpoints, too
    found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder / "out"))
    return found


@pytest.mark.parametrize("launcher", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["three_calls", "accelerate_loop"])
def test_a_loops_script_has_stocks_losses_and_weights(script: str, launcher: bool, tmp_path: Path) -> None:
    printed = {vertical: launch(script, tmp_path / str(vertical), vertical, launcher=launcher) for vertical in (False, True)}
    assert numbers(printed[True]) == numbers(printed[False]) and len(numbers(printed[False])) >= 6
    stock, ours = masters(tmp_path / "False"), masters(tmp_path / "True")
    assert stock and stock.keys() == ours.keys()
    assert [name for name, tensor in stock.items() if not torch.equal(tensor, ours[name])] == []


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


@pytest.mark.slow
def test_a_script_whose_first_line_patches_is_launched_plainly(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ds_vertical\n\nds_vertical.patch()\n" + (SCRIPTS / "trainer.py").read_text())
    printed = {}
    for vertical in (False, True):
        folder = tmp_path / str(vertical)
        folder.mkdir()
        own = ["-c", PLAIN, str(script if vertical else SCRIPTS / "trainer.py")]
        command = [sys.executable, *own, "--deepspeed", str(config_of("trainer", folder, vertical)), *TRAINING]
        port, bridge = {"MASTER_PORT": str(free_port())}, "Trainer" if vertical else None
        printed[vertical] = ran([*command, "--output_dir", str(folder / "out")], folder, bridge, ALONE | port)
    assert numbers(printed[True]) == numbers(printed[False]) and len(numbers(printed[False])) > 10
    stock, ours = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert stock and [name for name, tensor in stock.items() if not torch.equal(tensor, ours[name])] == []


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {config}
  zero3_init_flag: true
machine_rank: 0
main_process_port: {port}
num_machines: 1
num_processes: 1
use_cpu: false
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerates_own_launcher_prints_stocks_losses(tmp_path: Path) -> None:
    """With the DeepSpeed JSON in Accelerate's configuration, and none in the script's arguments."""
    printed = {}
    for vertical in (False, True):
        folder = tmp_path / str(vertical)
        folder.mkdir()
        own = folder / "accelerate.yaml"
        own.write_text(ACCELERATE.format(config=config_of("accelerate_loop", folder, vertical), port=free_port()))
        plain = folder / "plain.py"
        plain.write_text(PLAIN)
        how = ["-m", "ds_vertical.run"] if vertical else [str(plain)]
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(own), *how]
        command += [str(SCRIPTS / "accelerate_loop.py"), "--output_dir", str(folder / "out")]
        printed[vertical] = ran(command, folder, "three calls" if vertical else None, {})
    assert numbers(printed[True]) == numbers(printed[False]) and len(numbers(printed[False])) >= 6
