"""Which ranks make the nodes of a run, and what is refused; in which order a unit's collectives are issued.

Training over levels is in test_levels_engine.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.distributed import ranks
from ds_vertical.distributed.levels import Issued
from ds_vertical.distributed.topology import Topology
from ds_vertical.distributed.unit_levels import UnitLevels, room_of_copies, topology_on
from ds_vertical.engine.run_log import network_of
from ds_vertical.errors import ConfigError
from ds_vertical.planner.network import Network, level_choice, other_networks
from ds_vertical.schedule.levels import Arrival
from ds_vertical.types import PRE, SUF, LevelSettings
from ds_vertical.types import Unit as UnitName

A, B = "a boot1", "b boot2"


@pytest.mark.parametrize(
    ("hosts", "settings", "found"),
    [
        ([A, A, B, B], LevelSettings(2), Topology(4, 2, 2)),
        ([A, A, A, A], LevelSettings(2), Topology(4, 2, 2)),
        ([A, A, A, A, B, B, B, B], LevelSettings(2, gradients=4), Topology(8, 4, 2)),
        ([A, A], LevelSettings(2), Topology(2, 2, 2)),
        ([A] * 4 + [B] * 4, LevelSettings(2), Topology(8, 4, 2)),  # null: the ranks of a host
        ([A] * 8, LevelSettings(2), Topology(8, 2, 2)),  # which no slow link divides
        ([A] * 4 + [B] * 4, LevelSettings(2, gradients=2), Topology(8, 2, 2)),
        ([A] * 4 + [B] * 4, LevelSettings(1), Topology(8, 1, 1)),  # one level
    ],
)
def test_neighbours_on_one_host_are_a_node(hosts: list[str], settings: LevelSettings, found: Topology) -> None:
    assert topology_on(hosts, settings) == found
    network = network_of(settings, hosts)  # by which the bound and the simulator count
    assert network is not None and network.levels == settings.are_on
    assert not network.levels or (network.num_ranks, network.g, network.w) == (found.world, found.node, found.pair)


@pytest.mark.parametrize("ranks_per_host", [2, 4, 6, 8])
def test_the_keys_of_a_plan_make_the_topology_that_was_planned(ranks_per_host: int) -> None:
    hosts = [f"host{rank // ranks_per_host} boot" for rank in range(3 * ranks_per_host)]
    usual = Network(3, ranks_per_host, levels=True)
    for planned in (usual, *other_networks(usual, "ranks")):
        choice = level_choice(planned)
        section = load_section({"vertical_schedule": {"levels": choice and choice.keys}})
        assert section is not None
        assert topology_on(hosts, resolve(section).levels) == Topology(planned.num_ranks, planned.g, planned.w)


@pytest.mark.parametrize(
    ("hosts", "size", "told"),
    [
        ([A, A, B, B], 3, "(vertical_schedule.levels.ranks_per_node): got 3, which does not divide the number of ranks, 4"),
        ([A, B, A, B], 2, "zero_hpz_partition_size (vertical_schedule.levels.ranks_per_node): got 2, for which hosts"),
        (
            [A, B, A, B],
            2,
            "ranks of a host must be neighbours, but a has ranks 0, 2; b has ranks 1, 3; list each host once",
        ),
        ([A, A, A, B, B, B], 2, "ranks_per_node): got 2, which does not divide"),
        ([A, A, A, A, B, B], 2, "ranks_per_node): got 2, for which hosts share the ranks in another way: hosts need equal"),
        ([A, A, B, B], 4, "a node is not on one host: rank 0 on a, rank 1 on a, rank 2 on b, rank 3 on b"),
    ],
)
def test_ranks_that_make_no_such_nodes_are_refused(hosts: list[str], size: int, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology_on(hosts, LevelSettings(size))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "settings", "key"),
    [
        ([A] * 3 + [B] * 3, LevelSettings(2), "ranks_per_node"),
        ([A] * 6 + [B] * 6, LevelSettings(4, gradients=6), "ranks_per_node"),
        ([A] * 6 + [B] * 6, LevelSettings(4, gradients=5), "ranks_per_node"),
        ([A] * 9 + [B] * 9, LevelSettings(6, gradients=2), "ranks_per_node"),
        ([A] * 4 + [B] * 4, LevelSettings(2, gradients=3), "gradients"),
        ([A] * 4 + [B] * 4, LevelSettings(2, gradients=1), "gradients"),
        ([A] * 4 + [B] * 4, LevelSettings(2, gradients=8), "gradients"),
        ([A] * 4, LevelSettings(4, gradients=2), "gradients"),
    ],
)
def test_whoever_follows_a_refusal_is_not_refused_again(hosts: list[str], settings: LevelSettings, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology_on(hosts, settings)
    told = str(caught.value)
    assert f"levels.{key}" in told.partition(": got")[0]
    advice, both, _ = told.rpartition("write one of ")[2].partition(", and vertical_schedule.levels.gradients null")
    kept = replace(settings, gradients=None) if both else settings
    for number in advice.split(", "):
        followed = replace(kept, **{key: None if number == "null" else int(number)})
        assert followed.are_on or followed.gradients is None, "which is refused without levels"
        topology_on(hosts, followed)


def test_a_node_over_several_hosts_is_told_ahead_of_numbers_that_do_not_fit_it() -> None:
    with pytest.raises(ConfigError, match="a node is not on one host"):
        topology_on([A] * 4 + [B] * 4, LevelSettings(8, gradients=4))


# ---- what room copies have


@pytest.mark.parametrize(("share", "parts"), [(0.0, []), (0.25, [64]), (0.5, [64, 32]), (0.75, [64, 32, 16]), (1.0, None)])
def test_room_is_reserved_for_the_copies_that_the_budget_counts(share: float, parts: list[int] | None) -> None:
    """Layers are kept first, of which the largest may be; then the large embedding and head. A part has the shards of two of
    four ranks."""
    elements: dict[UnitName, int] = {PRE: 256, 0: 16, 1: 64, 2: 32, SUF: 512}
    units: dict[UnitName, list[Any]] = {unit: [shard_of_four(count)] for unit, count in elements.items()}
    expected = sum(parts) if parts is not None else 64 + 32 + 16 + 256
    assert room_of_copies(units, [PRE], share, Topology(4, 2, 2)) == 4 * expected


def shard_of_four(numel: int) -> Any:
    param: Any = torch.nn.Parameter(torch.zeros(2 * numel))
    param.ds_tensor, param.partition_numel = torch.zeros(numel // 2), lambda: numel // 2
    return param


# ---- in which order a unit's collectives are issued


class Line:
    """Writes down what one rank of four issues, in place of its collectives with the others."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, torch.dtype]] = []

    def spread(self, share: torch.Tensor, *_: Any, **_named: Any) -> Issued[torch.Tensor]:
        self.issued.append(("spread", share.dtype))
        return self._over(share.expand(2, -1))

    def gather(self, copy: torch.Tensor | Issued[torch.Tensor], **_: Any) -> Issued[torch.Tensor]:
        part = copy.wait() if isinstance(copy, Issued) else copy
        self.issued.append(("gather", part.dtype))
        return self._over(part)

    def _over(self, result: torch.Tensor) -> Issued[torch.Tensor]:
        issued: Issued[torch.Tensor] = Issued(lambda last: last)
        issued.end([result]).set()
        return issued


