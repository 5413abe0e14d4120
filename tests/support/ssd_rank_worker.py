"""One of two ranks that train on one folder and on two, save, and resume on the other number of folders.

python tests/support/ssd_rank_worker.py FOLDER      # with the launcher's variables set; writes FOLDER/rank<R>.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import torch
from harness import contents, digest, running
from models import MixerModel
from resuming import BATCHES, config_in
from torch import nn


def build() -> nn.Module:
    """Half of each matrix is 1 MiB."""
    return MixerModel(2, 768, dropout=0.1)


def on(folder: Path, count: int) -> dict[str, Any]:
    """A configuration with its files in so many folders."""
    config = config_in(folder / "ssd0")
    paths = [str(folder / f"ssd{number}") for number in range(count)]
    return config | {"vertical_schedule": config["vertical_schedule"] | {"nvme_paths": paths}}


def main(folder: Path) -> None:
    """Losses and a digest of weights and state of each run, and how many files lie on each of two folders."""
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for count in (1, 2):
        place, saved = folder / f"on{count}", folder / f"saved{count}"
        with running(on(place, count), build, vertical=True) as (engine, model):
            losses = [engine.train_batch(iter(BATCHES[4 * rank + step])).item() for step in range(2)]
            engine.save_checkpoint(str(saved), tag="two")
            losses += [engine.train_batch(iter(BATCHES[4 * rank + step])).item() for step in range(2, 4)]
            found[f"on {count}"] = losses, digest(contents(engine, model))
            files = [path for path in place.rglob(f"**/rank{rank}/**/*.ssd?")]
            found[f"files on {count}"] = [
                len([path for path in files if path.suffix == f".ssd{number}"]) for number in range(2)
            ]
        with running(on(folder / f"from{count}", 3 - count), build, vertical=True) as (engine, model):
            torch.manual_seed(999)
            engine.load_checkpoint(str(saved), tag="two")
            again = [engine.train_batch(iter(BATCHES[4 * rank + step])).item() for step in range(2, 4)]
            found[f"resumed from {count}"] = [*losses[:2], *again], digest(contents(engine, model))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
