"""Find the layers of a model and assign every parameter to a layer or to what lies outside the layers.

Vocabulary: a block is the model's repeated module, a layer is `blocks_per_layer` consecutive blocks. `pre` stands for
everything outside the layers: prefix, glue between layers and suffix. Where the units outside the layers are apart, what the
suffix alone uses is a unit of its own, `suf`: see [Note: two ends].

[Note: two ends] Which code uses a parameter is guessed before there is a batch, from the order in which sources call modules
(`source_order.end_of`). The steps verify it: where other code computes with a parameter of a unit that is `apart`, the unit is
`missed` (`stubs.OutsideWatch`). The step starts over, and ahead of that the unit is apart no longer, on all ranks at once:
their schedules must not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.model.source_order import End, are_ends_told, called_children, called_in_turn, end_of
from ds_vertical.schedule.events import Outside
from ds_vertical.types import PRE, SUF, Unit

# Parameters of a container of blocks, as a share of the model's, from which it counts as the model's stack of layers
# when no configuration names its length.
_HEAVY_SHARE = 0.1
# Stacks that fill a KV cache in every forward, whatever `use_cache` says: they run as glue, which is never recomputed.
_WRITE_A_CACHE = {"XLMModel": "attentions", "FlaubertModel": "attentions"}
_DEPTH_NAMES = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "encoder_layers",
    "decoder_layers",
)
BlockKind = tuple[type[nn.Module], int]  # a class, and the elements of its parameters


@dataclass(frozen=True)
class Block:
    """One block: its dotted path in the model and its module."""

    path: str
    module: nn.Module

    @property
    def kind(self) -> BlockKind:
        """Blocks of one class and size are of one kind, whether they are partitioned or not."""
        return _block_kind(self.module)


@dataclass(frozen=True)
class LayerMap:
    """The model cut into layers.

    `blocks` in order of execution; `layers[l]` the range of block indices of layer l; `units` maps every layer index, `pre`
    and, where it is a unit, `suf` to its parameters, each parameter in exactly one unit (one that several layers share: `pre`).
    `whole`: blocks of which a hook has computed with a parameter of the block, as steps find them: see `stubs`. `apart`: the
    units outside the layers that, as far as steps have found, the prefix alone (`pre`) or the suffix alone (`suf`) uses.
    `missed`: those of which this rank has found otherwise. `used_behind`: ids of the parameters that the suffix alone uses,
    where the forwards' sources show so (`are_ends_told`); their gradients are there and gone ahead of those of the others
    outside the layers.
    """

    blocks: tuple[Block, ...]
    layers: tuple[range, ...]
    units: dict[Unit, tuple[nn.Parameter, ...]]
    whole: set[int] = field(default_factory=set)
    apart: set[Unit] = field(default_factory=set)
    missed: set[Unit] = field(default_factory=set)
    used_behind: frozenset[int] = frozenset()

    @property
    def outside(self) -> Outside:
        """The units outside the layers, as schedules move them."""
        return Outside(SUF in self.units, tuple(unit for unit in (PRE, SUF) if unit in self.apart))

    @property
    def keeping_blocks(self) -> list[Block]:
        """Those whose calls may keep something for their backward: all but the last layer's, which keeps its graph."""
        return [self.blocks[index] for own in self.layers[:-1] for index in own]

    @property
    def num_layers(self) -> int:
        """How many layers the schedule walks."""
        return len(self.layers)

    def unit_of(self) -> dict[int, Unit]:
        """`id(parameter)` -> unit."""
        return {id(p): unit for unit, params in self.units.items() for p in params}

    def in_chunk_order(self, params_in_files: bool) -> list[Unit]:
        """The units in the order in which their chunks come. On SSD `pre` is the first: it may stay in host memory. In
        memory those outside the layers are the last: a head's bias of a few elements would shift all behind it
        (`zero_optimizer.place_as_stock`)."""
        return list(self.units) if params_in_files else sorted(self.units, key=lambda unit: not isinstance(unit, int))

    def describe(self) -> str:
        """One line: number of layers and where they were found."""
        containers = dict.fromkeys(_parent(block.path) or "(root)" for block in self.blocks)
        per_layer = len(self.layers[0])
        return f"{self.num_layers} layers of {per_layer} block(s) in {', '.join(containers)}"


