"""`ds-vertical ab` with scripts that know nothing of ds_vertical: the three calls, Accelerate, Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from library_scripts import SCRIPTS, TRAINING, config_of

TWO_CALLS = """
class Contrastive(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        one, other = model(**inputs), model(**inputs)
        noise = torch.rand(())
        return one.loss + other.loss + noise * (one.logits - other.logits).float().square().mean()


trainer = Contrastive("""


def contrastive(folder: Path) -> Path:
    """The Trainer's script with dropout, two calls of the model in a micro-step, and random numbers of its own."""
    written = (SCRIPTS / "trainer.py").read_text()
    for old, new in (("trainer = Trainer(", TWO_CALLS), ("vocab_size=128", "vocab_size=128, attention_dropout=0.1")):
        assert old in written
        written = written.replace(old, new)
    path = folder / "contrastive.py"
    path.write_text(written)
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["three_calls", "accelerate_loop", "lora", "contrastive"])
def test_a_script_of_a_library_is_compared(tmp_path: Path, script: str) -> None:
    """Both arms on SSD, from one JSON, each with one engine that has taken all the steps that were asked for."""
    config = str(config_of("trainer" if script == "contrastive" else script, tmp_path, True))
    given = {"three_calls": ["--deepspeed"], "accelerate_loop": []}.get(script, ["--deepspeed", config, *TRAINING])
    path = contrastive(tmp_path) if script == "contrastive" else SCRIPTS / f"{script}.py"
    own = ["--config", config, "--out", str(tmp_path / "ab"), "--steps", "4", "--no-bound"]
    own += ["--no-local-rank"] if script == "accelerate_loop" else []
    command = [sys.executable, "-m", "ds_vertical.cli.main", "ab", *own, "--", str(path), *given]
    done = subprocess.run([*command, "--output_dir", str(tmp_path / "out")], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "ab" / "ab.json").read_text())
    assert report["losses_equal"] is True and report["speedup"] > 0, done.stdout
    assert list(report["arms"]) == ["stock", "vertical"]
    for arm, engine in (("stock", "DeepSpeedEngine"), ("vertical", "VerticalEngine")):
        lines = (tmp_path / "ab" / f"{arm}.0.metrics" / "rank0.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["engine"] for record in records] == [engine] * 4
        sizes = [4, 4, 3, 4] if script == "accelerate_loop" else [4] * 4  # of its windows
        assert [len(record["losses"]) for record in records] == sizes
        assert all(record["tokens"] > 0 for record in records)
