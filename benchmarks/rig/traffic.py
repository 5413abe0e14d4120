"""How many bytes a step brings into one host over the link, and how many the ranks of a host get from each other: computed
from the collectives of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

# Share that frames, TCP's acknowledgements and barriers add on this link: measured, not derived
OVERHEAD: Final = 0.02
_FP32_BYTES: Final = 4
_WEIGHT_BITS: Final = 8
# See `scheduled_bytes`
_KINDS: tuple[str, ...] = ("gathered", "reduced", "spread", "crossed", "gathered_within", "reduced_within")


def scheduled_bytes(engine: Any) -> dict[str, int]:
    """Bytes of the last step of a vertical engine, with the padding of shards: `gathered` counts the full parameters that it
    gathered over all ranks, `reduced` the full gradients that it reduced over all ranks; `spread` and `crossed` count those
    that it sent between nodes instead, quantised or not, `gathered_within` and `reduced_within` those that it then gathered and
    reduced over the ranks of a node, which send each other nothing of what they have in shared memory. A step of two halves has
    sent what its last one has sent, twice."""
    found = _scheduled(engine)
    return {name: count * (1 if engine.vertical.acco is None else 2) for name, count in found.items()}


def _scheduled(engine: Any) -> dict[str, int]:
    found = dict.fromkeys(_KINDS, 0)
    one_level, levels = engine.ran.copied is None, engine.vertical.levels
    over_nodes = levels.ranks_per_node > 1  # else copies are of single ranks
    sent = _fetches_sent(engine)
    for event in engine.ran.events:
        params = engine.layers.units.get(event.layer, ())
        trained = [param for param in params if param.requires_grad]
        if event.op.name == "FETCH" and (one_level or over_nodes) and not event.ahead:  # one ahead is read, not gathered yet
            kind = "gathered" if one_level else "gathered_within"
            if not sent[event.layer].pop(0):
                continue
            found[kind] += sum(_full_bytes([param], param.element_size()) for param in params)
        elif event.op.name == "REDUCE" and not over_nodes:
            found["reduced"] += _full_bytes(trained, _FP32_BYTES)
        elif event.op.name == "REDUCE" and not engine.optimizer.shares_memory:
            bits = levels.gradient_bits[0] if levels.quantized_gradients else None
            found["reduced_within"] += _sent_bytes(trained, _FP32_BYTES, bits, levels.block)
        elif event.op.name == "SPREAD" and not over_nodes:
            found["gathered"] += sum(_full_bytes([param], param.element_size()) for param in params)
        elif event.op.name == "SPREAD":
            bits = _WEIGHT_BITS if levels.quantized_weights else None
            found["spread"] += sum(_sent_bytes([param], param.element_size(), bits, levels.block) for param in params)
        elif event.op.name == "CROSS" and over_nodes:
            bits = levels.gradient_bits[1] if levels.quantized_gradients else None
            found["crossed"] += _sent_bytes(trained, _FP32_BYTES, bits, levels.block)
    return found


def _fetches_sent(engine: Any) -> dict[Any, list[bool]]:
    """By unit, of each of the step's FETCHes whether anything is sent for it."""
    from ds_vertical.schedule.levels import arrivals

    copies, coming = engine.param_store.copies, arrivals(engine.ran.events, levels=engine.ran.copied is not None)
    shares = copies is not None and copies.shares_memory
    return {unit: [not (shares and (a.from_copy or a.keeps)) for a in each] for unit, each in coming.items()}


def _full_bytes(params: Sequence[Any], element_bytes: int) -> int:
    import torch

    return sum(param.ds_tensor.ds_numel for param in params) * torch.distributed.get_world_size() * element_bytes


def _sent_bytes(params: Sequence[Any], element_bytes: int, bits: int | None, block: int) -> int:
    """Of all ranks' shards, as they are sent. `bits`: of a quantised element; None: they are not quantised."""
    import torch

    from ds_vertical.distributed.quantize import Quantizer

    if bits is None:
        return _full_bytes(params, element_bytes)
    shards = [param.ds_tensor.ds_numel for param in params]
    return sum(Quantizer(bits, block).row_bytes(numel) for numel in shards) * torch.distributed.get_world_size()


def stock_bytes(engine: Any) -> dict[str, int]:
    """As `scheduled_bytes`, of a stock engine: each micro-batch gathers twice what does not stay on the device, and reduces all
    gradients in the dtype in which stock communicates them. With hpZ a step gathers it once over all ranks: the node's copy
    then holds until the optimizer's step, and all other gathers are out of it. With ZeRO-1 a step gathers and reduces once."""
    if engine.zero_optimization_stage() == 1:
        params = list(engine.module.parameters())
        reduced = sum(param.numel() for param in params if param.requires_grad) * engine.communication_data_type.itemsize
        gathered = sum(param.numel() * param.element_size() for param in params)
        return dict.fromkeys(_KINDS, 0) | {"gathered": gathered, "reduced": reduced}
    sizes = [(param, param.ds_tensor.ds_numel * engine.world_size) for param in engine.module.parameters()]
    gathered = sum(numel * param.element_size() for param, numel in sizes if not param.ds_persist)
    reduced = sum(numel * engine.communication_data_type.itemsize for param, numel in sizes if param.requires_grad)
    count = engine.gradient_accumulation_steps()
    over_all = 1 if engine.zero_hpz_partition_size() > 1 else 2 * count
    found = {"gathered": over_all * gathered, "reduced": count * reduced, "gathered_within": (2 * count - over_all) * gathered}
    return dict.fromkeys(_KINDS, 0) | found


def inbound(scheduled: dict[str, int], world_size: int, num_hosts: int) -> float:
    """Bytes into one of the hosts, over gloo. What is sent among all ranks goes along gloo's ring, which has one edge into
    each host. A gather sends all ranks' shares but one over that edge. gloo reduces by an all-reduce, which sends as much
    twice. What is sent between nodes comes into a host once, but for the host's own part."""
    share = (world_size - 1) / world_size
    flat = share * (scheduled["gathered"] + 2 * scheduled["reduced"])
    return flat + (num_hosts - 1) / num_hosts * (scheduled["spread"] + scheduled["crossed"])


def within(scheduled: dict[str, int], world_size: int, num_hosts: int) -> float:
    """Bytes that all ranks of one of the hosts get from each other, over gloo, where these ranks are a node. gloo's ring of all
    ranks has an edge into each rank of the host, of which one comes from another host; see `inbound`. What the ranks of a node
    gather or reduce among themselves comes into each rank but for its own part."""
    ranks, share = world_size // num_hosts, (world_size - 1) / world_size
    flat = share * (scheduled["gathered"] + 2 * scheduled["reduced"])
    return (ranks - 1) * (flat + scheduled["gathered_within"] + scheduled["reduced_within"])
