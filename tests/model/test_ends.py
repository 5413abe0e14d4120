"""Which end of the model uses a parameter: what is guessed from sources, and what the steps find and mend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cutting import Cut, recorded
from models import tiny_gpt2, tiny_neox
from torch import nn
from torch.overrides import TorchFunctionMode
from toy import ToyBlock, ToyModel, ToyTraining, plain_step, toy_inputs

from ds_vertical import interrupts
from ds_vertical.model.layers import map_layers
from ds_vertical.model.state.restart import UseMissed
from ds_vertical.schedule.passes import TrainingStep, build_training


def names_of(model: nn.Module, **options: Any) -> dict[object, list[str]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {unit: [names[id(p)] for p in params] for unit, params in map_layers(model, apart=True, **options).units.items()}


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return OPTForCausalLM(OPTConfig(vocab_size=64, max_position_embeddings=16, tie_word_embeddings=False, **sizes))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes))


class Plain(nn.Module):
    """Embedding, layers, head, in the order of definition that is given."""

    def __init__(self, order: str = "embed blocks head") -> None:
        super().__init__()
        made = {
            "embed": lambda: nn.Embedding(9, 8),
            "blocks": lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
            "head": lambda: nn.Linear(8, 9),
        }
        for name in order.split():
            setattr(self, name, made[name]())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HeadBeside(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + nn.functional.linear(x, self.embed.weight)


class HeadAhead(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.head.weight
        x = self.embed(x) + weight[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Passed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.head
        x = self.embed(x) + head(torch.zeros(8)).sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.embed(x)
        for block in self.blocks:
            states = block(states)
        return self.head(states + self.embed(x))


class ByHand(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head.forward(x)


UNREADABLE: dict[str, Any] = {"Plain": Plain}
exec("class Unreadable(Plain):\n def forward(self, x): return Plain.forward(self, x)", UNREADABLE)


def used_behind(model: nn.Module) -> set[str]:
    behind = map_layers(model).used_behind
    return {name for name, param in model.named_parameters() if id(param) in behind}


def test_a_budget_splits_the_ends_gradients_where_sources_show_who_uses_what() -> None:
    assert used_behind(Plain()) == used_behind(Plain("head embed blocks")) == {"head.weight", "head.bias"}
    assert "lm_head.weight" in used_behind(tiny_neox(num_layers=2, hidden=32))


@pytest.mark.parametrize("kind", [HeadBeside, HeadAhead, Passed, Twice, ByHand, UNREADABLE["Unreadable"]])
def test_a_budget_counts_both_ends_gradients_together_where_sources_do_not(kind: Callable[[str], nn.Module]) -> None:
    for order in ("embed blocks head", "head embed blocks"):
        assert used_behind(kind(order)) == set()


def test_embedding_and_head_are_units_of_their_own() -> None:
    model = tiny_neox(num_layers=2, hidden=32)
    units = names_of(model)
    assert units["pre"] == ["gpt_neox.embed_in.weight"]
    assert sorted(units["suf"]) == ["gpt_neox.final_layer_norm.bias", "gpt_neox.final_layer_norm.weight", "lm_head.weight"]
    assert list(units) == ["pre", 0, 1, "suf"]
    assert map_layers(model, apart=True).outside.apart == ("pre", "suf")
    assert map_layers(model).outside.apart == () and "suf" not in map_layers(model).units


def test_the_source_is_asked_before_the_order_of_definition() -> None:
    """OPT's decoder defines its last norm ahead of its layers."""
    units = names_of(opt())
    assert "model.decoder.final_layer_norm.weight" in units["suf"]
    assert "model.decoder.embed_positions.weight" in units["pre"]


def test_tied_weights_leave_one_unit_that_stays() -> None:
    layers = map_layers(tiny_gpt2(num_layers=2, hidden=32, tied=True), apart=True)
    assert set(layers.units) == {"pre", 0, 1} and layers.outside.apart == ()


def test_a_list_of_parameters_is_not_the_suffixs_though_it_is_defined_behind_the_head() -> None:
    model = Bare()
    model.late = nn.ParameterList([torch.ones(4)])
    units = names_of(model, paths=["blocks"])
    assert "late.0" in units["pre"] and all(name.startswith("head") for name in units["suf"])


def test_what_runs_between_two_stacks_stays() -> None:
    layers = map_layers(t5(), apart=True)
    assert "pre" not in layers.outside.apart


# ---- what steps find


