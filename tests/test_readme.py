"""README's script, JSON and table of keys are those of the package: the script runs as it stands, in both arms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_vertical.config import VerticalConfig, load_section
from ds_vertical.crosscheck import check

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
# What a user has of their own: a model, data, an end.
OWN = """
import torch
_ids = torch.arange(16).view(1, 16)
micro_batches = iter([{{"input_ids": _ids, "labels": _ids}}] * {count})
_train = engine.train_batch
engine.train_batch = lambda data: print("LOSS", float(_train(data))) or 0
print("ENGINE", type(engine).__name__)
"""


def block(language: str, start: str) -> str:
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", TEXT, re.S) if text.startswith(start))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads(block("json", "{").replace('"/ssd"', json.dumps(str(folder))))


def test_the_json_is_accepted_without_a_warning(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    section = load_section(config)
    assert section is not None and section.enabled and check(config, section) == []


def test_every_key_stands_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", TEXT[TEXT.index("### The section") : TEXT.index("### Memory")], re.M))
    assert set(rows) == set(VerticalConfig.model_fields)
    for name, field in VerticalConfig.model_fields.items():
        if isinstance(field.default, bool | str) or field.default is None:
            assert rows[name].startswith(f"`{json.dumps(field.default)}`"), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("enabled", [True, False])
def test_the_script_runs_as_it_stands(tmp_path: Path, enabled: bool) -> None:
    steps, config = 2, config_of(tmp_path / "ssd")
    (tmp_path / "ssd").mkdir()
    (tmp_path / "my_model").mkdir()
    (tmp_path / "my_model" / "config.json").write_text((ROOT / "configs" / "models" / "gpt_13m.json").read_text())
    config["vertical_schedule"] = {} if enabled else {"enabled": False}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    own = OWN.format(count=steps * config["gradient_accumulation_steps"])
    script = block("python", "import argparse")
    (tmp_path / "train.py").write_text(script.replace("\nfor step in", f"{own}\nfor step in"))
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "train.py", "--deepspeed_config", "ds_config.json"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(launcher, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"ENGINE {'VerticalEngine' if enabled else 'DeepSpeedEngine'}" in done.stdout
    losses = [float(loss) for loss in re.findall(r"^LOSS (\S+)", done.stdout, re.M)]
    assert len(losses) == steps and losses[1] < losses[0]
    assert list((tmp_path / "ssd").iterdir()) == []
    if enabled:
        assert (tmp_path / "out" / "config.json").is_file() and any((tmp_path / "out").glob("*.bin"))
