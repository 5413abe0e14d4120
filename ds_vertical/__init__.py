"""ds_vertical: layer-major ("vertical") training on DeepSpeed's ZeRO-Infinity.

`import ds_vertical` stays cheap: torch and DeepSpeed are imported when a name below is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "initialize",
    "prepare",
    "VerticalEngine",
    "VerticalConfig",
    "ConfigError",
    "ChecksumError",
    "NonFiniteError",
    "OtherRankError",
    "TornStateError",
    "__version__",
]

_HOMES = {
    "initialize": "ds_vertical.engine",
    "prepare": "ds_vertical.engine",
    "VerticalEngine": "ds_vertical.engine",
    "VerticalConfig": "ds_vertical.config",
    "ConfigError": "ds_vertical.config",
    "ChecksumError": "ds_vertical.checksums",
    "NonFiniteError": "ds_vertical.torn",
    "OtherRankError": "ds_vertical.failures",
    "TornStateError": "ds_vertical.torn",
}

if TYPE_CHECKING:
    from ds_vertical.checksums import ChecksumError
    from ds_vertical.config import ConfigError, VerticalConfig
    from ds_vertical.engine import VerticalEngine, initialize, prepare
    from ds_vertical.failures import OtherRankError
    from ds_vertical.torn import NonFiniteError, TornStateError


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_vertical' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