class Bare(ToyModel):
    """No glue: the embeddings in front, the head behind, and nothing between."""

    def body(self, side: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, side)
        return self.head(hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(torch.sigmoid(self.side(inputs)), self.embed(inputs)).square().mean()


class Penalised(Bare):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + 0.1 * self.embed.weight.square().sum()


class Peeking(Bare):
    """The prefix computes with the head's weights, from outside any module."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(torch.sigmoid(self.side(inputs)), self.embed(inputs) * self.head.weight.mean()).square().mean()


class Catching(Bare):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = super().forward(inputs)
        try:
            return loss + self.embed.bias.sum()
        except Exception:
            return loss


class Scaled(ToyBlock):
    def forward(self, hidden: torch.Tensor, side: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, side) * scale


class Given(Bare):
    """Each block is given a parameter of the prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def body(self, side: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, side, self.embed.bias)
        return self.head(hidden)


class Asking(Bare):
    """The suffix asks what the embedding is, not what it holds."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.embed.weight.dtype is torch.float32 and self.embed.weight.is_floating_point()
        return super().forward(inputs.to(self.head.weight.dtype))


def made(kind: Callable[[], ToyModel]) -> ToyModel:
    torch.manual_seed(0)
    return kind()


def bodies(model: ToyModel, count: int) -> list[Callable[[], torch.Tensor]]:
    return [partial(model, inputs) for inputs in toy_inputs(count)]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Bare, []),
        (Asking, []),
        (ToyModel, ["pre"]),
        (Penalised, ["pre"]),
        (Peeking, ["suf"]),
        (Catching, ["pre"]),
        (Given, ["pre"]),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_use_elsewhere_is_found_and_the_step_has_the_bits_of_plain_autograd(
    kind: Callable[[], ToyModel], found: list[str], count: int
) -> None:
    """Weights are NaN while they are away: what is not found shows."""
    model, plain = made(kind), made(kind)
    training = ToyTraining(model, apart=True)
    missed: list[str] = []

    def step() -> Any:
        while True:
            schedule = build_training(TrainingStep(4, count, outside=training.layers.outside))
            try:
                return training.step(schedule, bodies(model, count), 7)
            except UseMissed as miss:
                missed.append(miss.unit)
                training.layers.apart.difference_update(training.layers.missed)  # as all ranks do ahead of the next run
                assert len(missed) < 3

    for _ in range(2):
        losses, grads = step()
        expected, expected_grads = plain_step(plain, bodies(plain, count), 7)
        training.optimizer.flush()
        exact = kind in (Bare, Asking, ToyModel)  # others use a parameter twice in a micro-batch: sums of another order
        torch.testing.assert_close(losses, expected, rtol=0.0 if exact else 1e-6, atol=0.0)
        torch.testing.assert_close(grads, expected_grads, rtol=0.0 if exact else 1e-5, atol=0.0 if exact else 1e-6)
    assert missed == found
    assert set(training.layers.outside.apart) == {"pre", "suf"} - set(found)


class Failing(Bare):
    """Another error hides what was found."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = super().forward(inputs)
        try:
            return loss + self.embed.bias.sum()
        except Exception as error:
            raise ArithmeticError("no loss") from error


def test_a_step_that_fails_leaves_the_next_schedule_as_it_was() -> None:
    """Other ranks have not found it, and their schedules must not differ from this one's."""
    model = made(Failing)
    training = ToyTraining(model, apart=True)
    schedule = build_training(TrainingStep(4, 2, outside=training.layers.outside))
    with pytest.raises(ArithmeticError, match="no loss"):
        training.step(schedule, bodies(model, 2), 7)
    assert training.layers.outside.apart == ("pre", "suf") and training.layers.missed == {"pre"}


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Within(Bare):
    """A mode of the user's around all blocks, and one around each of them."""

    def body(self, side: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        with Passing():
            for block in self.blocks:
                with Passing():
                    hidden = block(hidden, side)
            return self.head(hidden)


def modes_on() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


def test_a_mode_of_the_users_around_the_blocks_outlives_the_watch() -> None:
    model, plain = made(Within), made(Bare)
    training = ToyTraining(model, apart=True)
    schedule = build_training(TrainingStep(4, 2, outside=training.layers.outside))
    losses, _ = training.step(schedule, bodies(model, 2), 3)
    assert losses == plain_step(plain, bodies(plain, 2), 3)[0]
    assert modes_on() == []


def test_an_interrupt_in_the_watch_leaves_the_users_modes_as_they_were() -> None:
    model = made(Within)
    training = ToyTraining(model, apart=True)
    schedule = build_training(TrainingStep(4, 1, outside=training.layers.outside))

    def step() -> None:
        try:
            training.step(schedule, bodies(model, 1), 3)
        finally:
            interrupts.take_back()  # as where a call of the engine is over

    with recorded() as found:
        step()
    names = ("_replace_modes", *(f"OutsideWatch.{name}" for name in ("watching", "paused", "_enter", "_leave", "_look_at")))
    own = [site for site in found if site.function.startswith(names)]
    cuts = [Cut(site, number) for site in own for number in range(1, found[site] + 1)]
    assert len(cuts) > 50
    with Passing() as outer:
        for cut in cuts:
            with contextlib.suppress(KeyboardInterrupt), cut:
                step()
            assert cut.done and modes_on() == [outer], str(cut)