def map_layers(
    model: nn.Module, paths: Sequence[str] | None = None, blocks_per_layer: int = 1, apart: bool = False
) -> LayerMap:
    """Cut `model` into layers.

    `paths`: dotted paths of containers (each member is a block) or of single blocks, in order of execution; None
    discovers them. `apart`: cut what lies outside the layers in two, too: see [Note: two ends]. Raises LayerError when nothing
    is found, a path is wrong, or blocks overlap.
    """
    groups = _named_groups(model, paths) if paths is not None else _discovered_groups(model)
    blocks = tuple(block for group in groups for block in group)
    _refuse_overlap(blocks)
    layers: list[range] = []
    start = 0
    for group in groups:
        end = start + len(group)
        layers += [range(i, min(i + blocks_per_layer, end)) for i in range(start, end, blocks_per_layer)]
        start = end
    whole = LayerMap(blocks, tuple(layers), _assign_units(model, blocks, layers))
    ends = _ends(model, whole)
    if not any(map(_is_of_both, ends.values())) and are_ends_told(model, [block.path for block in blocks], ends):
        whole = replace(whole, used_behind=frozenset(key for key, found in ends.items() if found == {"behind"}))
    return _with_ends_apart(whole, ends) if apart else whole


def _named_groups(model: nn.Module, paths: Sequence[str]) -> list[list[Block]]:
    """One group per container; neighbouring single blocks of one parent form a group as well."""
    groups: list[list[Block]] = []
    single: list[Block] = []
    for path in paths:
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            raise LayerError(
                f"vertical_schedule.layers: got {path!r}, which the model {type(model).__name__} does not have ({error});"
                f" write dotted paths such as {_examples(model)}, or null to discover them"
            ) from None
        if isinstance(module, nn.ModuleList | nn.Sequential):
            if single:
                groups.append(single)
                single = []
            groups += _opened([Block(_join(path, name), member) for name, member in module.named_children()])
        else:
            if single and _parent(single[-1].path) != _parent(path):
                groups.append(single)
                single = []
            single.append(Block(path, module))
    if single:
        groups.append(single)
    groups = [group for group in groups if group]
    if not groups:
        raise LayerError(f"vertical_schedule.layers: got {list(paths)!r}, which names no block; write e.g. {_examples(model)}")
    return groups


def _discovered_groups(model: nn.Module) -> list[list[Block]]:
    depths = _config_depths(model)
    total = sum(num_elements(p) for p in model.parameters())
    runs: list[list[Block]] = []
    taken: list[str] = []
    for path, module in model.named_modules():
        if any(f"{path}.".startswith(outer) for outer in taken):
            continue
        run = _longest_run(path, module)
        if len(run) < 2:
            continue
        if len(run) in depths or _share(run, total) >= _HEAVY_SHARE:
            runs.append(run)
            taken += [block.path + "." for block in run]
    runs = _repeated(model, runs, total) or runs
    if not runs:
        raise LayerError(
            f"vertical_schedule.layers: no stack of repeated modules was found in {type(model).__name__};"
            f" name the layers' containers or blocks, e.g. {_examples(model)}, or a module that runs once per forward"
        )
    return [group for run in _in_order(model, _interleaved(model, runs, total), "") for group in _opened(run)]


def _share(run: Sequence[Block], total: int) -> float:
    return sum(num_elements(p) for block in run for p in block.module.parameters()) / max(1, total)


def _repeated(model: nn.Module, runs: Sequence[Sequence[Block]], total: int) -> list[list[Block]]:
    """Where a model calls the same few modules again and again (ALBERT): the modules that hold their lists, as blocks. Each of
    these runs once per forward."""
    config = getattr(model, "config", None)
    groups, depth = getattr(config, "num_hidden_groups", None), getattr(config, "num_hidden_layers", None)
    fewer = isinstance(groups, int) and isinstance(depth, int) and groups < depth
    found: list[list[Block]] = []
    for path, module in model.named_modules() if fewer else ():
        own = [Block(_join(path, name), member) for name, member in module.named_children()]
        if path and isinstance(module, nn.ModuleList) and len(own) == groups and _share(own, total) >= _HEAVY_SHARE:
            holder = _parent(path)
            if not any(holder.startswith(block.path) for run in found for block in run):
                found.append([Block(holder, model.get_submodule(holder))])
    return found


