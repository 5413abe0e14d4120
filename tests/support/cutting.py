"""Interrupts at function boundaries of the package's code, one at a time, as a signal's handler raises them."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import shutil
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from cut_kinds import state_of
from harness import contents, digest, dispose
from torch import nn

from ds_vertical import interrupts
from ds_vertical.errors import TornStateError

PACKAGE = str(Path(__import__("ds_vertical").__file__).parent)
# what only shows or plans, and is no part of the engine, the stores or the queue
_LEFT_OUT = ("cli/", "planner/", "io/host", "schedule/trace", "schedule/dependencies", "schedule/events", "compat/ops/cache")
_ENTER = contextlib._GeneratorContextManager.__enter__.__code__
_YIELD, _WITH = dis.opmap["YIELD_VALUE"], dis.opmap["BEFORE_WITH"]
_INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Site(NamedTuple):
    """A place between two bytecodes: a function's start ("call") or end ("return"), the end of one of C ("c_return"), or where
    a context manager written as a generator is open, and the block's code does not know it yet ("entered")."""

    file: str
    function: str
    line: int
    event: str
    callee: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function} {self.event} {self.callee}".rstrip()


def _site(frame: FrameType, event: str, arg: Any) -> Site | None:
    if event not in ("call", "return", "c_return"):
        return None
    code = frame.f_code
    if event == "return" and code.co_flags & CO_GENERATOR and code.co_code[frame.f_lasti] == _YIELD:
        return None  # it has parked: no handler runs here, but where "entered" is, and ahead of the yield
    if event == "return" and (caller := frame.f_back) is not None and caller.f_code.co_code[caller.f_lasti] == _WITH:
        return None  # of a context manager's entry: no handler runs between it and the block
    entered = event == "c_return" and arg is next and frame.f_code is _ENTER
    if entered and frame.f_back is not None:
        frame, event = frame.f_back, "entered"
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return None
    name = code.co_filename[len(PACKAGE) + 1 :]
    if name.startswith(_LEFT_OUT) or code.co_name in _INNER:
        return None
    callee = getattr(arg, "__name__", "") if event == "c_return" else ""
    line = frame.f_lineno if event in ("c_return", "entered") else code.co_firstlineno
    return Site(name, code.co_qualname, line, event, callee)


@contextlib.contextmanager
def recorded() -> Iterator[Counter[Site]]:
    """How often each site is passed within the block."""
    found: Counter[Site] = Counter()

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        if (site := _site(frame, event, arg)) is not None:
            found[site] += 1

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(before)


