"""How many bytes a step brings into one host over the link, computed from the collectives of the step."""

from __future__ import annotations

from typing import Any, Final

# Share that frames, TCP's acknowledgements and barriers add on this link: measured, not derived
OVERHEAD: Final = 0.02


def scheduled_bytes(engine: Any) -> dict[str, int]:
    """Bytes of the last step of a vertical engine, with the padding of shards: `gathered` counts the full parameters that it
    gathered, `reduced` the full gradients that it reduced."""
    import torch

    world_size = torch.distributed.get_world_size()
    found = {"gathered": 0, "reduced": 0}
    for event in engine.ran.events:
        kind = {"FETCH": "gathered", "REDUCE": "reduced"}.get(event.op.name)
        if kind is None or event.ahead:  # read for the next step, not gathered yet
            continue
        for param in engine.layers.units[event.layer]:
            num_elements = param.ds_tensor.ds_numel * world_size
            if kind == "gathered":
                found[kind] += num_elements * param.element_size()
            elif param.requires_grad:
                found[kind] += num_elements * 4  # gradients are reduced in fp32
    return found


def flat_inbound(scheduled: dict[str, int], world_size: int) -> float:
    """Bytes into one of two hosts where all ranks are one group, over gloo. gloo's ring has one edge into each host. A gather
    sends all ranks' shares but one over that edge. gloo reduces by an all-reduce, which sends as much twice."""
    share = (world_size - 1) / world_size
    return share * (scheduled["gathered"] + 2 * scheduled["reduced"])
