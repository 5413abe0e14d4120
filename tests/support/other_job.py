"""A job that trains on an nvme_path beside a test, one line at a time; see `Other`.

    python tests/support/other_job.py JOB.json

The job: {"config", "vertical", "num_layers", "seed", "out": file for (losses, weights, state)}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

MARK = "@ "  # before what the job says; DeepSpeed prints, too
NUM_STEPS = 2
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")  # variables for one process only


class Other:
    """Starts the job, hears it say "built", "stepped" (twice) and "finished", lets it go on after each, kills it at the end."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self._errors, file = folder / "errors", folder / "job.json"
        file.write_text(json.dumps(job))
        env = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        pipe = subprocess.PIPE
        with open(self._errors, "w") as errors:
            command = [sys.executable, __file__, str(file)]
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env)

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()

    def heard(self, word: str) -> None:
        assert self.process.stdout is not None
        said = next((line for line in self.process.stdout if line.startswith(MARK)), "")
        assert said == f"{MARK}{word}\n", self._errors.read_text()[-3000:]

    def proceed(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def _say(word: str) -> None:
    print(f"\n{MARK}{word}", flush=True)
    sys.stdin.readline()


def main(file: str) -> None:
    # run as a script, so this folder is first on the path
    import harness
    import torch
    from models import MixerModel, token_batches

    job = json.loads(Path(file).read_text())
    os.umask(0)  # forbids nobody anything: what is private is made so
    build = partial(MixerModel, job["num_layers"], 512)
    engine, model = harness.build_engine(job["config"], build, vertical=job["vertical"])
    _say("built")
    losses = []
    for step in token_batches(NUM_STEPS, 2, job["seed"]):
        losses.append(engine.train_batch(iter(step)).item())
        _say("stepped")
    torch.save((losses, harness.read_weights(model), harness.read_state(engine, model)), job["out"])
    _say("finished")


if __name__ == "__main__":
    main(sys.argv[1])
