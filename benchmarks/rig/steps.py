"""A rank that trains a step whenever it is told to; `benchmarks/twonode.py` launches it on all ranks of both hosts.

    deepspeed --hostfile hostfile benchmarks/rig/steps.py --deepspeed_config JSON --model gpt_13m --tokens 8 --turns FOLDER

Ranks are told by files in a folder that both hosts see, so that none of this crosses the link. A rank begins step N when
`FOLDER/turn.N` is there, and writes `FOLDER/done.N.RANK` when it has taken the step. `FOLDER/end` ends the ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts"), str(Path(__file__).resolve().parents[1])]

POLL_S: Final = 0.005
END: Final = "end"


def turn_path(turns: Path, number: int) -> Path:
    """The file that lets ranks take step `number`."""
    return turns / f"turn.{number}"


def done_path(turns: Path, number: int, rank: int) -> Path:
    """The file in which a rank says that it has taken step `number`, or, with 0, that its model is built."""
    return turns / f"done.{number}.{rank}"


def _say(path: Path, content: object) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content))
    new.rename(path)


def _is_told(turns: Path, number: int) -> bool:
    """Wait until the rank may take step `number`; false where the run ends instead."""
    while not turn_path(turns, number).exists():
        if (turns / END).exists():
            return False
        time.sleep(POLL_S)
    return True


def _batches(rank: int, vocabulary: int, size: tuple[int, int], device: Any) -> Iterator[Any]:
    """Endless random micro-batches of `size` (rows, tokens), different on each rank."""
    import torch
    import train

    for number in itertools.count():
        generator = torch.Generator().manual_seed(1_000_003 * rank + number)
        yield train.to_batch(torch.randint(0, vocabulary, size, generator=generator).numpy(), device)


def _train(options: argparse.Namespace) -> None:
    import model_config
    import torch
    import train
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    import ds_vertical
    from rig import traffic

    rank = int(os.environ["RANK"])
    shape = model_config.resolve(options.model, [], None, options.tokens)
    config = ds_vertical.prepare(str(options.deepspeed_config))
    torch.manual_seed(0)
    zero_init = HfDeepSpeedConfig(config)  # zero.Init is in force while this object lives
    model = train.build_model(shape, config)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    size = engine.train_micro_batch_size_per_gpu(), options.tokens
    batches = _batches(rank, shape.vocab_size, size, engine.device)
    _say(done_path(options.turns, 0, rank), "ready")
    for number in itertools.count(1):
        if not _is_told(options.turns, number):
            break
        start = time.perf_counter()
        loss = engine.train_batch(batches)
        found: dict[str, Any] = {"step_s": time.perf_counter() - start, "loss": float(loss)}
        if (ran := getattr(engine, "ran", None)) is not None:
            found["micro_batches"] = ran.num_micro_batches * (1 if engine.vertical.acco is None else 2)  # of one of two halves
        found["scheduled"] = traffic.scheduled_bytes(engine) if hasattr(engine, "ran") else traffic.stock_bytes(engine)
        _say(done_path(options.turns, number, rank), found)
    engine.destroy()
    del zero_init


def main() -> None:
    """What one rank runs, started by the launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--turns", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    _train(parser.parse_args())


if __name__ == "__main__":
    main()
