"""Seconds of a model's pieces on this machine, as one rank has them, or each of several that compute on the same cores.

[Note: ranks side by side] Ranks that share a host's cores share its caches and the way to its memory, too, and each has a team
of its part of the cores. How long a piece takes then is measured: as many processes time it at once as there are ranks, but
twice as many as cores at most. Of more ranks each waits in proportion.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Final

from ds_vertical.cli.bench.machine_info import accelerator
from ds_vertical.cli.common import JsonObject
from ds_vertical.errors import ConfigError
from ds_vertical.planner.model_shape import ModelSpec, Seconds

_ROUNDS: Final = 3
_MARK: Final = "ds_vertical pieces: "  # ahead of what a process says: libraries write to its output, too
_READY: Final = "ready"
_SAVED: Final = "_saved_s"  # behind a point's name


def time_pieces(spec: ModelSpec, fields: JsonObject, size: int, num_ranks: int = 1) -> Seconds:
    """Seconds for a micro-batch of `size` sequences on each of `num_ranks` ranks, which share the cores where they compute on
    these; see [Note: ranks side by side]. Raises ConfigError where a block cannot be timed."""
    counts = {menu.kind: menu.num_blocks for menu in spec.menus}
    order = {"fields": fields, "tokens": size * spec.sequence_length, "sequences": size, "dtype": spec.dtype}
    cores = len(os.sched_getaffinity(0))
    count = min(num_ranks, 2 * cores) if accelerator() == "cpu" else 1
    try:
        order |= _short_model(order, list(counts), count)
        found = [_timed(order)] if count == 1 else _timed_together(order | {"threads": max(1, cores // num_ranks)}, count)
    except RuntimeError as error:  # of torch: out of memory, as a rule
        advice = "write a smaller --micro-batch-size or --sequence-length, or name a machine with --machine"
        what = f"a block of {spec.name} with micro-batches of {size} cannot be timed here"
        raise ConfigError(f"{what} ({str(error).splitlines()[0]}); {advice}") from error
    shared = [kind for kind in found[0]["kinds"] if all(kind in each["kinds"] for each in found)]
    means = {kind: _means([each["kinds"][kind] for each in found]) for kind in shared}
    seconds = _seconds(_means([each["rates"] for each in found]), means, counts)
    return seconds if count == 1 else seconds.times(num_ranks / count)


@contextmanager
def _written(fields: JsonObject) -> Iterator[Path]:
    """A file with a model's configuration."""
    with tempfile.TemporaryDirectory(prefix="ds_vertical.plan.") as folder:
        model = Path(folder, "config.json")
        model.write_text(json.dumps(fields))
        yield model


def _short_model(order: JsonObject, kinds: Sequence[str], count: int) -> JsonObject:
    """The part of the order that says how many layers each of `count` processes builds, which is the same in all of them."""
    from ds_vertical.cli.bench.block_timer import short_model

    with _written(order["fields"]) as model:
        return asdict(short_model(kinds, model, order["dtype"], accelerator(), count))


def _timed(order: JsonObject, told: IO[str] | None = None) -> JsonObject:
    """What `BlockTimer` finds in this process, once `told` has a line."""
    from ds_vertical.cli.bench.block_timer import BlockBatch, BlockTimer, ShortModel

    with _written(order["fields"]) as model:
        batch = BlockBatch(order["tokens"], order["sequences"], order["dtype"])
        short = ShortModel(order["kinds"], order["num_layers"])
        timer = BlockTimer(model, batch, accelerator(), zero_linear=True, short=short)
        if told is not None:
            _say(_READY)
            told.readline()
        rates = timer.rates(_ROUNDS)
        first, *others = timer.firsts.items()
        further = {kind: timer.rates_of(number, _ROUNDS) for kind, number in others}
        return {"rates": rates, "kinds": {first[0]: rates, **further}}


def _means(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of several processes, by name; of those names that all have."""
    known = [key for key in rates[0] if all(key in each for each in rates)]
    return {key: fmean(each[key] for each in rates) for key in known}


def _seconds(rates: Mapping[str, float], kinds: Mapping[str, Mapping[str, float]], counts: Mapping[str, int]) -> Seconds:
    """`kinds`: the rates of each kind of block that was timed, of which the model has `counts`; a block that was not timed is
    taken to be their mean. `rates`: of what stands around the blocks."""
    total = sum(counts.get(kind, 1) for kind in kinds)

    def mean(key: str) -> float:
        return sum(counts.get(kind, 1) * max(0.0, own[key]) for kind, own in kinds.items()) / total

    forward, backward = mean("layer_forward_s"), mean("layer_backward_s")
    saved = {
        kind: {key.removesuffix(_SAVED): value / forward for key, value in own.items() if key.endswith(_SAVED)}
        for kind, own in kinds.items()
    }
    outside = rates["pre_forward_s"], rates["pre_backward_s"], rates["head_s"]
    return Seconds(forward, backward, *outside, saved_shares=saved)


# ---- several processes


def _timed_together(order: JsonObject, count: int) -> list[JsonObject]:
    """What `count` processes find that begin together. Raises RuntimeError where one fails."""
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": str(order["threads"])}
    with ExitStack() as stack:
        timers = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
            for _ in range(count)
        ]
        for timer in timers:
            stack.callback(timer.kill)
            _tell(timer, json.dumps(order))
        for timer in timers:
            _said(timer)
        for timer in timers:
            _tell(timer, "go")
        return [json.loads(_said(timer)) for timer in timers]


def _tell(timer: subprocess.Popen[str], line: str) -> None:
    assert timer.stdin is not None
    timer.stdin.write(f"{line}\n")
    timer.stdin.flush()


def _said(timer: subprocess.Popen[str]) -> str:
    """What a process says next. Raises RuntimeError where it ends instead."""
    assert timer.stdout is not None
    for line in timer.stdout:
        if line.startswith(_MARK):
            return line.removeprefix(_MARK)
    raise RuntimeError(f"a process that times the model ended with status {timer.wait()}")


def _say(text: str) -> None:
    print(f"\n{_MARK}{text}", flush=True)


def main() -> None:
    """One of the processes."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    _say(json.dumps(_timed(order, sys.stdin)))


if __name__ == "__main__":
    main()
