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
from ds_vertical.planner.activation_policy import activation_tiers
from ds_vertical.planner.bound import Bound, step_bound
from ds_vertical.planner.closed_forms import Traffic, traffic_of
from ds_vertical.planner.costs import Parts, event_costs, split_steps
from ds_vertical.planner.linear_program import LpProblem, Solution
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import Division, ModelShape, ModelSpec, Seconds, shape_of
from ds_vertical.planner.simulate import SimulatedRun, SimulationSettings, simulate
from ds_vertical.schedule.events import DELAYED, EVERYTHING, LEAD, Schedule
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import PRE, Placement, TensorKind, Tier, TierBytes, per_tier

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
# What gives a plan more room in a tier.
_REMEDIES: Final = per_tier(
    {
        Tier.DEVICE: "a shorter --sequence-length or a larger device",
        Tier.HOST: "more host memory, fewer ranks",
        Tier.SSD: "more room on the SSD (--nvme-path on another one)",
    }
)
_NO_SECONDS: Final = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)
_LIBRARIES: Final = memory_budget.BudgetItem(Tier.HOST, "interpreter and libraries", 800 << 20, "(measured)")


class PlanError(ValueError):
    """No plan: names the tier, the bytes that are short, and what would help."""


@dataclass(frozen=True)
class Task:
    """What is to be trained: `tokens` per optimizer step over `num_ranks` ranks of one machine; `clip`: gradient_clipping.

    `micro_batch_size`: given instead of chosen. `seconds`: of the pieces for a micro-batch of so many sequences.
    `speculation`: with clipping, expect that the norm asks for none, so that layers are stepped early and nothing is redone.
    """

    spec: ModelSpec
    tokens: int
    seconds: Callable[[int], Seconds]
    num_ranks: int = 1
    clip: float = 1.0
    micro_batch_size: int | None = None
    speculation: bool = False

    def counts(self) -> Iterator[tuple[int, int]]:
        """(sequences per micro-batch, M) with `tokens` or the least above it."""
        per_rank = self.spec.sequence_length * self.num_ranks
        total = max(1, -(-self.tokens // per_rank))
        for size in [self.micro_batch_size] if self.micro_batch_size else _MICRO_BATCH_SIZES:
            if size <= total:
                yield size, -(-total // size)


@dataclass(frozen=True)
class Choice:
    """One way to train: what the search varies, of the sizes, the timing and the tiers. Shares in [0, 1].

    `RunSettings` are what a run has been told, all of them; these are few, and most of what they say is no key of the section
    (`cli.plan.deepspeed_json` writes it as JSON). `delay`: `optimizer_delay`; `window`: `prefetch_layers`."""

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
        tiers = activation_tiers(self.num_micro_batches, self.placement[TensorKind.ACTIVATIONS])
        return tuple(m for m, tier in enumerate(tiers) if tier is not Tier.DEVICE)

    def to_json(self) -> dict[str, object]:
        """As plans write it."""
        return {**vars(self), "placement": self.placement.named()}


@dataclass(frozen=True)
class Candidate:
    """A choice with the case of the linear program that it comes from, and what the program says of it."""

    choice: Choice
    case: LpProblem
    program_s: float
    binding: tuple[str, ...]

    @property
    def shape(self) -> ModelShape:
        """The model, resting where the choice says."""
        return self.case.shape

    @property
    def machine(self) -> Machine:
        """One rank's part of the machine."""
        return self.case.machine

    def schedule(self, num_layers: int) -> Schedule:
        """A step in the steady state."""
        choice, placement = self.choice, self.choice.placement
        # What is issued ahead at the end of a step, of `pre` and the first layers, is no longer due in the next one.
        due = frozenset(range(LEAD, num_layers)) if choice.window else frozenset((PRE, *range(num_layers)))
        waits = placement.in_files(TensorKind.GRADIENTS) > 0
        moves = not self.machine.one_memory or placement.in_files(TensorKind.ACTIVATIONS) > 0
        return build_training(
            TrainingStep(
                num_layers,
                choice.num_micro_batches,
                window=choice.window,
                delayed=choice.early or choice.delay > 0,
                due=due if choice.delay > 0 else frozenset(),
                early=choice.early,
                ahead=choice.window > 0,
                hold=None if not waits else DELAYED if choice.early else EVERYTHING,
                moved=choice.moved if moves else (),
            )
        )

    def parts(self, shape: ModelShape) -> Parts | None:
        """Elements of the early and the delayed part of each unit; None where nothing is stepped early."""
        return split_steps(shape, self.choice.delay) if self.choice.early else None

    def coarse(self, num_layers: int) -> ModelShape:
        """The model's first layers, each in a few pieces."""
        elements = self.shape.layer_elements[:num_layers]
        size = max(memory_budget.PART_ELEMENTS, max(elements) // self.shape.num_shards // _PIECES)
        return replace(self.shape, layer_elements=elements, part_elements=size)

    def simulated(self, num_layers: int) -> SimulatedRun:
        """Steps of the model's first layers."""
        shape, schedule = self.coarse(num_layers), self.schedule(num_layers)
        settings = SimulationSettings(_STEADY_STEPS, memory_budget.SLOTS)
        return simulate(schedule, self.machine, shape, settings, parts=self.parts(shape))

    @cached_property
    def timeline(self) -> SimulatedRun:
        """Steps of the whole model."""
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
        """The least time of a step, as `step_bound` has it."""
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
        """The memory budget."""
        return memory_budget.budget(self.shape, self.case.terms, self.case.further)

    @property
    def ssd_bytes(self) -> float:
        """Bytes that rest on this rank's SSD."""
        return linear_program.tier_bytes(self.case, self.shape.placement, Tier.SSD)


@dataclass(frozen=True)
class Plan:
    """The chosen candidate, and the best of the others by what it differs in."""

    chosen: Candidate
    runners_up: tuple[Candidate, ...]

    def differences(self) -> Iterator[tuple[str, float]]:
        """(what another plan does otherwise, its step over the chosen one's)."""
        for other in self.runners_up:
            yield _difference(self.chosen.choice, other.choice), other.estimate_s / self.chosen.estimate_s


def choose(
    task: Task, machine: Machine, limits: TierBytes, further: tuple[memory_budget.BudgetItem, ...] = (_LIBRARIES,)
) -> Plan:
    """See [Note: choosing]. `limits`: bytes per tier for one rank. Raises PlanError where no setting fits."""
    cases = list(_Search(task, machine, limits, further).cases())
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
    case: LpProblem, choice: Choice, windows: Sequence[int], delays: Sequence[float]
) -> tuple[Candidate, Candidate]:
    """The best timing for a model whose sizes and tiers are settled, and `choice` itself, which is taken where nothing is
    better by more than a hundredth or nothing fits. `delays`: of early steps; those that are not early keep theirs."""
    own = Candidate(choice, case, 0.0, ())
    found = [own]
    for delay in delays if case.early else (choice.delay,):
        held = delay if case.early and case.terms.held_share < 1 else case.terms.held_share
        for window in windows:
            terms = replace(case.terms, window=window, held_share=held)
            changed = replace(case, terms=terms, delay=delay)
            other = Candidate(replace(choice, window=window, delay=delay), changed, 0.0, ())
            found += [other] if _fits(other) else []
    best = min(found, key=lambda candidate: candidate.estimate_s)
    return (best if best.estimate_s * _EQUAL < own.estimate_s else own), own


# ---- cases


@dataclass(frozen=True)
class _Search:
    """What every case of a search shares; `limits`: bytes per tier for one rank, `further`: what takes memory besides."""

    task: Task
    machine: Machine
    limits: TierBytes
    further: tuple[memory_budget.BudgetItem, ...]

    def cases(self) -> Iterator[tuple[LpProblem, int, int]]:
        """(case, sequences per micro-batch, blocks per layer)"""
        task = self.task
        all_blocks = [b for b in _BLOCKS if b == 1 or 2 * b <= len(task.spec.block_elements)]
        timings = [timing for on_ssd in (1.0, 0.0) for timing in self._timings(on_ssd)]
        for size, count in task.counts():
            varied = [(_Sizes(size, count, blocks), timing) for blocks in all_blocks for timing in timings]
            untimed = [self._case(sizes, timing, _NO_SECONDS) for sizes, timing in varied]
            if all(linear_program.shortage(case) for case in untimed):
                yield from ((case, size, sizes.blocks_per_layer) for case, (sizes, _) in zip(untimed, varied, strict=True))
                continue  # nothing is timed that would not fit
            seconds = task.seconds(size)
            yield from ((self._case(sizes, timing, seconds), size, sizes.blocks_per_layer) for sizes, timing in varied)

    def _timings(self, state_on_ssd: float) -> Iterator[_Timing]:
        """Only state on SSD has a second generation, without which nothing is stepped before the norm."""
        if (self.task.clip == 0 or self.task.speculation) and state_on_ssd:
            yield from (_Timing(state_on_ssd, delay, True) for delay in DELAYS if delay < 1)
        yield _Timing(state_on_ssd, 1.0, False)

    def _case(self, sizes: _Sizes, timing: _Timing, seconds: Seconds) -> LpProblem:
        delay, early = timing.delay, timing.early
        division = Division(
            sizes.sequences,
            sizes.blocks_per_layer,
            num_shards=self.task.num_ranks,
            generations=2 if early else 1,
            part_elements=memory_budget.PART_ELEMENTS,
            placement=Placement.of(state_on_ssd=timing.state_on_ssd),
        )
        held = delay if early and self.task.clip == 0 else 1.0  # what may be redone is kept
        terms = memory_budget.BudgetTerms(sizes.num_micro_batches, 1, held_share=held, one_memory=self.machine.one_memory)
        shape = shape_of(self.task.spec, seconds, division)
        return LpProblem(shape, self.machine, terms, self.limits, delay, early, self.further)


@dataclass(frozen=True)
class _Sizes:
    """`sequences` of a micro-batch, micro-batches of a step, blocks of a layer."""

    sequences: int
    num_micro_batches: int
    blocks_per_layer: int


@dataclass(frozen=True)
class _Timing:
    """Where the state is, which share of the steps is delayed, and whether the rest is stepped in the backward."""

    state_on_ssd: float
    delay: float
    early: bool


def _spread(solved: Sequence[tuple[LpProblem, int, int, Solution]]) -> list[tuple[LpProblem, int, int, Solution]]:
    """The best cases, and of every micro-batch size and number of blocks the best one, if it is near them."""
    best: dict[tuple[int, int], tuple[LpProblem, int, int, Solution]] = {}
    for entry in solved:
        best.setdefault((entry[1], entry[2]), entry)
    near = [entry for entry in best.values() if entry[3].seconds <= 1.25 * solved[0][3].seconds]
    chosen = {id(entry): entry for entry in (*near[: _SIMULATED // 2], *solved)}
    return list(chosen.values())[:_SIMULATED]


def _candidate(case: LpProblem, size: int, blocks: int, solution: Solution, *, window: int) -> Candidate:
    count = case.terms.num_micro_batches
    placement = _rounded(solution.placement(case.shape.in_files(TensorKind.STATE)), count)
    shape, terms = replace(case.shape, placement=placement), replace(case.terms, window=window)
    guessed = case.early and case.terms.held_share > case.delay
    choice = Choice(size, count, blocks, window, case.delay, case.early, placement, guessed)
    own = replace(case, shape=shape, terms=terms)
    return Candidate(choice, own, solution.seconds, solution.binding)


def _with_window(candidate: Candidate, window: int) -> Candidate:
    case = replace(candidate.case, terms=replace(candidate.case.terms, window=window))
    return replace(candidate, choice=replace(candidate.choice, window=window), case=case)


def _rounded(placement: Placement, num_micro_batches: int) -> Placement:
    """Shares of activations are of whole micro-batches: more of them leave the device, never fewer."""
    shares = placement[TensorKind.ACTIVATIONS]
    host, ssd = shares[Tier.HOST], shares[Tier.SSD]
    off = -(-round((host + ssd) * num_micro_batches * 1e6) // 10**6) / num_micro_batches
    ssd = min(off, -(-round(ssd * num_micro_batches * 1e6) // 10**6) / num_micro_batches)
    return placement.with_shares(TensorKind.ACTIVATIONS, {Tier.HOST: max(0.0, off - ssd), Tier.SSD: ssd})


def _fits(candidate: Candidate) -> bool:
    case, placement = candidate.case, candidate.shape.placement
    return all(
        limit is None or linear_program.tier_bytes(case, placement, tier) <= limit for tier, limit in case.limits.items()
    )


# ---- the decision


def _decide(fitting: Sequence[Candidate]) -> Plan:
    """`fitting`: the fastest first."""
    near = [c for c in fitting if c.estimate_s <= _EQUAL * fitting[0].estimate_s]
    chosen = min(near, key=_simplicity)
    others: dict[str, Candidate] = {}
    for candidate in fitting:
        others.setdefault(_difference(chosen.choice, candidate.choice), candidate)
    others.pop("", None)  # the chosen one
    return Plan(chosen, tuple(others.values())[:_RUNNERS_UP])


def _simplicity(candidate: Candidate) -> tuple[float, ...]:
    """Smaller is simpler: fewer things moved, smaller windows, the usual layers."""
    choice, placement = candidate.choice, candidate.choice.placement
    activations = placement[TensorKind.ACTIVATIONS]
    moves = activations[Tier.SSD], activations[Tier.HOST], placement.share(TensorKind.GRADIENTS, Tier.SSD)
    return (*(round(share, 2) for share in moves), choice.window, choice.blocks_per_layer, candidate.shape.generations)


def _difference(chosen: Choice, other: Choice) -> str:
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
    if (away := theirs.away(TensorKind.ACTIVATIONS)) != ours.away(TensorKind.ACTIVATIONS):
        found.append(f"activations off the device {away:.0%}")
    if (on_ssd := theirs.share(TensorKind.STATE, Tier.SSD)) != ours.share(TensorKind.STATE, Tier.SSD):
        found.append(f"optimizer state on {'SSD' if on_ssd else 'host'}")
    return ", ".join(found)


def _shortage(cases: Sequence[tuple[LpProblem, int, int]]) -> str:
    """Which tier is too small at any setting, and by how much at the setting that needs least."""
    lacking = [(linear_program.shortage(case), case, size) for case, size, _ in cases]
    least, case, size = min(lacking, key=lambda entry: sum(entry[0].values()))
    tiers = ", ".join(f"{what}: {-(-num_bytes // 2**20):.0f} MiB short" for what, num_bytes in least.items())
    advice = " and ".join(remedy for tier, remedy in _REMEDIES.items() if f"{tier} memory" in least)
    if not least:
        return f"no setting fits all tiers at once with micro-batches of {size}; more room in any tier would help"
    return f"no setting fits; the least is short of {tiers} (micro-batches of {size}); it takes {advice}"
