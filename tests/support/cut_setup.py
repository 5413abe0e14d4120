"""Interrupts while an engine is made and while it is destroyed, and what such a one leaves behind in the process."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cut_kinds import STEPS, make
from cutting import Cut, Site, recorded
from harness import digest, dispose, forget_stock_globals, free_stock_buffers, read_state, read_weights
from processes import status

from ds_vertical import interrupts
from ds_vertical.errors import TornStateError
from ds_vertical.io.runs import run_dir

_MOST = 8  # engines whose making is cut, ahead of one that is made and trained
_TRAINED = STEPS[:2]
_SEAMS = (
    "deepspeed",
    "ds_vertical",
    "torch.nn",
    "torch.autograd",
    "torch.utils.checkpoint",
    "torch.distributed.distributed_c10d",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # SIGALRM is pytest's


def functions() -> dict[str, object]:
    """All functions and classes by the names under which torch, DeepSpeed and the package find them."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name != "torch" and not any(name == seam or name.startswith(f"{seam}.") for seam in _SEAMS):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                members = {k: each for k, each in vars(value).items() if callable(each) or isinstance(each, classmethod)}
                found |= {f"{name}.{key}.{k}": each for k, each in members.items()}
    return found


@dataclass(frozen=True)
class Process:
    """What an engine that is destroyed leaves as it was. `functions`: see there."""

    threads: tuple[str, ...]
    num_threads: int
    descriptors: tuple[str, ...]
    locked_kib: int
    handlers: tuple[Any, ...]
    torch: tuple[Any, ...]
    open_blocks: tuple[int, int]
    functions: dict[str, object]

    @classmethod
    def now(cls) -> Process:
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        modes = tuple(torch.overrides._get_current_function_mode_stack())
        return cls(
            tuple(sorted(thread.name for thread in threading.enumerate())),
            status("Threads"),
            tuple(sorted(_descriptors())),
            status("VmLck"),
            tuple(map(signal.getsignal, _SIGNALS)),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast, *modes),
            (interrupts.num_open(), interrupts.num_shields()),
            functions(),
        )

    def changed(self, before: Process, names: Collection[str] | None = None) -> list[str]:
        """What is not as it was. `names`: of what is looked at; None: all. Functions are always looked at."""
        every = [name for name in vars(self) if name != "functions" and (names is None or name in names)]
        names = [name for name in every if getattr(self, name) != getattr(before, name)]
        told = [f"{name}: {getattr(self, name)}, before {getattr(before, name)}" for name in names]
        missing = object()
        return told + [name for name, each in before.functions.items() if self.functions.get(name, missing) is not each]


AT_ONCE = ("threads", "locked_kib", "handlers", "torch", "open_blocks")  # as it was while somebody holds the failed engine


def _descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


def clean() -> None:
    forget_stock_globals()
    gc.collect()


def free_lost_buffers() -> None:
    """Those of stock's swappers that are still there, of engines and models that nobody has any more."""
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper

    objects = gc.get_objects()
    locked = [each for each in objects if type(each) is AsyncPartitionedParameterSwapper and hasattr(each, "buffers")]
    free_stock_buffers(locked, [each for each in objects if issubclass(type(each), OptimizerSwapper)])


def give_up_folders() -> None:
    """As at the process's end."""
    for path in run_dir.claimed():
        folder = run_dir.owned(path)
        assert folder is not None
        folder.release()


def files_in(folder: Path, own: Own | None = None) -> list[tuple[str, int]]:
    """The files of a run, by their names without numbers, with their bytes, but for locks, which hold the paths of folders;
    `own`: others."""
    ids = {path.name for path in run_dir.claimed()}
    paths = [path for path in folder.rglob("*") if path.is_file() and (own is None or path not in own.paths)]
    names = {path: "/".join(part for part in path.relative_to(folder).parts if part not in ids) for path in paths}
    sizes = {path: 0 if path.suffix == ".lock" else path.stat().st_size for path in paths}
    return sorted((re.sub(r"\d+", "*", name), sizes[path]) for path, name in names.items())


