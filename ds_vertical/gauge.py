"""How fast the host computes just now: seconds of a layer's passes, between the steps of a run that is measured.

[Note: gauge] On a shared machine the same work takes half as long again some minutes later, so rates that were measured ahead
of a run are not the run's. `ds-vertical limits` times the passes of a layer of the run's model, and `ds-vertical ab` does so
between any two steps of the run. No other work would do: what is bound by memory, by a cache or by arithmetic is slowed by
different neighbours. It is done by a process of its own (`timekeeper`), whose memory is not the run's, while the training
process is stopped (SIGSTOP), lest its transfers go on for nothing meanwhile. Both arms are stopped alike, so that neither has a
rest that the other has not.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

VARIABLE = "DS_VERTICAL_GAUGE"  # path of the socket of the process that measures


def measure_between_steps(model: Mapping[str, Any] | None, batch: Mapping[str, Any], threads: int) -> float | None:
    """Seconds of a block's forward and backward for one micro-batch now, measured while this process is stopped; None where
    nobody has asked for it, or answers. `model`: its Hugging Face configuration, None if it has none; `batch`: the fields of a
    `blocktime.Batch`."""
    path = os.environ.get(VARIABLE)
    if path is None or model is None:
        return None
    asked = {"pid": os.getpid(), "model": model, "batch": dict(batch), "threads": threads, "zero_linear": _zero_linear()}
    question = json.dumps(asked)
    try:
        with socket.socket(socket.AF_UNIX) as client, client.makefile("r") as answer:
            client.connect(path)
            client.sendall(f"{question}\n".encode())
            return float(answer.readline())
    except (OSError, ValueError):
        return None  # the run is worth more than the measurement


def asked() -> bool:
    """Whether somebody wants to know."""
    return VARIABLE in os.environ


def _zero_linear() -> bool:
    """Whether ZeRO-3's linear stands in torch's place."""
    import torch

    return torch.nn.functional.linear.__module__.startswith("deepspeed.")
