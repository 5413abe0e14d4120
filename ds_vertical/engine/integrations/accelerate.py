"""Accelerate's data loaders: the engine sees what they yield next, and the script finds them as stock's order does.

`Accelerator.backward` makes the engine's calls itself, with the boundary from `sync_gradients`. That number comes from
`end_of_dataloader`, which a loader sets as it yields its last batch. So Accelerate's own loaders are wrapped, outside of
torch's that they hold, and the mark is shown as of the batch that the script has: see [Note: the last batch] in
`model/look_ahead`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Final, Protocol

from ds_vertical.model.look_ahead import Peekable, is_fetching

_LOADERS: Final = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")


class _Loader(Protocol):
    def __iter__(self) -> Iterator[object]: ...


def see_accelerate_loaders() -> None:
    """Wrap Accelerate's data loaders from now on in this process. Twice is harmless. Raises RuntimeError for an accelerate
    that has no such loaders."""
    from accelerate import data_loader

    for name in _LOADERS:
        loader = getattr(data_loader, name, None)
        if loader is None or "__iter__" not in vars(loader) or not hasattr(loader, "end_of_dataloader"):
            raise RuntimeError(
                f"accelerate.data_loader.{name}: this version of accelerate has no such data loader, or one of another kind;"
                " install the version that constraints.txt names"
            )
        _wrap(loader)


def _wrap(loader: type[_Loader]) -> None:
    stock = vars(loader)["__iter__"]
    if hasattr(stock, "stock"):
        return

    @wraps(stock)
    def iterate(self: _Loader) -> Iterator[object]:
        return stock(self) if is_fetching() else Peekable(stock(self), self)

    iterate.stock = stock  # type: ignore[attr-defined]
    loader.__iter__ = iterate
