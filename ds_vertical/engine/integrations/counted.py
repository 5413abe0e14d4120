"""What a trainer counts while its micro-steps run, so that a micro-step that runs again counts once.

A step that starts over calls the micro-steps again (`model/state/restart`), and the self-check runs each up to its model call.
A subclass of Trainer may have counted in the first run already: `self.num_seen += 1`, or TRL's lists of metrics. So all that
the trainer's attributes hold is noted ahead of a step, and put back ahead of each further run.

Noted are the attributes of the trainer and of its `state`, with the tensors, lists, dicts, sets and objects of the user's own
files that they lead to. What a micro-step counts elsewhere (in globals, in closures, in a logger) counts again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

from ds_vertical.model.state.containers import SIMPLE, TooManyError, containers, note_home_of_attribute
from ds_vertical.model.state.snapshot import Snapshot, without_collection
from ds_vertical.model.state.survey import Names, names_of_object

MOST_PARTS: Final = 1000  # below one attribute: noting more would cost milliseconds in each step
# attributes of Trainer that its micro-steps use and do not count in; some lead to whole data sets
_NO_COUNTERS: Final = frozenset(
    """accelerator args callback_handler data_collator eval_dataset lr_scheduler model model_wrapped
    optimizer processing_class ref_model train_dataset""".split()
)
_NO_COUNTERS_OF_STATE: Final = frozenset({"log_history"})  # a dict for each log entry since the run began


class Counted(Protocol):
    """What the user's code has counted since some moment."""

    def put_back(self) -> None:
        """Let all of it be as it was at that moment. May be called again."""
        ...


class CountedByTrainer:
    """What a trainer's attributes hold now. `say` gets a line for each attribute that has too many parts to be noted, where it
    would have to be put back."""

    def __init__(self, trainer: object, say: Callable[[str], None]) -> None:
        self._say = say
        self._too_large: list[str] = []
        holders = [(trainer, _NO_COUNTERS), (getattr(trainer, "state", None), _NO_COUNTERS_OF_STATE)]
        with without_collection():
            names = [self._names(holder, others) for holder, others in holders if hasattr(holder, "__dict__")]
            self._snapshot = Snapshot([], names, closely=False)

    def _names(self, holder: object, others: Collection[str]) -> Names:
        left_out = set(others)
        for name, value in vars(holder).items():
            if name in left_out or type(value) in SIMPLE:
                continue
            note_home_of_attribute(value)
            try:
                containers([value], most=MOST_PARTS)
            except TooManyError:
                left_out.add(name)
                self._too_large.append(f"{type(holder).__name__}.{name}")
        return names_of_object(holder, lambda name: name not in left_out)

    def put_back(self) -> None:
        """Let the attributes hold what they held then. Of a tensor that is too large to be copied, and that was written in
        place, `say` gets a line."""
        for change in list(self._snapshot.changes()):
            if change.before is None:
                self._tell(change.item.path)
            else:
                change.item.install(change.before)
        for path in self._too_large:
            self._tell(path)

    def _tell(self, path: str) -> None:
        self._say(f"{path} is too large to be put back: what this step's micro-steps count in it counts twice")
