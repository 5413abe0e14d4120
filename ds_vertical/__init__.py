"""ds_vertical: layer-major ("vertical") training on DeepSpeed's ZeRO-Infinity.

`import ds_vertical` stays cheap: torch and DeepSpeed are imported when a name below is first used.

[Note: huge pages of tensors] The kernel maps fresh memory page by page, and zeroes each page: 131 MB are 32,000 faults of
4 KiB, or 63 of 2 MiB. torch asks the kernel for pages of 2 MiB, for each tensor in host memory of 2 MiB or more, where a
variable of the environment says so. It looks at the variable once, when it makes its first tensor. So the variable is written
here, which is ahead of the script's imports where `ds-vertical run` has launched it. The user's own value stands.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_vertical.config.section import VerticalConfig
    from ds_vertical.engine.api import initialize, prepare
    from ds_vertical.engine.engine import VerticalEngine
    from ds_vertical.engine.integrations.patch import patch
    from ds_vertical.engine.integrations.pretrained import save_pretrained
    from ds_vertical.errors import ConfigError, LoopError, NonFiniteError, OtherRankError, TornStateError
    from ds_vertical.io.checksums import ChecksumError
    from ds_vertical.model.look_ahead import look_ahead


__version__ = "0.1.0"
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # see [Note: huge pages of tensors]
__all__ = [
    "initialize",
    "prepare",
    "save_pretrained",
    "patch",
    "look_ahead",
    "VerticalEngine",
    "VerticalConfig",
    "ConfigError",
    "ChecksumError",
    "LoopError",
    "NonFiniteError",
    "OtherRankError",
    "TornStateError",
    "__version__",
]

_HOMES = {
    "initialize": "ds_vertical.engine.api",
    "prepare": "ds_vertical.engine.api",
    "save_pretrained": "ds_vertical.engine.integrations.pretrained",
    "patch": "ds_vertical.engine.integrations.patch",
    "look_ahead": "ds_vertical.model.look_ahead",
    "VerticalEngine": "ds_vertical.engine.engine",
    "VerticalConfig": "ds_vertical.config.section",
    "ConfigError": "ds_vertical.errors",
    "ChecksumError": "ds_vertical.io.checksums",
    "LoopError": "ds_vertical.errors",
    "NonFiniteError": "ds_vertical.errors",
    "OtherRankError": "ds_vertical.errors",
    "TornStateError": "ds_vertical.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_vertical' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