class Unit:
    """This rank's levels, and the parameters of a unit in fp32 and bf16. `lacks`: the dtype of shards that find no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lacks: torch.dtype | None = None) -> None:
        monkeypatch.setattr(ranks, "rank", lambda: 0)
        self.lacks, self.line = lacks, Line()
        self.params = [self._param(dtype) for dtype in (torch.float32, torch.bfloat16)]
        self.levels = UnitLevels.__new__(UnitLevels)
        state = {"topology": Topology(4, 2, 2), "_collectives": self.line, "_settings": LevelSettings(2), "beside": None}
        vars(self.levels).update(state, _rest=None, _copies={}, _shard_of=self.shard)

    def shard(self, param: Any) -> torch.Tensor:
        if param.dtype == self.lacks:
            raise torch.OutOfMemoryError("no room")
        return param.ds_tensor

    def _param(self, dtype: torch.dtype) -> Any:
        param: Any = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
        param.ds_tensor, param.partition_numel = torch.zeros(2, dtype=dtype), lambda: 2
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        return param


SPREADS = [("spread", torch.float32), ("spread", torch.bfloat16)]
GATHERS = [("gather", torch.float32), ("gather", torch.bfloat16)]


def test_a_rank_that_joins_issues_the_collectives_of_two_dtypes_in_the_others_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a device all are in one line. Where ranks 0 and 3 of four join, another order has each wait for the next one."""
    own, joins = Unit(monkeypatch), Unit(monkeypatch)
    for arrival, expected in ((Arrival(spreads=True, keeps=True), SPREADS + GATHERS), (Arrival(from_copy=True), GATHERS)):
        own.levels.start(0, own.params, arrival, 1)
        joins.levels.join(joins.params, arrival)
        assert own.line.issued == joins.line.issued == expected
        for unit in (own, joins):
            unit.line.issued.clear()
            for param in unit.params:
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    own.levels.renew(0, own.params, own.shard, 1)
    joins.levels.join_renewal(joins.params)
    assert own.line.issued == joins.line.issued == SPREADS


def test_chunks_that_find_no_memory_leave_no_collective_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not be counted, and the rank would join it once more."""
    unit = Unit(monkeypatch, lacks=torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        unit.levels.start(0, unit.params, Arrival(spreads=True), 1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        unit.levels.renew(0, unit.params, unit.shard, 1)
    assert unit.line.issued == [] and not unit.levels.stands(0)
