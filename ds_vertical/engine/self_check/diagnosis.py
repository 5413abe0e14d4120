"""What the self-check tells a user: which order failed or differs, where, what may be the cause, and what to write."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Final

import torch

from ds_vertical.engine.self_check.comparison import Difference, layer_of, where
from ds_vertical.engine.self_check.plain_pass import PlainOrderError
from ds_vertical.errors import LayerError
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.schedule.events import Event, Op

_MOST_SUSPECTS: Final = 5  # that a message names
_RESOURCES: Final = (torch.OutOfMemoryError, MemoryError, OSError)  # what is lacking there is no difference of the orders
_MEND: Final = "change what the model does there"
_FALSE: Final = "vertical_schedule.self_check: false"
_TRAIN: Final = f"{_FALSE} trains without this check"


class SelfCheckError(LayerError):
    """The schedule computes something else than torch's own order, or one of the two raises an exception, which is the cause of
    this one. The message names the layer, the micro-batch and the tensor, and what to do."""


class Diagnosis:
    """Makes the errors of one self-check. `order`: the schedule's. `state`: what is known of modules' state; None: nothing."""

    def __init__(self, layers: LayerMap, order: str, state: ForwardState | None) -> None:
        self._layers = layers
        self._order = order
        self._state = state

    def of_difference(self, found: Difference) -> SelfCheckError:
        """Both orders have run, and this is the first thing in which they differ."""
        return self._error(found.what, found.layer, self._remedy)

    @property
    def _remedy(self) -> str:
        other = 'set vertical_schedule.order to "horizontal", which runs one micro-batch after another, or '
        return f"{'' if self._order == 'horizontal' else other}{_MEND}; {_TRAIN}"

    def of_evaluation(self, micro_batch: int, distance: float) -> SelfCheckError:
        """Layer-major order gives another result of a micro-batch, in an evaluation, than one micro-batch after the other."""
        suspects = _some(sorted(self._state.unsure) if self._state is not None else ())
        return SelfCheckError(
            f"vertical_schedule.self_check: in an evaluation the result of micro-batch {micro_batch} differs by {distance:.1e}"
            " of its norm from that in stock's order; what the forward changes, and may be the cause:"
            f' {suspects}; nothing has been evaluated; set vertical_schedule.order to "horizontal", which runs one micro-batch'
            f" after another, or {_MEND}; {_FALSE} evaluates without this check"
        )

    def of_plain_order(self, failure: Exception, place: tuple[str, int | None], micro_batch: int) -> Exception:
        """What to raise where torch's own order raises `failure`. `place`: the phase, and the block (None: no one's). Where
        that pass cannot run this model, a PlainOrderError."""
        phase, block = place
        layer = None if block is None else layer_of(self._layers, block)
        at = f"in the {phase}{'' if block is None else f' {where(self._layers, block)}'}, for micro-batch {micro_batch}"
        if isinstance(failure, PlainOrderError):
            what = f"the check's own pass raises {_named(failure.__cause__ or failure)} {at}: {_first_line(failure)}"
            return PlainOrderError(f"vertical_schedule.self_check: {what}; {_TRAIN}")
        return self._raised(failure, f"torch's own order raises {_named(failure)} {at}", layer, f"{_MEND}; {_TRAIN}")

    def of_schedule(self, failure: Exception) -> Exception:
        """What to raise where the schedule raises `failure`, and torch's own order has raised nothing."""
        at, layer = self._place_of(failure)
        what = f"the schedule raises {_named(failure)} {at}, where torch's own order raises nothing"
        return self._raised(failure, what, layer, self._remedy)

    def _raised(self, failure: Exception, what: str, layer: int | None, remedy: str) -> Exception:
        """What to raise in the place of an exception: our own refusals, and what is lacking, stay and get a note. Without the
        check a step would be refused as well, and says itself what to write."""
        lacking = isinstance(failure, _RESOURCES)
        if lacking or type(failure).__module__.startswith("ds_vertical."):
            failure.add_note(
                f"vertical_schedule.self_check: {what}; nothing has been trained{f'; {_TRAIN}' if lacking else ''}"
            )
            return failure
        error = self._error(f"{what}: {_first_line(failure)}", layer, remedy)
        error.__cause__ = failure
        return error

    def _error(self, what: str, layer: int | None, remedy: str) -> SelfCheckError:
        suspects = self._suspects(layer)
        told = f"; what changes there, and may be the cause: {suspects}" if suspects else ""
        return SelfCheckError(f"vertical_schedule.self_check: {what}{told}; nothing has been trained; {remedy}")

    def _suspects(self, layer: int | None) -> str:
        """Items of state of which it is known that their contents change in a layer."""
        if layer is None or self._state is None:
            return ""
        blocks = self._layers.layers[layer] if layer < self._layers.num_layers else ()
        items = (each.item for each in self._state.learned.items if layer in each.writers or each.item.region in blocks)
        return _some([item.path for item in items])

    def _place_of(self, failure: Exception) -> tuple[str, int | None]:
        """In which layer the schedule was as it failed, told by the event under way."""
        event = _event_of(failure)
        if event is None:
            return "outside the forwards and backwards", None
        of = "" if event.micro_batch is None else f", for micro-batch {event.micro_batch}"
        if event.op is Op.HEAD:
            return f"in the forward behind the last layer, in the loss or in its backward{of}", self._layers.num_layers
        if event.op not in (Op.F, Op.B):
            return f"at {event}", None
        phase = "forward" if event.op is Op.F else "backward"
        if not isinstance(event.layer, int):
            return f"in the {phase} ahead of the first layer{of}", None
        block = where(self._layers, self._layers.layers[event.layer][0])
        return f"in the {phase} of {block}, or of the code between it and the layer ahead of it{of}", event.layer


def _some(names: Iterable[str]) -> str:
    """The first few names, each once, and how many more there are."""
    paths = list(dict.fromkeys(names))
    more = f" and {len(paths) - _MOST_SUSPECTS} more" if len(paths) > _MOST_SUSPECTS else ""
    return ", ".join(paths[:_MOST_SUSPECTS]) + more


def _event_of(failure: Exception) -> Event | None:
    """The event that was under way as an exception was raised."""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        if isinstance(event := frame.f_locals.get("event"), Event):
            return event
    return None


def _named(failure: BaseException) -> str:
    return type(failure).__name__


def _first_line(failure: Exception) -> str:
    return str(failure).strip().partition("\n")[0] or "(no message)"