class Own:
    """Files of the user's, beside the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "beside").mkdir(parents=True, exist_ok=True)
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(path.name)

    @property
    def paths(self) -> list[Path]:
        """They."""
        return [self._folder / "mine.txt", self._folder / "results" / "rank0.txt", self._folder / "beside" / "mine"]

    def check(self) -> list[str]:
        """What is missing, and what else there is once the runs have given up their folders."""
        expected = {each for path in self.paths for each in (path, *path.parents) if each.is_relative_to(self._folder)}
        found = {self._folder, *self._folder.rglob("*")}
        kept = [f"{path} is gone" for path in expected - found]
        return (
            kept
            + [f"{path} is left" for path in found - expected]
            + [f"{path} was changed" for path in self.paths if path.exists() and path.read_text() != path.name]
        )


@dataclass(frozen=True)
class Whole:
    """A run that nobody interrupts: losses; files and a digest of all state once it is destroyed; the process after that; what
    its making passes, and its end."""

    losses: list[float]
    files: list[tuple[str, int]]
    digest: str
    process: Process
    made: Counter[Site]
    ended: Counter[Site]


def train(engine: Any) -> list[float]:
    return [engine.train_batch(iter(step)).item() for step in _TRAINED]


def state_digest(engine: Any, model: Any) -> str:
    return digest(read_weights(model) | read_state(engine, model))


def whole_run(folder: Path, kind: str) -> Whole:
    """The second one: the first imports, compiles and caches."""
    folder.mkdir()
    _run_and_clean(folder, kind)
    found = _run_and_clean(folder, kind)
    shutil.rmtree(folder)
    return replace(found, process=Process.now())


def _run_and_clean(folder: Path, kind: str) -> Whole:
    found = _run(folder, kind)
    give_up_folders()
    clean()
    return found


def _run(folder: Path, kind: str) -> Whole:
    """In a frame of its own, which has the last references to the engine."""
    with recorded() as made:
        engine, model = make(kind, folder)
    losses = train(engine)
    with recorded() as ended:
        engine.destroy()
    files, state = files_in(folder), state_digest(engine, model)
    dispose(engine)
    return Whole(losses, files, state, Process.now(), made, ended)


def is_over(cut: Cut) -> bool:
    """Whether `initialize` has done all by then: the frame that gets the interrupt has the engine."""
    return cut.site.function == "initialize" and cut.site.event == "return"


class _Trials:
    """`whole`: how many went on with the same bits; `torn`: where the engine said that it cannot; `wrong`: all else."""

    def __init__(self, folder: Path, kind: str, reference: Whole) -> None:
        self._folder, self._kind, self._reference = folder, kind, reference
        self._own = Own(folder)
        self.whole = 0
        self.torn: list[str] = []
        self.wrong: list[str] = []

    def __str__(self) -> str:
        """The counts."""
        return f"{self.whole} right, {len(self.torn)} said so, {len(self.wrong)} wrong"

    def interrupted(self, cut: Cut, call: Callable[[], object]) -> str | None:
        """Call it; returns what was wrong about the way in which the interrupt came out."""
        try:
            with cut:
                call()
        except KeyboardInterrupt as error:
            self.keep(error)
            return None
        except Exception as error:
            return f"{type(error).__name__} instead of the interrupt: {error}"
        return "the interrupt was lost" if cut.done else None

    def keep(self, error: KeyboardInterrupt) -> None:
        """As a notebook does, which has the last error, and with it all that the frames of the call have."""

    def left_behind(self) -> list[str]:
        give_up_folders()
        clean()
        return Process.now().changed(self._reference.process) + self._own.check()


class SetUpTrials(_Trials):
    """Cuts the making of engines. After a few of them one is made in the same folder, trained and destroyed: it is to have the
    bits of the reference, and all is to be as if it had been the only one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: list[str] = []
        self._errors: list[KeyboardInterrupt] = []

    def __enter__(self) -> SetUpTrials:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending:
            self._end()

    def cut(self, cut: Cut) -> None:
        made: list[Any] = []
        fault = self.interrupted(cut, lambda: made.append(make(self._kind, self._folder)[0]))
        while made:
            dispose(made.pop())
        forget_stock_globals()
        if fault is not None:
            self.wrong.append(f"{cut}: {fault}")
        else:
            self._pending.append(str(cut))
        if len(self._pending) == _MOST:
            self._end()

    def keep(self, error: KeyboardInterrupt) -> None:  # override
        self._errors.append(error)

    def _end(self) -> None:
        names, self._pending = "; ".join(self._pending), []
        num = names.count("; ") + 1
        try:
            faults = self._faults()
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        if faults:
            self.wrong.append(f"{names}: {faults}")
        else:
            self.whole += num

    def _faults(self) -> list[str]:
        free_lost_buffers()
        faults = self._train_another()
        faults += [f"while the errors are kept: {each}" for each in Process.now().changed(self._reference.process, AT_ONCE)]
        self._errors.clear()
        return faults + self.left_behind()

    def _train_another(self) -> list[str]:
        """In a frame of its own, which has the last references to the engine."""
        engine, model = make(self._kind, self._folder)
        try:
            faults = [] if train(engine) == self._reference.losses else ["other losses"]
            if state_digest(engine, model) != self._reference.digest:
                faults.append("weights, masters or moments differ")
        finally:
            dispose(engine)
        return faults


class EndTrials(_Trials):
    """Cuts the end of engines that have trained, then destroys them once more: then weights and state are to be read as after
    an end that nobody cuts, and files and the process as after that."""

    def cut(self, cut: Cut) -> None:
        try:
            faults, torn = self._faults(cut)
        except Exception as error:
            faults, torn = [f"{type(error).__name__}: {error}"], None
        if faults:
            self.wrong.append(f"{cut}: {faults}")
            self._start_anew()
        elif torn is not None:
            self.torn.append(f"{cut}: {torn}")
        else:
            self.whole += 1

    def _start_anew(self) -> None:
        """What a cut has left behind is not found again behind the next one, which is judged by itself."""
        give_up_folders()
        free_lost_buffers()
        clean()
        self._reference = replace(self._reference, process=Process.now())

    def _faults(self, cut: Cut) -> tuple[list[str], str | None]:
        faults, torn = self._end(cut)
        return faults + self.left_behind(), torn

    def _end(self, cut: Cut) -> tuple[list[str], str | None]:
        """In a frame of its own, which has the last references to the engine."""
        engine, model = make(self._kind, self._folder)
        try:
            return self._judge(cut, engine, model)
        finally:
            dispose(engine)  # whatever was wrong

    def _judge(self, cut: Cut, engine: Any, model: Any) -> tuple[list[str], str | None]:
        reference = self._reference
        faults = [] if train(engine) == reference.losses else ["other losses"]
        fault = self.interrupted(cut, engine.destroy)
        faults += [] if fault is None else [fault]
        torn = said(engine.destroy)
        if (files := files_in(self._folder, self._own)) != reference.files:
            faults.append(f"files {files}, without the cut {reference.files}")
        state: list[str] = []
        torn = torn or said(lambda: state.append(state_digest(engine, model)))
        if torn is None and state != [reference.digest]:
            faults.append("weights, masters or moments differ")
        return faults, torn


def said(call: Callable[[], object]) -> str | None:
    """What the engine says where it cannot do it."""
    try:
        call()
    except (TornStateError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
