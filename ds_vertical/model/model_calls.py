"""How often the code of one micro-batch calls the model.

[Note: calls] The code may call the model several times, the same number of times in each micro-batch of a step. Each call is a
forward through all layers. A further call begins where the model is called once the call before has been through its last
block. Between the two the code does what it likes, and may have been parked ahead of it: so all micro-batches make their first
call, then all of them the second one. The number is verified: a call too many parks, one too few lets the code end early, and
the hub starts the step over with the number that it has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

from ds_vertical.errors import LayerError
from ds_vertical.model.state.restart import CallsMissed


class BlockRunner(Protocol):
    """What runs a micro-batch's blocks."""

    def run(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one block, by its number. Returns what the block returned."""
        ...

    def begin_call(self) -> None:
        """Take note that the blocks run from here on belong to a further call of the model."""


class ModelCalls:
    """The calls of the model by one micro-batch's code. See [Note: calls].

    `expected`: how many there should be; `park`: gives the turn to the hub. `number`: of the call that is under way, or was
    last. `done_block`: the last block that has run in it. `is_surplus`: the code is about to make a call that was not expected.
    `behind`: called in the code as each call has returned.
    """

    def __init__(self, num_blocks: int, expected: int, blocks: BlockRunner, park: Callable[[], None]) -> None:
        self.number = 0
        self.done_block = -1
        self.is_surplus = False
        self.behind: Callable[[], None] = lambda: None
        self._num_blocks = num_blocks
        self._expected = expected
        self._blocks = blocks
        self._park = park
        self._depth = 0  # calls of the model within one another

    def make(self, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Called in place of the model's own call, which is `call`. Returns what the call returned."""
        if self._depth == 0 and self.done_block == self._num_blocks - 1:
            self._begin()
        self._depth += 1
        try:
            result = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.behind()
        return result

    def _begin(self) -> None:
        """The call before is through with its blocks: another one begins."""
        while self.number + 1 >= self._expected:
            self.is_surplus = True
            self._park()
        self.number += 1
        self.done_block = -1
        self._blocks.begin_call()

    def refuse(self, number: int, micro_batch: int) -> NoReturn:
        """The code calls the model another number of times than expected. Raises CallsMissed with `number`, or LayerError where
        an earlier micro-batch of the step has made as many as expected."""
        if micro_batch == 0:
            raise CallsMissed(number)
        raise LayerError(
            f"micro-batch {micro_batch} of the step calls the model {'more' if number > self._expected else 'fewer'} than"
            f" {self._expected} time(s), which is what micro-batch 0 did; layer-major order needs the same number of calls in"
            " each micro-batch of a step: make them equal, or set vertical_schedule.enabled to false"
        )
