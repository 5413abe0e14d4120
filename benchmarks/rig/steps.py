"""A rank that trains a step whenever it is told to; `benchmarks/twonode.py` launches it on all ranks of both hosts.

    deepspeed --hostfile hostfile benchmarks/rig/steps.py --deepspeed_config JSON --model gpt_13m --tokens 8 --turns FOLDER

Ranks are told through named pipes in a folder that both hosts see, so that none of this crosses the link. A rank begins a step
with each line that comes out of `FOLDER/turns.RANK`, and writes `FOLDER/done.N.RANK` when it has taken step N. It ends with the
line "end", or when nobody has the pipe open for writing any more. A rank that waits in a pipe leaves the cores to the ranks of
the arm whose turn it is.
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

TURN: Final = "turn"
END: Final = "end"


def turns_path(turns: Path, rank: int) -> Path:
    """The named pipe that has a line for each step which `rank` is to take."""
    return turns / f"turns.{rank}"


def done_path(turns: Path, number: int, rank: int) -> Path:
    """The file in which a rank says that it has taken step `number`, or, with 0, that its model is built."""
    return turns / f"done.{number}.{rank}"


def _say(path: Path, content: object) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content))
    new.rename(path)


def told(path: Path) -> Iterator[int]:
    """The numbers of steps, each when the rank may take it."""
    with path.open() as lines:
        turns = itertools.takewhile(lambda line: line.strip() == TURN, lines)
        yield from (number for number, _ in enumerate(turns, 1))


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
    for number in told(turns_path(options.turns, rank)):
        start, cores = time.perf_counter(), time.process_time()
        loss = engine.train_batch(batches)
        found: dict[str, Any] = {"step_s": time.perf_counter() - start, "loss": float(loss)}
        found["core_s"] = time.process_time() - cores
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
