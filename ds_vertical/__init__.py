"""ds_vertical: layer-major ("vertical") training on DeepSpeed's ZeRO-Infinity.

`import ds_vertical` stays cheap: torch and DeepSpeed are imported when a name below is first used.
"""

from __future__ import annotations

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
