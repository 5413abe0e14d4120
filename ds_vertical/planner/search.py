"""Chooses how to train a model on a machine: sizes, timing and tiers, and says why.

[Note: choosing] Every micro-batch size, number of blocks per layer and share of delayed steps makes a case of the linear
program (`linear_program`), which places what can rest in several tiers and bounds both sweeps. The best cases, and of them the
best with every window, are then run through the simulator on the very schedule that the executor would run; its seconds
decide, and among plans that differ by less than a hundredth the simplest. Models of many layers are judged by two runs with
fewer (a layer costs the same however many there are). The optimizer's pieces are taken coarser there than they are: some to a
layer, which overlap as the real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.bound import Bound, step_bound
from ds_vertical.planner.closed_forms import Traffic, traffic_of
from ds_vertical.planner.costs import Parts, event_costs, split_steps
from ds_vertical.planner.linear_program import LpProblem, Solution, TierLimits
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape, Outline, Placement, Seconds, shape_of
from ds_vertical.planner.simulate import SimulatedRun, simulate
from ds_vertical.schedule.events import DELAYED, EVERYTHING, LEAD, PRE, Schedule
from ds_vertical.schedule.passes import build_training

WINDOWS: Final = (1, 2, 3)
DELAYS: Final = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_BLOCKS: Final = (1, 2, 4)
_MICRO_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
_SIMULATED: Final = 6  # cases that the simulator ranks
_VARIED: Final = 2  # of them, those that it runs with every window
_RANKED_LAYERS: Final = 5
_PIECES: Final = 8  # of a layer in the optimizer's pipeline
_STEADY_STEPS: Final = 3
_RUNNERS_UP: Final = 3
_EQUAL: Final = 1.01  # plans nearer than this are one as good as the other
_NO_SECONDS: Final = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)
_LIBRARIES: Final = memory_budget.BudgetItem("host", "interpreter and libraries", 800 << 20, "(measured)")


class PlanError(ValueError):
    """No plan: names the tier, the bytes that are short, and what would help."""


@dataclass(frozen=True)
class Task:
    """What is to be trained: `tokens` per optimizer step over `num_ranks` ranks of one machine; `clip`: gradient_clipping.

    `micro_batch_size`: given instead of chosen. `seconds`: of the pieces for a micro-batch of so many sequences.
    `speculation`: with clipping, expect that the norm asks for none, so that layers are stepped early and nothing is redone.
    """

    outline: Outline
    tokens: int
    seconds: Callable[[int], Seconds]
    num_ranks: int = 1
    clip: float = 1.0
    micro_batch_size: int | None = None
    speculation: bool = False

    def counts(self) -> Iterator[tuple[int, int]]:
        """(sequences per micro-batch, M) with `tokens` or the least above it."""
        per_rank = self.outline.sequence_length * self.num_ranks
        total = max(1, -(-self.tokens // per_rank))
        for size in [self.micro_batch_size] if self.micro_batch_size else _MICRO_BATCH_SIZES:
            if size <= total:
                yield size, -(-total // size)


@dataclass(frozen=True)
class Setting:
    """One way to train: the keys of the JSON that a plan decides. Shares in [0, 1]."""

    micro_batch_size: int
    num_micro_batches: int
    blocks_per_layer: int
    window: int
    delay: float
    early: bool
    placement: Placement
    speculation: bool = False

    @property
    def moved(self) -> tuple[int, ...]:
        """The micro-batches whose activations leave the device."""
        return tuple(m for m, tier in enumerate(self.placement.activation_tiers(self.num_micro_batches)) if tier != "device")


@dataclass(frozen=True)
class Candidate:
    """A setting with its model's shape on a machine, and what the linear program says of it."""

    setting: Setting
    shape: ModelShape
    machine: Machine
    case: LpProblem
    program_s: float
    binding: tuple[str, ...]

    def schedule(self, num_layers: int) -> Schedule:
        """A step in the steady state."""
        setting = self.setting
        # What is issued ahead at the end of a step, of `pre` and the first layers, is no longer due in the next one.
        due = frozenset(range(LEAD, num_layers)) if setting.window else frozenset((PRE, *range(num_layers)))
        hold = None if not setting.placement.gradients_on_ssd else DELAYED if setting.early else EVERYTHING
        leaves = setting.early or setting.delay > 0
        return build_training(
            num_layers,
            setting.num_micro_batches,
            window=setting.window,
            delayed=leaves,
            due=due if setting.delay > 0 else frozenset(),
            early=setting.early,
            ahead=setting.window > 0,
            hold=hold,
            moved=setting.moved if not self.machine.one_memory or setting.placement.activations_on_ssd else (),
        )

    def parts(self, shape: ModelShape) -> Parts | None:
        return split_steps(shape, self.setting.delay) if self.setting.early else None

    def coarse(self, num_layers: int) -> ModelShape:
        """The model's first layers, each in a few pieces."""
        elements = self.shape.layer_elements[:num_layers]
        size = max(memory_budget.PART_ELEMENTS, max(elements) // self.shape.num_shards // _PIECES)
        return replace(self.shape, layer_elements=elements, part_elements=size)

    def simulated(self, num_layers: int) -> SimulatedRun:
        """Steps of the model's first layers."""
        shape, schedule = self.coarse(num_layers), self.schedule(num_layers)
        return simulate(schedule, self.machine, shape, steps=_STEADY_STEPS, slots=memory_budget.SLOTS, parts=self.parts(shape))

    @cached_property
    def timeline(self) -> SimulatedRun:
        return self.simulated(self.shape.num_layers)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.step_s

    @cached_property
    def estimate_s(self) -> float:
        """As `step_s`, from two runs with fewer layers where there are many."""
        count = self.shape.num_layers
        if count <= 2 * _RANKED_LAYERS:
            return self.step_s
        few, more = (self.simulated(n).step_s for n in (_RANKED_LAYERS, 2 * _RANKED_LAYERS))
        return few + (more - few) * (count - _RANKED_LAYERS) / _RANKED_LAYERS

    @cached_property
    def bound(self) -> Bound:
        shape = self.coarse(self.shape.num_layers)
        return step_bound(self.schedule(shape.num_layers), self.machine, shape, parts=self.parts(shape))

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes of one step to and from this rank's SSD."""
        shape = self.coarse(self.shape.num_layers)
        events = self.schedule(shape.num_layers).events
        return traffic_of(event_costs(events, self.machine, shape, self.parts(shape)), shape)

    @property
    def items(self) -> tuple[memory_budget.BudgetItem, ...]:
        return memory_budget.budget(self.shape, self.case.settings, self.case.further)

    @property
    def ssd_bytes(self) -> float:
        return linear_program.tier_bytes(self.case, self.shape.placement, "ssd")


@dataclass(frozen=True)
class Plan:
    """The chosen candidate, and the best of the others by what it differs in."""

    chosen: Candidate
    runners_up: tuple[Candidate, ...]

    def differences(self) -> Iterator[tuple[str, float]]:
        """(what another plan does otherwise, its step over the chosen one's)."""
        for other in self.runners_up:
            yield _difference(self.chosen.setting, other.setting), other.estimate_s / self.chosen.estimate_s


def choose(
    task: Task, machine: Machine, limits: TierLimits, further: tuple[memory_budget.BudgetItem, ...] = (_LIBRARIES,)
) -> Plan:
    """See [Note: choosing]. `limits`: bytes per tier for one rank. Raises PlanError where no setting fits."""
    cases = list(_cases(task, machine, limits, further))
    solved = [
        (case, size, blocks, solution) for case, size, blocks in cases if (solution := linear_program.solve(case)) is not None
    ]
    if not solved:
        raise PlanError(_shortage(cases))
    solved.sort(key=lambda entry: entry[3].seconds)
    fitting = [c for entry in _spread(solved) if _fits(c := _candidate(*entry, window=WINDOWS[0]))]
    if not fitting:
        raise PlanError(_shortage(cases))
    fitting.sort(key=lambda c: c.estimate_s)
    fitting += [wider for c in fitting[:_VARIED] for window in WINDOWS[1:] if _fits(wider := _with_window(c, window))]
    return _decide(sorted(fitting, key=lambda c: c.estimate_s))


def tune_timing(
    case: LpProblem, setting: Setting, windows: Sequence[int], delays: Sequence[float]
) -> tuple[Candidate, Candidate]:
    """The best timing for a model whose sizes and tiers are settled, and `setting` itself, which is taken where nothing is
    better by more than a hundredth or nothing fits. `delays`: of early steps; those that are not early keep theirs."""
    own = Candidate(setting, case.shape, case.machine, case, 0.0, ())
    found = [own]
    for delay in delays if case.early else (setting.delay,):
        held = delay if case.early and case.settings.held_share < 1 else case.settings.held_share
        for window in windows:
            settings = replace(case.settings, window=window, held_share=held)
            changed = replace(case, settings=settings, delay=delay)
            other = Candidate(replace(setting, window=window, delay=delay), case.shape, case.machine, changed, 0.0, ())
            found += [other] if _fits(other) else []
    best = min(found, key=lambda candidate: candidate.estimate_s)
    return (best if best.estimate_s * _EQUAL < own.estimate_s else own), own


# ---- cases


def _cases(
    task: Task, machine: Machine, limits: TierLimits, further: tuple[memory_budget.BudgetItem, ...]
) -> Iterator[tuple[LpProblem, int, int]]:
    """(case, sequences per micro-batch, blocks per layer)"""
    all_blocks = [b for b in _BLOCKS if b == 1 or 2 * b <= len(task.outline.block_elements)]
    regimes = [(on_ssd, *regime) for on_ssd in (1.0, 0.0) for regime in _regimes(task, on_ssd)]
    for size, count in task.counts():
        settings = [((size, count, blocks), regime) for blocks in all_blocks for regime in regimes]
        untimed = [_case(task, machine, limits, further, sizes, _NO_SECONDS, regime) for sizes, regime in settings]
        if all(linear_program.shortage(case) for case in untimed):
            yield from ((case, size, sizes[2]) for case, (sizes, _) in zip(untimed, settings, strict=True))
            continue  # nothing is timed that would not fit
        seconds = task.seconds(size)
        yield from ((_case(task, machine, limits, further, s, seconds, regime), size, s[2]) for s, regime in settings)


def _regimes(task: Task, state_on_ssd: float) -> Iterator[tuple[float, bool]]:
    """(share of delayed steps, whether the rest is stepped in the backward): the regimes of the architecture, 6. Only state on
    SSD has a second generation, without which nothing is stepped before the norm."""
    if (task.clip == 0 or task.speculation) and state_on_ssd:
        yield from ((delay, True) for delay in DELAYS if delay < 1)
    yield 1.0, False


def _case(
    task: Task,
    machine: Machine,
    limits: TierLimits,
    further: tuple[memory_budget.BudgetItem, ...],
    sizes: tuple[int, int, int],
    seconds: Seconds,
    regime: tuple[float, float, bool],
) -> LpProblem:
    (size, count, blocks), (state_on_ssd, delay, early) = sizes, regime
    shape = shape_of(
        task.outline,
        seconds,
        sequences=size,
        blocks_per_layer=blocks,
        num_shards=task.num_ranks,
        generations=2 if early else 1,
        part_elements=memory_budget.PART_ELEMENTS,
        placement=Placement(1.0, state_on_ssd),
    )
    held = delay if early and task.clip == 0 else 1.0  # what may be redone is kept
    settings = memory_budget.Settings(count, 1, held_share=held, one_memory=machine.one_memory)
    return LpProblem(shape, machine, settings, limits, delay, early, further)


def _spread(solved: Sequence[tuple[LpProblem, int, int, Solution]]) -> list[tuple[LpProblem, int, int, Solution]]:
    """The best cases, and of every micro-batch size and number of blocks the best one, if it is near them."""
    best: dict[tuple[int, int], tuple[LpProblem, int, int, Solution]] = {}
    for entry in solved:
        best.setdefault((entry[1], entry[2]), entry)
    near = [entry for entry in best.values() if entry[3].seconds <= 1.25 * solved[0][3].seconds]
    chosen = {id(entry): entry for entry in (*near[: _SIMULATED // 2], *solved)}
    return list(chosen.values())[:_SIMULATED]


def _candidate(case: LpProblem, size: int, blocks: int, solution: Solution, *, window: int) -> Candidate:
    count = case.settings.num_micro_batches
    placement = _rounded(solution.placement(case.shape.placement.state_on_ssd), count)
    shape, settings = replace(case.shape, placement=placement), replace(case.settings, window=window)
    guessed = case.early and case.settings.held_share > case.delay
    setting = Setting(size, count, blocks, window, case.delay, case.early, placement, guessed)
    own = replace(case, shape=shape, settings=settings)
    return Candidate(setting, shape, case.machine, own, solution.seconds, solution.binding)


def _with_window(candidate: Candidate, window: int) -> Candidate:
    case = replace(candidate.case, settings=replace(candidate.case.settings, window=window))
    return replace(candidate, setting=replace(candidate.setting, window=window), case=case)


def _rounded(placement: Placement, num_micro_batches: int) -> Placement:
    """Shares of activations are of whole micro-batches: more of them leave the device, never fewer."""
    host, ssd = placement.activations_on_host, placement.activations_on_ssd
    off = -(-round((host + ssd) * num_micro_batches * 1e6) // 10**6) / num_micro_batches
    ssd = min(off, -(-round(ssd * num_micro_batches * 1e6) // 10**6) / num_micro_batches)
    return replace(placement, activations_on_host=max(0.0, off - ssd), activations_on_ssd=ssd)


def _fits(candidate: Candidate) -> bool:
    limits, case = candidate.case.limits, candidate.case
    tiers = {"device": limits.device_bytes, "host": limits.host_bytes, "ssd": limits.ssd_bytes}
    return all(
        limit is None or linear_program.tier_bytes(case, candidate.shape.placement, tier) <= limit
        for tier, limit in tiers.items()
    )


# ---- the decision


def _decide(fitting: Sequence[Candidate]) -> Plan:
    """`fitting`: the fastest first."""
    near = [c for c in fitting if c.estimate_s <= _EQUAL * fitting[0].estimate_s]
    chosen = min(near, key=_simplicity)
    others: dict[str, Candidate] = {}
    for candidate in fitting:
        others.setdefault(_difference(chosen.setting, candidate.setting), candidate)
    others.pop("", None)  # the chosen one
    return Plan(chosen, tuple(others.values())[:_RUNNERS_UP])


def _simplicity(candidate: Candidate) -> tuple[float, ...]:
    """Smaller is simpler: fewer things moved, smaller windows, the usual layers."""
    setting, placement = candidate.setting, candidate.setting.placement
    moves = placement.activations_on_ssd, placement.activations_on_host, placement.gradients_on_ssd
    return (*(round(share, 2) for share in moves), setting.window, setting.blocks_per_layer, candidate.shape.generations)


def _difference(chosen: Setting, other: Setting) -> str:
    """What `other` does otherwise, in the JSON's words."""
    names = {
        "micro_batch_size": "train_micro_batch_size_per_gpu",
        "num_micro_batches": "gradient_accumulation_steps",
        "blocks_per_layer": "blocks_per_layer",
        "window": "prefetch_layers",
        "delay": "optimizer_delay",
    }
    found = [f"{key} {getattr(other, name):g}" for name, key in names.items() if getattr(other, name) != getattr(chosen, name)]
    ours, theirs = chosen.placement, other.placement
    if ours.activations_off_device != theirs.activations_off_device:
        found.append(f"activations off the device {theirs.activations_off_device:.0%}")
    if ours.state_on_ssd != theirs.state_on_ssd:
        found.append(f"optimizer state on {'SSD' if theirs.state_on_ssd else 'host'}")
    return ", ".join(found)


def _shortage(cases: Sequence[tuple[LpProblem, int, int]]) -> str:
    """Which tier is too small at any setting, and by how much at the setting that needs least."""
    lacking = [(linear_program.shortage(case), case, size) for case, size, _ in cases]
    least, case, size = min(lacking, key=lambda entry: sum(entry[0].values()))
    tiers = ", ".join(f"{what}: {-(-num_bytes // 2**20):.0f} MiB short" for what, num_bytes in least.items())
    remedies = {
        "device memory": "a shorter --sequence-length or a larger device",
        "host memory": "more host memory, fewer ranks",
        "ssd memory": "more room on the SSD (--nvme-path on another one)",
    }
    advice = " and ".join(remedies[what] for what in least if what in remedies)
    if not least:
        return f"no setting fits all tiers at once with micro-batches of {size}; more room in any tier would help"
    return f"no setting fits; the least is short of {tiers} (micro-batches of {size}); it takes {advice}"
