"""Chooses how to train a model on a machine: sizes, timing and tiers, and says why.

[Note: choosing] Every micro-batch size, number of blocks per layer and share of delayed steps makes a case of the linear
program (`linear_program`), which places what can rest in several tiers and bounds both sweeps. The best cases, and of them the
best with every window, are then run through the simulator on the very schedule that the executor would run; its seconds decide,
and among plans that differ by less than a hundredth the simplest. The best ones are also tried with a share of the state in
host memory (`candidate`), and the best of all with state read ahead of the norm into what these leave. Where no setting fits
with all of the state in one tier, some shares are tried, and then all again with no layer fetched ahead (window 0). Models of
many layers are judged by two runs with fewer (a layer costs the same however many there are). The optimizer's pieces are taken
coarser there than they are: some to a layer, which overlap as the real ones do.

[Note: keeping] The program mixes all policies and tiers of what is kept; the JSON has one policy, for a share of the cells in
one tier and for another in host memory. So of each of the best cases one candidate for each policy and each of these pairs of
tiers is solved again, and the simulator ranks them beside the one that keeps nothing. All cells keep where that loses nothing.

[Note: in place] Without clipping early steps need no second generation of files where a norm that is not finite ends the run
(`on_nonfinite: "stop"`). A plan does so where it is asked to, or where the SSD has no room for two generations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final

from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.activation_tiers import in_whole_micro_batches
from ds_vertical.planner.budget.shortage import refusal
from ds_vertical.planner.budget.zero_init import ahead_of_steps
from ds_vertical.planner.candidate import (
    AS_GOOD,
    Candidate,
    Choice,
    beside_state,
    difference,
    fits,
    gaining_shares,
    held_share,
    in_pairs,
    kept_so,
    reading_ahead,
    settled,
    simplicity,
    solved_tiers,
    solved_ways,
    with_network,
    with_state_in_memory,
)
from ds_vertical.planner.linear_program import LpProblem, Solution
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, shape_of
from ds_vertical.planner.network import Network, level_choice, other_networks
from ds_vertical.types import Placement, TensorKind, Tier, TierBytes, per_tier

WINDOWS: Final = (1, 2, 3)
DELAYS: Final = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_BLOCKS: Final = (1, 2, 4)
_MICRO_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
_SIMULATED: Final = 6  # cases that the simulator ranks
_VARIED: Final = 2  # of them, those that it runs with every window
_SHARING: Final = 3  # shares of the state in host memory of each of the best cases that the simulator ranks
_KEEPING: Final = 3  # ways to keep of each case that the simulator ranks, besides none
_NEAR: Final = 1.25  # of the best case's seconds: what is ranked
_RUNNERS_UP: Final = 3
_EQUAL: Final = 1.01  # plans nearer than this are one as good as the other
_STATES: Final = (1.0, 0.0)  # shares of the state on SSD
_SHARED_STATES: Final = (0.8, 0.6, 0.4, 0.2)  # where nothing fits with all of it in one place
_MORE: Final = 0.02  # of a tier: steps by which advice on memory grows until what it says fits
_MORE_OF: Final = per_tier(
    {
        Tier.DEVICE: "device memory",
        Tier.HOST: "host memory (--host-memory says how much there is)",
        Tier.SSD: "free on the SSD (--nvme-path on another one)",
    }
)
_NO_SECONDS: Final = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)
_estimate_s: Final = attrgetter("estimate_s")
_LIBRARIES: Final = memory_budget.libraries(None)


class PlanError(ValueError):
    """No plan: names the tier, the bytes that are short, and what would help."""


@dataclass(frozen=True)
class Task:
    """What is to be trained: `tokens` per optimizer step over `num_ranks` ranks; `clip`: gradient_clipping.

    `micro_batch_size`: given instead of chosen. `seconds`: of the pieces for a micro-batch of so many sequences.
    `speculation`: with clipping, expect that the norm asks for none, so that layers are stepped early and nothing is redone.
    `stop`: end the run at a norm that is not finite (None: where that is what fits). `keep`: plan what forwards keep.
    `flops_per_byte`: of this device, operations in the time of a byte of its memory. `network`: how the ranks lie on nodes;
    `rounding`: they may round what they send each other. `least_file_bytes`: of a tensor's shard, from which on it has a file.
    """

    spec: ModelSpec
    tokens: int
    seconds: Callable[[int], Seconds]
    num_ranks: int = 1
    clip: float = 1.0
    micro_batch_size: int | None = None
    speculation: bool = False
    stop: bool | None = None
    keep: bool = True
    flops_per_byte: float = 0.0
    network: Network = Network()
    rounding: bool = False
    least_file_bytes: int = 1 << 20

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host's memory and SSD."""
        return self.num_ranks // self.network.num_nodes

    @property
    def certain(self) -> bool:
        """Whether every step is final before its norm is known: none is clipped, nor skipped for a loss scale."""
        return self.clip == 0 and self.spec.dtype != "fp16"

    def counts(self) -> Iterator[tuple[int, int]]:
        """(sequences per micro-batch, M) with `tokens` or the least above it."""
        per_rank = self.spec.sequence_length * self.num_ranks
        total = max(1, -(-self.tokens // per_rank))
        for size in [self.micro_batch_size] if self.micro_batch_size else _MICRO_BATCH_SIZES:
            if size <= total:
                yield size, -(-total // size)


@dataclass(frozen=True)
class Plan:
    """The chosen candidate, and the best of the others by what it differs in."""

    chosen: Candidate
    runners_up: tuple[Candidate, ...]

    @property
    def best_otherwise(self) -> Candidate | None:
        """The best of those that keep by another policy."""
        return min((c for c in self.runners_up if c.choice.policy != self.chosen.choice.policy), key=_estimate_s, default=None)

    def differences(self) -> Iterator[tuple[str, float]]:
        """(what another plan does otherwise, its step over the chosen one's)."""
        for other in self.runners_up:
            yield difference(self.chosen.choice, other.choice), other.estimate_s / self.chosen.estimate_s


def choose(
    task: Task, machine: Machine, limits: TierBytes, further: tuple[memory_budget.BudgetItem, ...] = (_LIBRARIES,)
) -> Plan:
    """See [Note: choosing]. `limits`: bytes per tier for one rank. Raises PlanError where no setting fits."""
    norm = memory_budget.norm_copy(memory_budget.largest_trained(task.spec), machine.one_memory)
    search = _Search(task, machine, limits, (*further, norm))
    fitting: list[Candidate] = []
    for window, states in itertools.product((WINDOWS[0], 0), (_STATES, _SHARED_STATES)):
        search = replace(search, window=window, states=states)
        if fitting := search.fitting():
            break
    if not fitting:
        if (less := task.network.with_less_memory) is not None:
            return choose(replace(task, network=less), machine, limits, further)
        raise PlanError(refusal(replace(search, states=_STATES + _SHARED_STATES)))
    fitting.sort(key=_estimate_s)
    others = [other for c in fitting[:_VARIED] for other in _with_other_collectives(c, task.rounding)]
    fitting = sorted([*fitting, *others], key=_estimate_s)
    wider = [other for c in fitting[:_VARIED] for window in WINDOWS[1:] if fits(other := _with_window(c, window))]
    fitting = sorted([*fitting, *wider], key=_estimate_s)
    shared = [other for c in fitting[:_VARIED] for other in _with_shared_state(c)]
    fitting = sorted([*fitting, *shared], key=_estimate_s)
    reading = [other for c in fitting[:_VARIED] for other in reading_ahead(c)]
    return _decide(sorted([*fitting, *reading], key=_estimate_s))


def tune_timing(
    case: LpProblem, choice: Choice, windows: Sequence[int], delays: Sequence[float]
) -> tuple[Candidate, Candidate]:
    """The best timing for a model whose sizes and tiers are settled, and `choice` itself, which is taken where nothing is
    better by more than a hundredth or nothing fits. `delays`: of early steps; those that are not early keep theirs."""
    own = Candidate(choice, case, 0.0, ())
    found = [own]
    for delay in delays if case.early else (choice.delay,):
        held = held_share(case, delay, case.shape.in_files(TensorKind.STATE))
        for window in windows:
            terms = replace(case.terms, window=window, held_share=held, early_share=(1 - delay) * case.early)
            changed = replace(case, terms=terms, delay=delay)
            other = Candidate(replace(choice, window=window, delay=delay), changed, 0.0, ())
            found += [other] if fits(other) else []
    best = min(found, key=lambda candidate: candidate.estimate_s)
    return (best if best.estimate_s * _EQUAL < own.estimate_s else own), own


def tune_keeping(case: LpProblem, choice: Choice) -> tuple[Candidate, Candidate, Candidate | None]:
    """The best way to keep for a model whose sizes, timing and tiers are settled; and `choice` itself, which keeps nothing and
    is taken where nothing is better by more than a hundredth; and the best of those that keep otherwise than the first, None
    where there is no other. `case`: with the menu, of whose products a run may keep a part."""
    own = Candidate(choice, replace(case, menu=None), 0.0, ())
    found: list[Candidate] = []
    for given, solution in solved_ways(settled(case, choice), in_parts=True):
        kept = solution.kept_share(given)
        made = kept_so(choice, given, solution, kept)
        found += [made] if kept is not None and fits(made) else []
    ranked = _nearest(found)
    best = _simplest(ranked) or own
    taken = best if best.estimate_s * _EQUAL < own.estimate_s else own
    others = (candidate for candidate in (*ranked, own) if candidate.choice.kept != taken.choice.kept)
    return taken, own, min(others, key=_estimate_s, default=None)


def tune_tier(case: LpProblem, choice: Choice, share: float) -> tuple[Candidate | None, Candidate, Candidate | None]:
    """The best tier, or pair of tiers, for what a `share` of the cells keeps by the one policy of the case's menu, for a model
    as `tune_keeping` has it; None where none has room for all of it. And `choice` itself, which keeps nothing, and the best of
    the other tiers, None where no other one has room."""
    own = Candidate(choice, replace(case, menu=None), 0.0, ())
    found: list[Candidate] = []
    for given, solution, ways in solved_tiers(settled(case, choice), share):
        made = (kept_so(choice, given, solution, kept) for kept in ways)
        found += [candidate for candidate in made if fits(candidate)][:1]
    best = _simplest(found)
    others = (candidate for candidate in found if candidate is not best)
    return best, own, min(others, key=_estimate_s, default=None)


def _nearest(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that the simulator ranks, the best by the program first."""
    return sorted(found, key=lambda candidate: candidate.program_s)[:_KEEPING]


def _simplest(ranked: Sequence[Candidate]) -> Candidate | None:
    """Of those as good as the best by the simulator."""
    least = min((candidate.estimate_s for candidate in ranked), default=0.0)
    return min((c for c in ranked if c.estimate_s <= _EQUAL * least), key=simplicity, default=None)


# ---- cases


@dataclass(frozen=True)
class _Search:
    """What every case of a search shares; `limits`: bytes per tier for one rank, `further`: what takes memory besides;
    `window`: layers fetched ahead, the first one that is tried; `states`: shares of the state on SSD."""

    task: Task
    machine: Machine
    limits: TierBytes
    further: tuple[memory_budget.BudgetItem, ...]
    window: int = WINDOWS[0]
    states: tuple[float, ...] = _STATES

    def fitting(self) -> list[Candidate]:
        """What the simulator is to rank, in no order; empty where nothing fits."""
        found = ((*entry, linear_program.solve(entry[0])) for entry in self.cases())
        solved = [(case, size, blocks, solution) for case, size, blocks, solution in found if solution is not None]
        solved.sort(key=lambda entry: entry[3].seconds)
        return [c for entry in _spread(_preferred(solved, self.task)) for c in _ways_to_keep(entry) if fits(c)]

    def cases(self) -> Iterator[tuple[LpProblem, int, int]]:
        """(case, sequences per micro-batch, blocks per layer)"""
        task = self.task
        for size, count in task.counts():
            both = ((_Sizes(size, count, blocks), timing) for blocks in self._all_blocks for timing in self._all_timings)
            varied = [each for each in both if self._has_files(*each)]
            untimed = [self._case(sizes, timing) for sizes, timing in varied]
            if all(map(linear_program.is_short, untimed)):
                yield from ((case, size, sizes.blocks_per_layer) for case, (sizes, _) in zip(untimed, varied, strict=True))
                continue  # nothing is timed that would not fit
            seconds = task.seconds(size)
            yield from ((self._case(sizes, timing, seconds), size, sizes.blocks_per_layer) for sizes, timing in varied)

    def _has_files(self, sizes: _Sizes, timing: _Timing) -> bool:
        """Whether state is where the timing has it: that of a layer's few trained elements stays in host memory."""
        gradients = self.task.spec.gradients(sizes.blocks_per_layer)
        if not timing.state_on_ssd or gradients is None:
            return True
        return max(gradients) / self.task.num_ranks * 4 >= self.task.least_file_bytes

    @property
    def _all_blocks(self) -> list[int]:
        return [b for b in _BLOCKS if b == 1 or 2 * b <= len(self.task.spec.block_elements)]

    @property
    def _all_timings(self) -> list[_Timing]:
        return [timing for on_ssd in self.states for timing in self._timings(on_ssd)]

    def _timings(self, state_on_ssd: float) -> Iterator[_Timing]:
        """Only state on SSD has a second generation, without which nothing is stepped before the norm but in place."""
        task, delays = self.task, [delay for delay in DELAYS if delay < 1]
        if (task.certain or task.speculation) and state_on_ssd and not (task.stop and task.certain):
            yield from (_Timing(state_on_ssd, delay, True) for delay in delays)
        if task.certain and state_on_ssd and (task.stop or (task.stop is None and self._lacks_generations)):
            yield from (_Timing(state_on_ssd, delay, True, True) for delay in delays)
        yield _Timing(state_on_ssd, 1.0, False)

    @cached_property
    def _lacks_generations(self) -> bool:
        """Whether the SSD has no room for two generations of files, whatever else is where."""
        sizes = _Sizes(*next(self.task.counts()), 1)
        return Tier.SSD in linear_program.shortage(self._case(sizes, _Timing(1.0, 0.0, True)))[0]

    def _case(self, sizes: _Sizes, timing: _Timing, seconds: Seconds | None = None) -> LpProblem:
        """`seconds`: of the pieces; None where only memory matters."""
        delay, early, task, one_memory = timing.delay, timing.early, self.task, self.machine.one_memory
        division = Division(
            *(sizes.sequences, sizes.blocks_per_layer, task.num_ranks),
            generations=2 if early and not timing.in_place else 1,
            part_elements=memory_budget.PART_ELEMENTS,
            apart=not one_memory,  # which the plan writes: `outside_layers`
            network=task.network if task.network.num_ranks > 1 else None,
            one_memory=one_memory,
        )
        on_ssd = timing.state_on_ssd
        held = memory_budget.waiting_share(delay, on_ssd) if early and task.certain else 1.0  # what may be redone is kept
        terms = memory_budget.BudgetTerms(
            *(sizes.num_micro_batches, self.window),
            **{"held_share": held, "one_memory": one_memory, "shares_state": 0 < on_ssd < 1, **memory_budget.LEAN},
            early_share=(1 - delay) * early,
        )
        shape = with_state_in_memory(shape_of(task.spec, seconds or _NO_SECONDS, division), 1 - on_ssd)
        shape = memory_budget.as_run(shape, task.spec, one_memory, task.least_file_bytes)
        limits = beside_state(self.limits, shape)
        menu = None
        if seconds is not None and task.keep:
            menu = task.spec.menu(sizes.sequences, sizes.blocks_per_layer, seconds, task.flops_per_byte)
        further = (*self.further, memory_budget.scaled_gradient(math.ceil(memory_budget.largest_unit(shape)), task.certain))
        setup, build = ahead_of_steps(shape, task.spec.largest_parameter, self.further, one_memory, limits[Tier.HOST])
        fixed = shape, self.machine, terms, limits, delay, early, further, menu
        return LpProblem(*fixed, setup_bytes=setup, build_bytes=build)

    def remedies(self, lacking: Mapping[Tier, float]) -> Iterator[str]:
        """What would make some setting fit, each tried: fewer tokens, fewer ranks, more memory where it is `lacking`."""
        task, spec = self.task, self.task.spec
        halves = [spec.sequence_length >> n for n in range(1, spec.sequence_length.bit_length())]
        shorter = (length for length in halves if replace(self, task=replace(task, spec=spec.shortened(length))).fits())
        if length := next(shorter, None):
            yield f"a shorter sequence (--sequence-length {length})"
        counts = [task.tokens >> n for n in range(1, task.tokens.bit_length()) if task.tokens >> n >= spec.sequence_length]
        fewer = (tokens for tokens in counts if replace(self, task=replace(task, tokens=tokens)).fits())
        if not length and (tokens := next(fewer, None)):
            yield f"fewer tokens a step (--tokens-per-step {tokens})"
        if task.ranks_per_node > 1 and (ranks := self._fewer_ranks()):
            yield f"fewer ranks (--num-ranks {ranks})"
        yield self._more_memory(lacking)

    def fits(self) -> bool:
        """Whether any setting fits into the memory of all tiers."""
        return any(map(fits, self._least()))

    def placed(self) -> Iterator[tuple[LpProblem, Placement, int]]:
        """See `Refused`."""
        yield from ((c.case, c.shape.placement, c.choice.micro_batch_size) for c in self._least())

    def _least(self) -> Iterator[Candidate]:
        timings = [timing for timing in self._all_timings if not timing.delay or not timing.early]  # these hold least
        for (size, count), timing in itertools.product(self.task.counts(), timings):
            case = self._case(_Sizes(size, count, 1), timing)
            solution = linear_program.solve(case)
            if solution is not None:
                yield _candidate(case, size, 1, solution, window=self.window)

    def _fewer_ranks(self) -> int | None:
        """The most ranks, of those that halve them, with which a setting fits: each then has more of the host and the SSD."""
        ranks = self.task.ranks_per_node // 2
        while ranks:
            more = self.task.ranks_per_node / ranks
            limits = {t: limit and limit * (1.0 if t is Tier.DEVICE else more) for t, limit in self.limits.items()}
            network = self.task.network.with_ranks(ranks)
            if replace(self, task=replace(self.task, num_ranks=network.num_ranks, network=network), limits=limits).fits():
                return ranks
            ranks //= 2
        return None

    def _more_memory(self, lacking: Mapping[Tier, float]) -> str:
        """As much more as is lacking, and a little for what is rounded up; of all tiers where none is lacking by itself."""
        limited = {tier: limit for tier, limit in self.limits.items() if limit is not None}
        growing, more = lacking or dict.fromkeys(limited, 0.0), 1.0
        while True:
            grown = {tier: more * num_bytes + (more - 1) * limited[tier] for tier, num_bytes in growing.items()}
            if replace(self, limits={**self.limits, **{tier: limited[tier] + extra for tier, extra in grown.items()}}).fits():
                break
            more += _MORE
            growing = growing if more < 2 else {**dict.fromkeys(limited, 0.0), **growing}
        sharing = per_tier({Tier.DEVICE: 1, Tier.HOST: self.task.ranks_per_node, Tier.SSD: self.task.ranks_per_node})
        sizes = {tier: math.ceil(sharing[tier] * num_bytes / 1e9) for tier, num_bytes in grown.items()}
        return " and ".join(f"{size} GB more {_MORE_OF[tier]}" for tier, size in sizes.items())


@dataclass(frozen=True)
class _Sizes:
    """`sequences` of a micro-batch, micro-batches of a step, blocks of a layer."""

    sequences: int
    num_micro_batches: int
    blocks_per_layer: int


@dataclass(frozen=True)
class _Timing:
    """Where the state is, which share of the steps is delayed, whether the rest is stepped in the backward, and there in place:
    see [Note: in place]."""

    state_on_ssd: float
    delay: float
    early: bool
    in_place: bool = False


_Entry = tuple[LpProblem, int, int, Solution]  # a case, sequences per micro-batch, blocks per layer, what solves it


def _preferred(solved: Sequence[_Entry], task: Task) -> list[_Entry]:
    """Without steps in place where early steps with two generations fit, unless the task asks for them."""
    if task.stop or not any(case.early and case.shape.generations > 1 for case, *_ in solved):
        return list(solved)
    return [entry for entry in solved if not _in_place(entry[0])]


def _in_place(case: LpProblem) -> bool:
    return case.early and case.shape.generations == 1


def _ways_to_keep(entry: _Entry) -> Iterator[Candidate]:
    """See [Note: keeping]."""
    case, size, blocks, _ = entry
    made = (_candidate(given, size, blocks, solution, window=given.terms.window) for given, solution in solved_ways(case))
    found = [replace(candidate, menu=case.menu) for candidate in made]
    found.sort(key=lambda candidate: candidate.program_s)
    keeping = [c for c in found if c.choice.policy != "none" and c.program_s <= _NEAR * found[0].program_s]
    yield from [c for c in found if c.choice.policy == "none"][:1]
    yield from keeping[:_KEEPING]


def _with_shared_state(candidate: Candidate) -> Iterator[Candidate]:
    """The same sizes, window and way to keep with a share of the state in host memory, the best by the program."""
    choice, case = candidate.choice, candidate.case
    decides = any(what.startswith("SSD") for what in candidate.binding)  # otherwise fewer bytes gain nothing
    if decides and case.shape.in_files(TensorKind.STATE) == 1:
        found = gaining_shares(case, DELAYS[:-1:2] if case.early else (1.0,), candidate.program_s / AS_GOOD)
        sizes, window = (choice.micro_batch_size, choice.blocks_per_layer), case.terms.window
        made = (_candidate(given, *sizes, solution, window=window) for given, solution in found[:_SHARING])
        yield from (replace(c, case=replace(c.case, limits=case.limits), menu=candidate.menu) for c in made if fits(c))


def _spread(solved: Sequence[_Entry]) -> list[_Entry]:
    """The best cases, and of every micro-batch size and number of blocks the best one, if it is near them."""
    best: dict[tuple[int, int], _Entry] = {}
    for entry in solved:
        best.setdefault((entry[1], entry[2]), entry)
    near = [entry for entry in best.values() if entry[3].seconds <= _NEAR * solved[0][3].seconds]
    chosen = {id(entry): entry for entry in (*near[: _SIMULATED // 2], *solved)}
    return list(chosen.values())[:_SIMULATED]


def _candidate(case: LpProblem, size: int, blocks: int, solution: Solution, *, window: int) -> Candidate:
    count = case.terms.num_micro_batches
    placement = in_whole_micro_batches(solution.placement(case.shape.in_files(TensorKind.STATE)), count)
    kept = solution.kept_share(case)
    shape, terms = replace(case.shape, placement=placement, kept=kept), replace(case.terms, window=window)
    guessed = case.early and case.terms.held_share > case.forward_share
    levels = level_choice(case.shape.network)
    choice = Choice(size, count, blocks, window, case.delay, case.early, placement, guessed, kept, _in_place(case), levels)
    own = replace(case, shape=shape, terms=terms)
    return in_pairs(Candidate(choice, own, solution.seconds, solution.binding))


def _with_window(candidate: Candidate, window: int) -> Candidate:
    case = replace(candidate.case, terms=replace(candidate.case.terms, window=window, **memory_budget.LEAN))
    return in_pairs(replace(candidate, choice=replace(candidate.choice, window=window), case=case))


def _with_other_collectives(candidate: Candidate, rounding: bool) -> list[Candidate]:
    """With copies and sums of other ranks, the best of these with fewer copies, the best of these with fewer bits."""
    tried = [candidate] if candidate.choice.levels is not None else []
    for what in ("ranks", "copies", "bits") if rounding else ("ranks", "copies"):
        best = min((c for c in tried if c.choice.levels is not None), key=_estimate_s, default=candidate)
        network = best.shape.network or Network()
        tried += [other for each in other_networks(network, what) if fits(other := in_pairs(with_network(best, each)))]
    return tried[1:]


# ---- the decision


def _decide(fitting: Sequence[Candidate]) -> Plan:
    """`fitting`: the fastest first."""
    near = [c for c in fitting if c.estimate_s <= _EQUAL * fitting[0].estimate_s]
    chosen = min(near, key=simplicity)
    others: dict[str, Candidate] = {}
    for candidate in fitting:
        others.setdefault(difference(chosen.choice, candidate.choice), candidate)
    others.pop("", None)  # the chosen one
    first = tuple(others.values())[:_RUNNERS_UP]
    keeping = next((c for c in fitting if c.choice.policy != chosen.choice.policy), None)
    return Plan(chosen, first if keeping is None or keeping in first else (*first, keeping))
