"""The engine's routes to files and back: weights for others, checkpoints to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from ds_vertical.compat import accelerator, engine, stock_checkpoint
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import load, shared_dir, stock_format, zero_to_fp32
from ds_vertical.engine.checkpoint import save as checkpoint
from ds_vertical.engine.checkpoint.run_state import FurtherState
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.errors import CheckpointError
from ds_vertical.offload.param_store import ParamStore
from ds_vertical.types import RunSettings

# In this process DeepSpeed's own functions read our checkpoints, too.
stock_checkpoint.let_stock_read(
    lambda folder: (folder / zero_to_fp32.NAME).is_file(),
    lambda folder, exclude_frozen: dict[str, object](zero_to_fp32.Checkpoint(folder).state(exclude_frozen)),
)


class SavingEngine(engine.DeepSpeedEngine):
    """DeepSpeed's engine whose saves have every step in them. The subclass sets the attributes."""

    module: nn.Module
    optimizer: VerticalStage3
    vertical: RunSettings
    self_check: FirstStepCheck

    @property
    def param_store(self) -> ParamStore:
        """Where this rank's parameters rest between their uses."""
        raise NotImplementedError

    @property
    def further_state(self) -> Mapping[str, FurtherState]:
        """What checkpoints have besides, by its name there."""
        raise NotImplementedError

    @property
    def stream_seed(self) -> int | None:
        """Base of the micro-batches' random streams; None where the caller's own stream is used."""
        raise NotImplementedError

    @stream_seed.setter
    def stream_seed(self, seed: int | None) -> None:
        """Set the base, as a checkpoint that was loaded has it."""
        raise NotImplementedError

    @ranks.collective
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's, gathering whatever the JSON says, and the model's `config.json` beside the weights."""
        with self.optimizer.calls.call("save_16bit_model"), engine.gathering_on_save(self) as asked:
            if not asked:
                accelerator.log(
                    "ds_vertical: save_16bit_model gathers although zero_optimization."
                    "stage3_gather_16bit_weights_on_model_save is false: without it nothing would be saved"
                )
            saved = super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        config = getattr(self.module, "config", None)
        if ranks.rank() == 0 and config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(save_dir)
        return saved

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:  # override
        self.optimizer.live.refuse_inside("_zero3_consolidated_16bit_state_dict")
        with self.optimizer.calls.joined("_zero3_consolidated_16bit_state_dict"):
            return engine.consolidated_weights(self, lambda _, param: param.requires_grad or not exclude_frozen_parameters)

    # ---- checkpoints

    @ranks.collective
    def save_checkpoint(
        self,
        save_dir: str,
        tag: object = None,
        client_state: Mapping[str, object] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        portable: bool = False,
    ) -> Literal[True]:
        """Save the whole state as `<save_dir>/<tag>`; `tag`: None for `global_step<n>`. Complete or absent, whatever happens.

        Whatever tiers the state rests in; it may be loaded into others. `client_state`: tensors, numbers, strings and
        collections of these. `exclude_frozen_parameters`: leave out what is not trained; a load leaves it as it is.
        `portable`: for stock DeepSpeed, which loads it with parameters and optimizer in host memory.
        Raises CheckpointError, StorageError, OtherRankError, TornStateError.
        """
        self._check_between_steps("save_checkpoint")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        save = stock_format.save_stock if portable else checkpoint.save
        with self.optimizer.calls.call("save_checkpoint"):
            save(self, Path(save_dir), tag, dict(client_state), save_latest, exclude_frozen_parameters)
        if portable:
            return True
        self.optimizer.condition.note_good(Path(save_dir, tag))
        return True

    @ranks.collective
    def load_checkpoint(
        self,
        load_dir: str,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Replace the live state by a saved one; `tag`: None for the one that `latest` names. What follows has the bits of a
        run that did not stop. Returns the path of what was loaded (None: no `latest`) and the client state.

        Without optimizer states the weights and fp32 masters are loaded, and moments, steps and learning rates stay as they
        are. `load_module_strict`: False leaves parameters and buffers alone that only one of model and checkpoint has; with
        optimizer states those that are trained must be in both. Raises CheckpointError, with nothing touched: no checkpoint, a
        damaged one, one that does not fit, one of stock DeepSpeed with state on SSD or objects; OtherRankError.
        """
        self._check_between_steps("load_checkpoint")
        states, scheduler = (each and not load_module_only for each in (load_optimizer_states, load_lr_scheduler_states))
        wanted = load.Wanted(states, scheduler, run=not load_module_only, strict=load_module_strict)
        with self.optimizer.calls.call("load_checkpoint"):
            return self._load(Path(load_dir), None if tag is None else str(tag), wanted, custom_load_fn)

    def _load(
        self, folder: Path, tag: str | None, wanted: load.Wanted, custom_load_fn: object
    ) -> tuple[str | None, dict[str, object] | None]:
        """`load_checkpoint`, within the call of that name."""
        with ranks.all_or_none("load_checkpoint"):
            own = load.latest_tag(folder) if tag is None else tag
        found = shared_dir.agreed_latest(folder, own) if tag is None else ranks.all_gathered(own)[0]
        if found is None:
            return None, None
        if custom_load_fn is not None:
            raise CheckpointError(
                f"load_checkpoint(custom_load_fn={custom_load_fn!r}): not available here; leave it out: a load puts weights"
                " into their files, which no function could be given"
            )
        path, client_state = load.load(self, folder, found, wanted)
        self.optimizer.condition.note_good(folder / found)
        return path, client_state

    def _check_between_steps(self, call: str) -> None:
        """Raise unless the state is whole and at rest, or may be brought there."""
        if self.optimizer.live.num_inside and self.optimizer.calls.is_mine:
            raise CheckpointError(
                f"{call}: called within a step or an evaluation (by a signal's handler, a hook or the loss), where the state"
                " is half-way; call it between two steps: let a handler set a flag"
            )
        with ranks.all_or_none(call):
            self.optimizer.live.check_whole()
