"""The steps that the planner's simulation predicts for arms that `twonode.py` has measured, beside the measured ones.

    ds-vertical limits --path /tmp --out host.json
    python benchmarks/twonode_plan.py RECORD.json ... --machine host.json [--json FILE]

The two hosts of the rig are one machine, whose cores and SSD the ranks of both share. So with four ranks each has a fourth of
what `limits` finds, and what all ranks receive and round loads the same cores. A record has the links as `limits --links` has
measured them on the rig, and the seconds of the model's pieces, ahead of the arms and behind them. Pieces that a record lacks
are timed here, on a machine that may be faster or slower by now. All else is what `ds-vertical plan --nodes 2 --links` calls.
Arms that the simulation knows: flat, levels, int8, int8_int4. In records older than 2026-11-28 the ranks of a host sent each
other what they share in memory since, so their predictions are those of the checkout that made them. Where a record lacks the
rates of links beside a computation, links are taken to be as fast as by themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import twonode

from ds_vertical.cli.plan.fake_run import read_spec
from ds_vertical.cli.plan.pieces import time_pieces
from ds_vertical.model.hf import read_fields
from ds_vertical.planner import memory_budget
from ds_vertical.planner.candidate import Candidate, Choice
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import NET_CORES, Machine, Profile, read_profile
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, shape_of
from ds_vertical.planner.network import INT4_BYTES, INT8_BYTES, Network, level_choice
from ds_vertical.planner.simulate import SimulatedRun

WINDOW: Final = 1  # prefetch_layers of all arms
DELAY: Final = 0.25  # their optimizer_delay
NODES: Final = 2
# As `ds-vertical plan` has it for the CPU: gloo, and memory that a host's ranks share
ON_CPU: Final = dict.fromkeys(("reduces_twice", "in_memory", "sums_in_memory"), True)
# By the arm's name: how its collectives go, see `Network`
ARMS: Final[dict[str, Mapping[str, Any]]] = {
    "flat": {},
    "levels": {"levels": True},
    "int8": {"levels": True, "weight_bytes": INT8_BYTES},
    "int8_int4": {"levels": True, "weight_bytes": INT8_BYTES, "gradient_bytes": (None, INT4_BYTES)},
}


def rank_machine(profile: Profile, num_ranks: int, record: Mapping[str, Any]) -> Machine:
    """This machine as one of all ranks sees it, with the links of a record."""
    machine = profile.machine.shared(num_ranks).with_links(record["links"]["links"])
    # the load of one host's ranks is counted; the other host's ranks load the same cores
    return replace(machine, **{name: NODES * cost for name in NET_CORES if (cost := getattr(machine, name)) is not None})


def candidate(
    record: Mapping[str, Any], spec: ModelSpec, seconds: Seconds, network: Network, profile: Profile, machine: Machine
) -> Candidate:
    """An arm's step."""
    division = Division(
        1, num_shards=network.num_ranks, generations=2, part_elements=memory_budget.PART_ELEMENTS, network=network
    )
    terms = memory_budget.BudgetTerms(record["micro_batches"], WINDOW, held_share=DELAY, one_memory=True)
    shape = shape_of(spec, seconds, division)
    case = LpProblem(shape, machine, terms, profile.capacity, DELAY, True)
    choice = Choice(1, record["micro_batches"], 1, WINDOW, DELAY, True, shape.placement, levels=level_choice(network))
    return Candidate(choice, case, 0.0, ())


def core_seconds(run: SimulatedRun, machine: Machine, num_ranks: int) -> float:
    """Seconds of a core that all ranks take in a simulated step. Their pieces are timed side by side: these take all cores."""
    stages = [stage for _, stage, *_ in run.ran]
    share = {"compute": 1.0, "adam": machine.adam_share}
    computed = sum(share.get(stage.lane, 0.0) * stage.seconds for stage in stages)
    moved = sum(stage.num_bytes for stage in stages if stage.lane in ("ssd_read", "ssd_write"))
    transfers = num_ranks * (machine.ssd_core_s_per_byte or 0.0) * moved
    return (machine.host_cores * computed + sum(stage.core_s for stage in stages) + transfers) / run.num_steps


def predicted(record: Mapping[str, Any], profile: Profile) -> dict[str, dict[str, float]]:
    """By arm of a record: the predicted step, the measured one, and their ratio; and the seconds of a core that all ranks are
    predicted to take, beside the measured ones where the record has them."""
    ranks = NODES * record["ranks_per_node"]
    fields = read_fields(twonode.ROOT / "configs" / "models" / f"{record['model']}.json")
    spec = read_spec(record["model"], fields, record["tokens"], record["dtype"], None)
    seconds = Seconds(**record["pieces"]) if "pieces" in record else time_pieces(spec, fields, 1, ranks)
    machine = rank_machine(profile, ranks, record)
    found = {}
    for name in [name for name in record["arms"] if name in ARMS]:
        network = Network(NODES, record["ranks_per_node"], **ON_CPU, **ARMS[name])
        run, measured = candidate(record, spec, seconds, network, profile, machine).timeline, record["arms"][name]
        ratio = run.step_s / measured["step_s"]
        found[name] = {"predicted_s": run.step_s, "measured_s": measured["step_s"], "predicted_over_measured": ratio}
        found[name]["predicted_core_s"] = core_seconds(run, machine, ranks)
        found[name] |= {"measured_core_s": measured["core_s"]} if "core_s" in measured else {}
    return found


def main() -> int:
    """Prints a line for each arm of each record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="of `twonode.py --json`")
    parser.add_argument("--machine", required=True, help="file of `ds-vertical limits --out`")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    profile, results = read_profile(options.machine), {}
    for path in options.records:
        record = json.loads(path.read_text())
        results[path.name] = predicted(record, profile)
        for name, each in results[path.name].items():
            ratio = each["predicted_over_measured"]
            print(
                f"{record['rate']}, M = {record['micro_batches']}, {name}:"
                f" {each['predicted_s']:.2f} s predicted, {ratio:.2f} of measured; the ranks take"
                f" {each['predicted_core_s']:.2f} s of a core, measured {each.get('measured_core_s', math.nan):.2f}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
