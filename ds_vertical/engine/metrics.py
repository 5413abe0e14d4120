"""What one training step cost: seconds, SSD bytes, peak memory and losses, one JSON line per step.

`train_batch` writes the lines in both arms, so that any user script can be compared; `ds_vertical.cli.bench.ab` reads them.
Two environment variables switch it on: `DS_VERTICAL_METRICS` (a folder) and `DS_VERTICAL_STEPS` (stop after N steps). A third
one, `DS_VERTICAL_GAUGE`, has the host's speed measured between two steps.

[Note: host speed] On a shared machine the same work takes half as long again some minutes later, so rates that were measured
ahead of a run are not the run's. `ds-vertical limits` times the passes of a layer of the run's model, and `ds-vertical ab` does
so between any two steps of the run. No other work would do: what is bound by memory, by a cache or by arithmetic is slowed by
different neighbours. It is done by a process of its own (`host_speed_server`), whose memory is not the run's, while the
training process is stopped (SIGSTOP), lest its transfers go on for nothing meanwhile. Both arms are stopped alike, so that
neither has a rest that the other has not.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ds_vertical.io.runs.this_host import host_id

METRICS_VARIABLE = "DS_VERTICAL_METRICS"
STEPS_VARIABLE = "DS_VERTICAL_STEPS"


def are_recorded() -> bool:
    """Whether `ds-vertical ab` wants a record of each step of this process."""
    return bool(os.environ.get(METRICS_VARIABLE))


@dataclass(frozen=True)
class DeviceUse:
    """What a step has to say of its device. `peak_bytes`: the most that tensors have taken so far of memory of its own (0: it
    has none). `repeatable`: whether its kernels give the same bits each time. The host's do; a GPU's may add in another order,
    unless the script has called torch.use_deterministic_algorithms."""

    peak_bytes: int = 0
    repeatable: bool = True


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    step counts from 1. read_bytes and write_bytes are what this process moved to and from block devices during the
    step; peak_host_bytes is the largest resident set so far. peak_device_bytes and repeatable: see `DeviceUse`. loss is
    the mean of losses (one per micro-batch).
    tied says whether the model shares a weight between modules (it decides how equal two arms must be); None: unknown.
    host is the name of the rank's host, host_id what no other host has; empty in records of earlier versions.
    """

    step: int
    engine: str
    step_s: float
    tokens: int
    read_bytes: int
    write_bytes: int
    peak_host_bytes: int
    loss: float
    losses: tuple[float, ...]
    tied: bool | None = None
    host: str = ""
    host_id: str = ""
    peak_device_bytes: int = 0
    repeatable: bool = True

    def to_json(self) -> str:
        """One line of strict JSON; a loss that is not finite is written as a string, which `from_json` reads back."""
        fields: dict[str, Any] = asdict(self)
        fields["loss"] = encode_float(self.loss)
        fields["losses"] = [encode_float(loss) for loss in self.losses]
        return json.dumps(fields, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Inverse of `to_json`. Raises ValueError or TypeError on a line that it did not write."""
        fields: dict[str, Any] = json.loads(line)
        fields["loss"] = float(fields["loss"])
        fields["losses"] = tuple(float(loss) for loss in fields["losses"])
        return cls(**fields)


def encode_float(value: float) -> float | str:
    """The value, or its name ('nan', 'inf', '-inf') where JSON has no number for it."""
    return value if math.isfinite(value) else str(value)


class StepRecorder:
    """Appends one `StepRecord` per step to `folder/rank<r>.jsonl` and keeps the budget of steps."""

    def __init__(self, folder: Path, rank: int, max_steps: int | None) -> None:
        """Claims the rank's file. Raises FileExistsError if another engine or an earlier run has written it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        path = folder / f"rank{rank}.jsonl"
        try:
            self._file = path.open("x", encoding="ascii", buffering=1)
        except FileExistsError as error:
            raise FileExistsError(
                f"{METRICS_VARIABLE}: {path} exists already. One folder takes one engine of one run: "
                f"name a fresh folder, or remove this one."
            ) from error
        self._max_steps = max_steps
        self._num_steps = 0
        self._start: tuple[float, int, int] | None = None

    @classmethod
    def from_environment(cls, rank: int, environment: Mapping[str, str] = os.environ) -> StepRecorder | None:
        """The recorder that the environment asks for, or None. Raises ValueError for variables that make no sense."""
        folder = environment.get(METRICS_VARIABLE, "")
        steps = environment.get(STEPS_VARIABLE, "")
        if not folder:
            if steps:
                raise ValueError(f"{STEPS_VARIABLE}={steps} needs {METRICS_VARIABLE}=FOLDER beside it")
            return None
        if steps and not (steps.isascii() and steps.isdigit() and int(steps) > 0):
            raise ValueError(f"{STEPS_VARIABLE}={steps!r}: write a whole number of steps, 1 or more")
        return cls(Path(folder), rank, int(steps) if steps else None)

    def check_budget(self) -> None:
        """Raises StopIteration once the budgeted steps are recorded; call it before a step touches anything."""
        if self._max_steps is not None and self._num_steps >= self._max_steps:
            raise StopIteration(
                f"ds-vertical ab asked for {self._max_steps} steps, which are done: let the script end its loop at"
                " StopIteration, as when its data ends"
            )

    def end_at_budget(self) -> None:
        """As `check_budget`, for loops that know nothing of it: ends the process with status 0, as `sys.exit(0)` in the script
        would. Raises SystemExit."""
        try:
            self.check_budget()
        except StopIteration:
            raise SystemExit(0) from None

    def begin(self) -> None:
        """Starts the clock and the byte counters of a step; a step that failed half-way is thereby forgotten."""
        read_bytes, write_bytes = process_io_bytes()
        self._start = (time.perf_counter(), read_bytes, write_bytes)

    def end(
        self, engine: str, losses: Sequence[float], tokens: int, tied: bool | None = None, device: DeviceUse = DeviceUse()
    ) -> None:
        """Records the step since `begin`: engine's class name, one loss per micro-batch, tokens of this rank.

        tied: whether the model shares a weight between modules, where the engine knows.
        Raises RuntimeError without a `begin`, ValueError without a loss.
        """
        if self._start is None:
            raise RuntimeError("StepRecorder.end() without begin()")
        if not losses:
            raise ValueError("a recorded step needs the loss of at least one micro-batch")
        start_s, start_read, start_write = self._start
        step_s = time.perf_counter() - start_s
        read_bytes, write_bytes = process_io_bytes()
        self._start = None
        self._num_steps += 1
        values = tuple(float(loss) for loss in losses)
        record = StepRecord(
            step=self._num_steps,
            engine=engine,
            step_s=step_s,
            tokens=tokens,
            read_bytes=read_bytes - start_read,
            write_bytes=write_bytes - start_write,
            peak_host_bytes=peak_host_bytes(),
            loss=sum(values) / len(values),
            losses=values,
            tied=tied,
            host=socket.gethostname(),
            host_id=host_id(),
            peak_device_bytes=device.peak_bytes,
            repeatable=device.repeatable,
        )
        self._file.write(record.to_json() + "\n")


def process_io_bytes() -> tuple[int, int]:
    """(read, written) bytes this process has moved to and from block devices since it started."""
    fields = _proc_fields(Path("/proc/self/io"))
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def peak_host_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    return 1024 * int(_proc_fields(Path("/proc/self/status"))["VmHWM"].removesuffix("kB"))


def _proc_fields(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def read_records(folder: Path) -> dict[int, list[StepRecord]]:
    """All records of a run: {rank: records in step order}. Raises ValueError if there are none or a line is broken."""
    ranks: dict[int, list[StepRecord]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        try:
            ranks[rank] = [StepRecord.from_json(line) for line in path.read_text(encoding="ascii").splitlines()]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: a line is not a step record: {error}") from error
    if not any(ranks.values()):
        raise ValueError(f"{folder}: no step was recorded")
    return ranks


VARIABLE = "DS_VERTICAL_GAUGE"  # path of the socket of the process that measures


def measure_between_steps(model: Mapping[str, Any] | None, batch: Mapping[str, Any], threads: int) -> float | None:
    """Seconds of a block's forward and backward for one micro-batch now, measured while this process is stopped; None where
    nobody has asked for it, or answers. `model`: its Hugging Face configuration, None if it has none; `batch`: the fields of a
    `block_timer.Batch`."""
    path = os.environ.get(VARIABLE)
    if path is None or model is None:
        return None
    asked = {"pid": os.getpid(), "model": model, "batch": dict(batch), "threads": threads, "zero_linear": _zero_linear()}
    question = json.dumps(asked)
    try:
        with socket.socket(socket.AF_UNIX) as client, client.makefile("r") as answer:
            client.connect(path)
            client.sendall(f"{question}\n".encode())
            return float(answer.readline())
    except (OSError, ValueError):
        return None  # the run is worth more than the measurement


def asked() -> bool:
    """Whether somebody wants to know."""
    return VARIABLE in os.environ


def _zero_linear() -> bool:
    """Whether ZeRO-3's linear stands in torch's place."""
    import torch

    return torch.nn.functional.linear.__module__.startswith("deepspeed.")


ARMS = ("stock", "vertical")
TRACED = "traced"  # the name of the vertical arm's runs that write a trace
ENGINES = {"stock": "DeepSpeedEngine", "vertical": "VerticalEngine"}


class Agreement(Enum):
    """How the losses of all runs relate to the first stock run's."""

    EQUAL = "equal bit for bit"
    WITHIN = "within the contract's tolerance"
    DIFFERENT = "different"