def _interleaved(model: nn.Module, runs: list[list[Block]], total: int) -> list[list[Block]]:
    """Stacks that a model goes through side by side, in one loop (XLM: attentions[i], then ffns[i]), as one; light ones among
    them (norms) are left to the glue."""
    for parent in dict.fromkeys(_parent(_parent(run[0].path)) for run in runs if "." in run[0].path):
        module = model.get_submodule(parent)
        at = {run[0].path.split(".")[-2]: run for run in runs if _parent(_parent(run[0].path)) == parent}
        for names in called_in_turn(module) if len(at) > 1 else ():
            together = [at[name] for name in names if name in at]
            glue = _WRITE_A_CACHE.get(type(module).__name__)
            if len(together) > 1 and len({len(run) for run in together}) == 1 and all(run in runs for run in together):
                least = _HEAVY_SHARE * sum(_share(run, total) for run in together)
                heavy = [run for run in together if _share(run, total) >= least and run is not at.get(glue)]
                runs = [run for run in runs if run not in together] + [[b for each in zip(*heavy, strict=True) for b in each]]
    return runs


def _in_order(model: nn.Module, runs: list[list[Block]], above: str) -> list[list[Block]]:
    """Stacks in the order in which the model's source calls the modules that hold them, or else in the order of definition."""
    start = len(above) + 1 if above else 0
    branches: dict[str, list[list[Block]]] = {}
    for run in runs:
        branches.setdefault(run[0].path[start:].partition(".")[0], []).append(run)
    names = list(branches)
    if len(runs) < 2:
        return runs
    if len(names) > 1:
        called = called_children(model.get_submodule(above))
        names = sorted(names, key=called.index) if set(names) <= set(called) else names
    return [run for name in names for run in _in_order(model, branches[name], _join(above, name))]


def _opened(run: Sequence[Block]) -> list[list[Block]]:
    """A stack with the members of each list in it in that list's place: lists cannot be called, their members can."""
    groups: list[list[Block]] = [[]]
    for block in run:
        if isinstance(block.module, nn.ModuleList):
            members = [(name, m) for name, m in block.module.named_children() if _has_parameters(m)]
            groups += [*_opened([Block(_join(block.path, name), member) for name, member in members]), []]
        else:
            groups[-1].append(block)
    return [group for group in groups if group]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _longest_run(path: str, module: nn.Module) -> list[Block]:
    """The longest run of consecutive members of one kind that have parameters, in a ModuleList or Sequential."""
    best: list[Block] = []
    run: list[Block] = []
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return best
    previous: str | None = None
    for name, member in module.named_children():
        kind = _kind(member) if _has_parameters(member) else None
        run = [*run, Block(_join(path, name), member)] if kind is not None and kind == previous else []
        if kind is not None and not run:
            run = [Block(_join(path, name), member)]
        previous = kind
        if len(run) > len(best):
            best = run
    return best


