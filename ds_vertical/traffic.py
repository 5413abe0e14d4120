"""SSD bytes per step and rank, by regime: the table of the architecture's first section as functions.

P elements, M micro-batches, everything on SSD, bf16 parameters, fp32 Adam:

    stream              stock               vertical
    parameters read     4MP                 4P - 2P x handed over - kept layers (and `pre`) once
    gradients           4P out + 4P in      the same of the share that waits on SSD
    optimizer state     12P in + 12P out    12P in + 12P out
    parameters written  2P                  2P
    redo                -                   12P in + 14P out of the share that was redone
    activations         -                   (3L - 1)A in + 2LA out of each micro-batch on SSD

L layers, A bytes of what passes between two of them for one micro-batch. Of a lone micro-batch only the layers' inputs have to
wait: (L - 1)A each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_vertical.costs import Cost, ModelShape
from ds_vertical.machine import CostsError, check_share


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step to and from SSD, per stream."""

    parameters_read: float = 0.0
    gradients_read: float = 0.0
    state_read: float = 0.0
    activations_read: float = 0.0
    parameters_written: float = 0.0
    gradients_written: float = 0.0
    state_written: float = 0.0
    activations_written: float = 0.0

    @property
    def read(self) -> float:
        return self.parameters_read + self.gradients_read + self.state_read + self.activations_read

    @property
    def written(self) -> float:
        return self.parameters_written + self.gradients_written + self.state_written + self.activations_written


def stock_traffic(shape: ModelShape, num_micro_batches: int) -> Traffic:
    """Stock ZeRO-Infinity: every micro-batch reads all parameters twice, all gradients wait where the state rests."""
    placement = shape.placement
    return _optimizer(shape, 1.0, waiting_on_ssd=placement.state_on_ssd, parameters_read=2.0 * num_micro_batches)


def kept_layers(window: int) -> int:
    """Layers that stay at the turn: those that come back within the next window + 1 visits, and the last."""
    return 1 + (window + 1) // 2


def vertical_traffic(
    shape: ModelShape,
    num_micro_batches: int = 1,
    *,
    kept: int = 1,
    handed_over: float = 0.0,
    waiting: float = 0.0,
    redone: float = 0.0,
) -> Traffic:
    """Layer-major order. `kept`: `kept_layers(window)`. Shares in [0, 1]: `handed_over` in memory
    by delayed steps; `waiting`: gradients that wait for their step, of which the placement's share goes to SSD; `redone`:
    steps taken again after wrong speculation (their gradients wait, and are written whether or not they are read again).
    Of activations those of the micro-batches that the placement has on SSD count. Raises CostsError.
    """
    for name, share in (("handed_over", handed_over), ("waiting", waiting), ("redone", redone)):
        check_share(name, share)
    if kept < 0:
        raise CostsError(f"kept: got {kept!r}; write a number of layers, 0 or more")
    once = shape.pre_elements + sum(shape.layer_elements[max(0, shape.num_layers - kept) :])
    fetches = 2.0 - once / shape.num_elements - handed_over if shape.num_elements else 0.0
    activations = shape.placement.activation_tiers(num_micro_batches).count("ssd") * shape.activation_bytes
    layers, alone = shape.num_layers, num_micro_batches == 1
    passes = (layers - 1, layers - 1) if alone else (3 * layers - 1, 2 * layers)
    on_ssd = waiting * shape.placement.gradients_on_ssd
    table = _optimizer(shape, 1.0 + redone, waiting_on_ssd=on_ssd, parameters_read=fetches)
    return replace(table, activations_read=activations * passes[0], activations_written=activations * passes[1])


def _optimizer(shape: ModelShape, steps: float, *, waiting_on_ssd: float, parameters_read: float) -> Traffic:
    elements = shape.num_elements / shape.num_shards
    parameters = elements * shape.param_bytes * shape.placement.parameters_on_ssd
    gradients = elements * shape.gradient_bytes * waiting_on_ssd
    state = elements * shape.state_bytes * shape.placement.state_on_ssd
    return Traffic(
        parameters_read=parameters * parameters_read,
        gradients_read=gradients,
        state_read=state * steps,
        parameters_written=parameters * steps,
        gradients_written=gradients,
        state_written=state * steps,
    )


def traffic_of(costs: Sequence[Cost], shape: ModelShape) -> Traffic:
    """What a schedule's own events move, from `costs.event_costs`. A write of state brings its parameters along."""
    moved: dict[tuple[str, str], float] = {}
    for stage in (stage for cost in costs for job in cost for stage in job):
        moved[stage.lane, stage.purpose] = moved.get((stage.lane, stage.purpose), 0.0) + stage.num_bytes
    placement = shape.placement
    parameters, state = shape.param_bytes * placement.parameters_on_ssd, shape.state_bytes * placement.state_on_ssd
    written = moved.get(("ssd_write", "state"), 0.0)
    share = parameters / (parameters + state) if written else 0.0
    return Traffic(
        parameters_read=moved.get(("ssd_read", "parameters"), 0.0),
        gradients_read=moved.get(("ssd_read", "gradients"), 0.0),
        state_read=moved.get(("ssd_read", "state"), 0.0),
        activations_read=moved.get(("ssd_read", "activations"), 0.0),
        parameters_written=written * share,
        gradients_written=moved.get(("ssd_write", "gradients"), 0.0),
        state_written=written * (1 - share),
        activations_written=moved.get(("ssd_write", "activations"), 0.0),
    )