class Cut:
    """Raises `error()` where a site is passed for the `number`-th time (from 1). `done`: it has.

    Where signals wait it comes as a second one does, which does not: the handler that is there then closes all blocks first.
    """

    def __init__(self, site: Site, number: int, error: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        self.site = site
        self.number = number
        self.done: Any = False
        self._error = error

    def __str__(self) -> str:
        return f"{self.site} #{self.number}"

    def __enter__(self) -> Cut:
        left = self.number

        def hook(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal left
            if not self.done and _site(frame, event, arg) == self.site:
                left -= 1
                if left == 0:
                    self.done = True
                    self._interrupt(frame)

        sys.setprofile(hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _interrupt(self, frame: FrameType) -> None:
        waits = signal.getsignal(signal.SIGINT) is interrupts._hear and interrupts.num_shields() > 0
        if waits and not interrupts._does_no_harm(frame):
            interrupts.reset(0)
        raise self._error()


class CtrlC(Cut):
    """As `Cut`, by the handler of SIGINT that is there: where signals wait (`deferred`), it waits, too."""

    def _interrupt(self, frame: FrameType) -> None:  # override
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, frame)


def chosen(found: Counter[Site], count: int | None = None, kind: type[Cut] = Cut) -> list[Cut]:
    """The first and the last time that each site is passed; `count` of them, evenly spread, where not all are wanted.

    With CUT_SHARD=I/N in the environment all are the I-th part of N (from 0): N processes with a core each cut a series whole
    in an N-th of the time. A site's part depends on nothing but the site.
    """
    index, parts = map(int, os.environ.get("CUT_SHARD", "0/1").split("/"))
    if count is None and parts > 1:
        found = Counter({site: number for site, number in found.items() if zlib.crc32(str(site).encode()) % parts == index})
    cuts = [kind(site, number) for site in found for number in sorted({1, found[site]})]
    return cuts if count is None else [cuts[index * len(cuts) // count] for index in range(count)]


def are_reached(cuts: Sequence[Cut]) -> bool:
    """Nearly all; of few cuts one may be behind where this run has ended."""
    return sum(bool(cut.done) for cut in cuts) >= min(0.85 * len(cuts), len(cuts) - 1)


def surroundings(model: nn.Module) -> dict[str, Any]:
    """What a call of the engine's has to leave as it was, besides the state."""
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    found: dict[str, Any] = {
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "thread": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, torch.get_rng_state().tolist()),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
    }
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("hooks")}
        found[f"module {name}"] = list(vars(module)), module.training, hooks, module.forward
    for name, param in model.named_parameters():
        found[f"parameter {name}"] = param.requires_grad, param.grad is None, param.numel()
    return found


Make = Callable[[Path], tuple[Any, nn.Module]]
Read = Callable[[Any, nn.Module], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Reference:
    """A run that nobody interrupts: losses, what the modules hold after each step, digests after the last steps, where engines
    end, and what one step passes."""

    losses: list[float]
    states: list[dict[str, Any]]
    digests: dict[int, str]
    found: Counter[Site]


def reference_of(
    folder: Path,
    make: Make,
    steps: Sequence[Any],
    watched: int = 2,
    recording: Callable[[Any], contextlib.AbstractContextManager[Counter[Site]]] = lambda _: recorded(),
    read: Read = contents,
) -> Reference:
    """Train one in `folder`, which is removed. `watched`: the step whose sites `recording` of the engine finds. `read`: see
    `Trials`."""
    engine, model = make(folder)
    losses, states, digests, found = [], [], {}, Counter[Site]()
    try:
        for index, step in enumerate(steps):
            with recording(engine) if index == watched else contextlib.nullcontext(found) as passed:
                losses.append(engine.train_batch(iter(step)).item())
            found = passed
            states.append(state_of(model))
            if index >= len(steps) - 5:
                digests[index] = digest(read(engine, model))
    finally:
        dispose(engine)
        shutil.rmtree(folder, ignore_errors=True)
    return Reference(losses, states, digests, found)


class Trials:
    """Interrupts one run at many places, and says where what follows is not that of a run that nobody has interrupted.

    A step that was interrupted has been taken or not, as `global_steps` tells, and the run goes on with the next one; where the
    engine says that its state is torn, a new one starts over. `wrong`: what went on with other numbers, or broke; `torn`: where
    the engine said so; `whole`: how many times the run went on; `others`: calls that raised something else than the interrupt
    that a real signal makes. Runs of one `make` and `steps` may share their `reference`. `read`: what is compared of an engine
    and its model.
    """

    def __init__(
        self, folder: Path, make: Make, steps: Sequence[Any], reference: Reference | None = None, read: Read = contents
    ) -> None:
        self._folder = folder
        self._make = make
        self._steps = steps
        self._reference = reference or reference_of(folder / "reference", make, steps, read=read)
        self._read = read
        self.found = self._reference.found
        self._engine: Any = None
        self._model: Any = None
        self._around: dict[str, Any] = {}
        self._made = 0
        self.whole = 0
        self.torn: list[str] = []
        self.wrong: list[str] = []
        self.others: list[str] = []

    def __enter__(self) -> Trials:
        return self

    def __str__(self) -> str:
        """The counts."""
        counts = f"{self.whole} right, {len(self.torn)} marked torn, {len(self.wrong)} wrong"
        return f"{counts}, {len(self.others)} with another exception than the interrupt"

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._check_state("the last one")
            self._drop()

    def ready(self) -> tuple[Any, nn.Module]:
        """An engine with a step or two behind it, and as many before it."""
        if self._engine is not None and self._engine.global_steps > len(self._steps) - 4:
            self._check_state("the last one")
            self._drop()
        if self._engine is None:
            self._start()
            self._go_on(2)
            self._around = surroundings(self._model)
        return self._engine, self._model

    def step(self) -> float:
        """The next step of the run, whose loss is checked."""
        index = self._engine.global_steps
        loss = self._step()
        expected = self._reference.losses[index]
        if loss != expected:
            raise AssertionError(f"step {index}: loss {loss}, expected {expected}")
        return loss

    def cut(self, cut: Any, action: Callable[[Any], object] | None = None) -> None:
        """Interrupt a step, or another `action` on the engine, then go on for two steps."""
        engine, model = self.ready()
        try:
            with cut:
                self.step() if action is None else action(engine)
        except KeyboardInterrupt:
            pass
        except AssertionError as error:
            self._is_wrong(cut, error)
            return
        except Exception as error:
            self._ended_otherwise(cut, error)
        else:
            self._came_to_an_end(cut)
        try:
            self._go_on(2)
            self._check_around(model)
            self.whole += 1
        except TornStateError as error:
            self.torn.append(f"{cut}: {error}")
            self._drop()
        except Exception as error:
            self._is_wrong(cut, error)

    def _ended_otherwise(self, cut: Any, error: Exception) -> None:
        """The call that was interrupted has raised something else. Of a real signal that is told alone: where it comes in C,
        the library says so in its own words."""
        (self.wrong if isinstance(cut, Cut) else self.others).append(f"{cut}: {type(error).__name__}: {error}")
        cut.done = cut.done or f"{type(error).__name__}: {error}"

    def _came_to_an_end(self, cut: Any) -> None:
        """The call has raised nothing, which it must not where it was interrupted."""
        if isinstance(cut, Cut) and cut.done:
            self.wrong.append(f"{cut}: nobody heard of the interrupt")

    def _check_around(self, model: nn.Module) -> None:
        around = surroundings(model)
        changed = [name for name in around | self._around if around.get(name) != self._around.get(name)]
        found, expected = state_of(model), self._reference.states[self._engine.global_steps - 1]
        changed += [name for name in found | expected if found.get(name) != expected.get(name)]
        assert not changed, f"not as before: {changed}"

    def _is_wrong(self, cut: Any, error: BaseException) -> None:
        self.wrong.append(f"{cut}: {type(error).__name__}: {error}")
        self._drop()

    def _go_on(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _step(self) -> float:
        return self._engine.train_batch(iter(self._steps[self._engine.global_steps])).item()

    def _digest(self) -> str:
        return digest(self._read(self._engine, self._model))

    def _check_state(self, cut: Any) -> None:
        while self._engine.global_steps - 1 not in self._reference.digests:
            self.step()
        if self._digest() != self._reference.digests[self._engine.global_steps - 1]:
            self.wrong.append(f"{cut}: weights, masters or moments after step {self._engine.global_steps} differ")

    def _start(self) -> None:
        gc.collect()  # of the engine before, whose `__del__` passes sites of the package, and might take a later cut
        self._made += 1
        self._engine, self._model = self._make(self._folder / str(self._made))

    def _drop(self) -> None:
        engine, self._engine, self._model = self._engine, None, None
        with contextlib.suppress(Exception):  # of one that is torn
            dispose(engine)
        shutil.rmtree(self._folder / str(self._made), ignore_errors=True)