def _kind(module: nn.Module) -> str:
    """Blocks of hybrid models differ in class but share Hugging Face's base class of checkpointable layers."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return "GradientCheckpointingLayer" if "GradientCheckpointingLayer" in names else type(module).__qualname__


def _config_depths(model: nn.Module) -> set[int]:
    config = getattr(model, "config", None)
    if config is None:
        return set()
    configs = [config]
    if hasattr(config, "get_text_config"):
        configs.append(config.get_text_config())
    values = (getattr(c, name, None) for c in configs for name in _DEPTH_NAMES)
    return {value for value in values if isinstance(value, int) and value > 1}


def _refuse_overlap(blocks: Sequence[Block]) -> None:
    seen: dict[int, str] = {}
    for block in blocks:
        if seen.get(id(block.module)) == block.path:
            raise LayerError(f"vertical_schedule.layers: names {block.path!r} twice; every block runs once per forward")
        for module in block.module.modules():
            if module is not block.module and _is_stateless(module):
                continue  # blocks may share a module without parameters or buffers, such as an activation
            if id(module) in seen and seen[id(module)] != block.path:
                raise LayerError(
                    f"vertical_schedule.layers: {block.path!r} shares the module {type(module).__name__} with"
                    f" {seen[id(module)]!r}; every block must be a module of its own, used once per forward"
                )
            seen[id(module)] = block.path


def _is_stateless(module: nn.Module) -> bool:
    return not _has_parameters(module) and next(module.buffers(), None) is None


def _assign_units(model: nn.Module, blocks: Sequence[Block], layers: Sequence[range]) -> dict[Unit, tuple[nn.Parameter, ...]]:
    layer_of_module = {id(m): index for index, layer in enumerate(layers) for b in layer for m in blocks[b].module.modules()}
    users: dict[int, set[Unit]] = {}
    params: dict[int, nn.Parameter] = {}
    for module in model.modules():
        # parameters of other modules that this one was registered to use count as used here
        external = getattr(module, "_external_params", {})
        for param in (*module._parameters.values(), *external.values()):
            if param is not None:
                params[id(param)] = param
                users.setdefault(id(param), set()).add(layer_of_module.get(id(module), "pre"))
    units: dict[Unit, list[nn.Parameter]] = {"pre": [], **{index: [] for index in range(len(layers))}}
    for key, param in params.items():
        unit = next(iter(users[key])) if len(users[key]) == 1 else "pre"
        units[unit].append(param)
    return {unit: tuple(members) for unit, members in units.items()}


def _ends(model: nn.Module, whole: LayerMap) -> dict[int, set[End]]:
    """Where each parameter of the unit outside the layers is used, by its id."""
    first, last = whole.blocks[0].path, whole.blocks[-1].path
    in_blocks = {id(module) for block in whole.blocks for module in block.module.modules()}
    ends: dict[int, set[End]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        end = "between" if id(module) in in_blocks else end_of(model, path, first, last)
        for param in (*module._parameters.values(), *getattr(module, "_external_params", {}).values()):
            if param is not None:
                ends.setdefault(id(param), set()).add(end)
    return {id(param): ends[id(param)] for param in whole.units[PRE]}


def _is_of_both(found: set[End]) -> bool:
    return {"ahead", "behind"} <= found


def _with_ends_apart(whole: LayerMap, ends: Mapping[int, set[End]]) -> LayerMap:
    """`whole` with its unit outside the layers cut in two. With a parameter of both ends (tied weights) it stays one unit. With
    one that a layer uses, or code between two layers, `pre` stays on the device, and what the suffix alone uses is apart."""
    used = [(param, ends[id(param)]) for param in whole.units[PRE]]
    if any(_is_of_both(found) for _, found in used):
        return whole
    behind = tuple(param for param, found in used if found == {"behind"})
    ahead = tuple(param for param, found in used if found != {"behind"})
    units: dict[Unit, tuple[nn.Parameter, ...]] = {**whole.units, PRE: ahead}
    if behind:
        units[SUF] = behind
    stays = any("between" in found or "behind" in found for param, found in used if found != {"behind"})
    apart: set[Unit] = {unit for unit in (PRE, SUF) if units.get(unit) and not (unit == PRE and stays)}
    return replace(whole, units=units, apart=apart)


def check_trainable(model: nn.Module, tell: Callable[[str], None]) -> None:
    """Refuse settings under which layer-major training would be silently wrong, and switch off what the schedule makes
    needless, with one line each to `tell`: the model's own gradient checkpointing, and KV caches. Neither changes what a step
    computes. Raises LayerError naming the setting, with nothing switched."""
    for path, setting, remedy in _refused_settings(model):
        raise LayerError(f"{path}: got {setting}; layer-major training cannot reproduce it; {remedy}")
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in checkpointed:
        vars(module)["gradient_checkpointing"] = False
    if checkpointed:
        tell(
            f"the model's gradient checkpointing is switched off ({len(checkpointed)} modules): the schedule recomputes each"
            " layer from its saved inputs already"
        )
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    if caching:
        tell("model.config.use_cache is set to False: training needs no KV cache, and a recompute would fill it twice")


def shares_weights(module: nn.Module) -> bool:
    """Whether a parameter has several names: tied weights, for which the arms agree up to rounding only."""
    return sum(1 for _ in module.named_parameters(remove_duplicate=False)) > sum(1 for _ in module.parameters())


def _refused_settings(model: nn.Module) -> Iterator[tuple[str, object, str]]:
    config = getattr(model, "config", None)
    configs: dict[str, Any] = {} if config is None else {"model.config": config}
    if config is not None and hasattr(config, "get_text_config") and config.get_text_config() is not config:
        configs["model.config.get_text_config()"] = config.get_text_config()
    for where, each in configs.items():
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if (getattr(each, name, None) or 0) > 0:
                yield f"{where}.{name}", getattr(each, name), "set it to 0: it drops layers per micro-batch"
        for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
            if getattr(each, name, None) is True:
                yield f"{where}.{name}", True, "set it to False: it collects outputs by hooks, whose gradients would be lost"
    for path, module in model.named_modules():
        layerdrop = getattr(module, "layerdrop", None)
        if isinstance(layerdrop, float) and layerdrop > 0:
            yield f"model.{path}.layerdrop", layerdrop, "set it to 0: it drops layers per micro-batch"


def refuse_batch_flags(batch: object) -> None:
    """Refuse per-call flags that ask for hook-collected outputs or a cache. Raises LayerError naming the key."""
    if not isinstance(batch, Mapping):
        return
    for name in ("output_router_logits", "output_hidden_states", "output_attentions", "use_cache"):
        if batch.get(name) is True:
            raise LayerError(f"batch[{name!r}]: got True; layer-major training cannot reproduce it; leave it out or pass False")


def kind_names(blocks: Iterable[nn.Module]) -> list[str]:
    """The kind of each block: its class and, where another size of that class comes first, its elements."""
    first: dict[str, int] = {}
    sizes = [(kind.__name__, size) for kind, size in map(_block_kind, blocks)]
    return [name if first.setdefault(name, size) == size else f"{name} of {size} elements" for name, size in sizes]


def _block_kind(block: nn.Module) -> BlockKind:
    return type(block), sum(map(num_elements, block.parameters()))


def num_elements(param: nn.Parameter) -> int:
    """Of the whole parameter, also where it is partitioned, and its own tensor is empty."""
    return int(getattr(param, "ds_numel", param.numel()))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _examples(model: nn.Module) -> str:
    lists = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and path]
    heads = [path for path, _ in model.named_children()]
    shown = (lists or heads)[:3]
    return "[" + ", ".join(f'"{path}"' for path in shown) + "]" if shown else '["layers"]'


def refuse_use_outside(blocks: Sequence[Block], params: Iterable[object], error: RuntimeError) -> None:
    """Raise LayerError where an error speaks of a tensor without elements, and one of these is a parameter of a block that is
    away."""
    if isinstance(error, LayerError) or not any(sign in str(error) for sign in _OF_NO_ELEMENTS):
        return
    names = {id(param): _join(each.path, name) for each in blocks for name, param in each.module.named_parameters()}
    for param in params:
        if isinstance(param, nn.Parameter) and param.numel() == 0 < num_elements(param) and id(param) in names:
            raise LayerError(
                f"{names[id(param)]} is used by code outside its block's forward, where it is away (by itself, or through a"
                " tensor that keeps the graph of the block): use it in the block's forward, or ahead of initialize call"
                " deepspeed.zero.register_external_parameter(model, parameter)"
            ) from error


def refuse_parameter_hooks(layers: LayerMap) -> None:
    """Raise LayerError for a parameter of a layer or of the suffix that has a hook, where a micro-batch calls the model several
    times: each call runs backward by itself, and such a hook would be called with a part of the gradient."""
    hooked = {id(param) for unit, params in layers.units.items() if unit != PRE for param in params if param._backward_hooks}
    if not hooked:
        return
    named = ((_join(each.path, name), param) for each in layers.blocks for name, param in each.module.named_parameters())
    name = next((name for name, param in named if id(param) in hooked), "a parameter of the code behind the layers")
    raise LayerError(
        f"{name} has a hook (register_hook), and a micro-batch calls the model several times: the hook would be called with the"
        ' gradient of one call at a time; change gradients in the model\'s code, or set "vertical_schedule.enabled": false'
    )


_OF_NO_ELEMENTS: Final = ("(0)", "[0]", "must be a matrix", "must be 2-D", "0-D", "dimension specified as 0")
