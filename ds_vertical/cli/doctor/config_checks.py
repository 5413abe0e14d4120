"""Checks of the DeepSpeed JSON: what would be refused without a model, what is misspelt, what is left to "auto"."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Final

from ds_vertical.cli.bench.machine_info import accelerator
from ds_vertical.cli.common import JsonObject, first_line
from ds_vertical.cli.doctor.check import CheckResult, Target, error, ok, split_fault, warning
from ds_vertical.compat.stock_config import check_zero
from ds_vertical.config.cross_check import check, find_unfilled
from ds_vertical.config.deepspeed_keys import TOP_LEVEL_KEYS
from ds_vertical.config.file import read_as_written, read_config
from ds_vertical.config.section import SECOND_PLACE, SECTION, load_section, show
from ds_vertical.errors import ConfigError
from ds_vertical.types import OFFLOAD_DEVICES, Tier

_ZERO: Final = "zero_optimization"


def refusals(case: Target) -> Iterator[CheckResult]:
    """What `prepare` and `initialize` would refuse in the arms that the JSON is to run in, in their words, and what they would
    warn of."""
    if case.config_path is None:
        return
    try:
        config = read_config(case.config_path)
        section = load_section(config)
    except ConfigError as failure:
        yield from (error(*split_fault(line)) for line in str(failure).splitlines())
        return
    enabled = (section or load_section({SECTION: {}})).model_copy(update={"enabled": True})  # pyright: ignore
    lines, faults = [], []
    for arm in sorted(case.arms):
        try:
            lines += check(config, enabled.model_copy(update={"enabled": arm == "vertical"}), accelerator())
        except ConfigError as failure:
            faults += str(failure).splitlines()
    yield from (error(*split_fault(line)) for line in faults)
    yield from (warning(*split_fault(line)) for line in lines)
    if not faults and "vertical" in case.arms:
        yield ok(f"{case.config_path}: layer-major order, nothing that is refused")
    elif not faults:
        state = f'no "{SECTION}": {{}}, which asks for layer-major order' if section is None else f"{SECTION} is not in force"
        yield ok(f"{case.config_path}: the stock arm ({state})")


def launch(case: Target) -> Iterator[CheckResult]:
    """What becomes of the section where a script that knows nothing of ds_vertical is launched plainly, and what to do."""
    if case.config_path is None or "vertical" not in case.arms or SECTION not in (case.config or {}):
        return
    instead = "launch such a script as it is by: ds-vertical run SCRIPT ..."
    loops = "a script that calls deepspeed.initialize, by itself or through Hugging Face's Trainer or Accelerate"
    if _is_in_second_place(case):
        yield ok(f'{SECOND_PLACE}: launched plainly, {loops}, fails ("Extra inputs are not permitted"); {instead}')
        return
    yield ok(
        f"{SECTION}: launched plainly, {loops}, trains in DeepSpeed's own order without a word about it; {instead}; inside"
        " zero_optimization the section makes DeepSpeed refuse a plain launch"
    )


def _is_in_second_place(case: Target) -> bool:
    written = read_as_written(case.config_path) if case.config_path is not None and case.config is not None else {}
    zero = written.get(_ZERO)
    return isinstance(zero, Mapping) and SECTION in zero


def deepspeed_reader(case: Target) -> Iterator[CheckResult]:
    """What DeepSpeed's own reader would refuse."""
    if case.config is None:
        return
    import pydantic

    from ds_vertical.compat.stock_config import DeepSpeedConfig

    config = _without_auto(case.config)
    try:
        if isinstance(config.get(_ZERO), Mapping):
            check_zero(config[_ZERO])
        DeepSpeedConfig(_for_any_number_of_ranks(config))
    except ConfigError as failure:
        yield from (error(*split_fault(line)) for line in str(failure).splitlines())
    except pydantic.ValidationError as failure:
        for detail in failure.errors():
            path = ".".join(map(str, (failure.title, *detail["loc"])))
            yield error(f"{path}: got {show(detail['input'])}; {detail['msg']}", f'remove or mend "{path.rpartition(".")[2]}"')
    except Exception as failure:  # assertions, type errors, its own: whatever it raises, the user would get
        yield error(f"DeepSpeed's reader refuses it: {first_line(failure)}", f"mend it in {case.config_path}")
    else:
        yield ok("DeepSpeed's own reader accepts it")


def _for_any_number_of_ranks(config: JsonObject) -> JsonObject:
    """The JSON without what can be judged only once the ranks are counted; `cross_check` has judged the rest of it."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    return {key: value for key, value in config.items() if key != keys[0] or config.get(keys[1]) is None}


def _without_auto(section: Mapping[str, object]) -> JsonObject:
    """A copy of the JSON, or of a section of it, without the keys that are "auto"; the batch sizes become 1."""
    written = {key: value for key, value in section.items() if value != "auto"}
    kept = {key: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value) for key, value in written.items()}
    ones = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return kept | {key: 1 for key in ones if section.get(key) == "auto"}


def near_misses(case: Target) -> Iterator[CheckResult]:
    """Finds top-level keys that DeepSpeed would ignore in silence. It refuses unknown keys of sections itself, but for those of
    aio, see `stock_traps`."""
    for key in case.config or {}:
        if key in TOP_LEVEL_KEYS:
            continue
        near = difflib.get_close_matches(str(key), sorted(TOP_LEVEL_KEYS), n=1, cutoff=0.7)
        if near == [SECTION]:
            continue  # `refusals` has said it
        nested = f'"{key}" inside {_ZERO}' if str(key).startswith(("stage3_", "offload_")) else ""
        remedy = f'"{near[0]}": {show((case.config or {})[key])}' if near else nested or "remove it"
        guess = f', did you mean "{near[0]}"?' if near else ""
        severity = error if near or nested else warning
        yield severity(f"{key}: DeepSpeed knows no such key at the top level and ignores it{guess}", remedy)


def autos(case: Target) -> Iterator[CheckResult]:
    """Finds values left to "auto". A section inside zero_optimization speaks of a script whose trainer fills them in."""
    severity = warning if _is_in_second_place(case) else error
    for each in find_unfilled(case.config or {}):
        yield (warning if each.harmless else severity)(each.found, each.line)


def optimizer(case: Target) -> Iterator[CheckResult]:
    """Finds optimizer arguments that CPU Adam does not take: DeepSpeed hands all of them on."""
    given = case.at("optimizer.params")
    kind = case.at("optimizer.type")
    if not isinstance(given, Mapping) or str(kind).lower() not in ("adam", "adamw"):
        return
    if case.at(f"{_ZERO}.offload_optimizer.device") not in (OFFLOAD_DEVICES[Tier.HOST], OFFLOAD_DEVICES[Tier.SSD]):
        return
    import inspect

    from ds_vertical.compat.stock_config import DeepSpeedCPUAdam

    taken = [*inspect.signature(DeepSpeedCPUAdam.__init__).parameters][2:] + ["torch_adam", "adam_w_mode"]
    for key in (key for key in given if key not in taken):
        near = difflib.get_close_matches(str(key), taken, n=1) or [{"learning_rate": "lr"}.get(str(key), "")]
        remedy = f'"{near[0]}": {show(given[key])}' if near[0] else f"remove it; known: {', '.join(taken)}"
        remedy = '"gradient_clipping": 1.0, at the top level' if key == "max_grad_norm" else remedy
        yield error(f"optimizer.params.{key}: DeepSpeed's CPU Adam takes no such argument", remedy)


def precision(case: Target) -> Iterator[CheckResult]:
    """Checks that the device has the JSON's precision."""
    if case.config is None:
        return
    from ds_vertical.compat import accelerator as compat_accelerator
    from ds_vertical.compat import zero_params

    accelerator = compat_accelerator.get_accelerator()
    if case.at("fp16.enabled") is True and not accelerator.is_fp16_supported():
        yield error(
            f"fp16.enabled: got true; this device ({compat_accelerator.device_name()}) has no fp16",
            '"fp16": {"enabled": false}',
        )
    if case.at("bf16.enabled") is True and not accelerator.is_bf16_supported():
        yield error(
            f"bf16.enabled: got true; this device ({compat_accelerator.device_name()}) has no bf16",
            '"bf16": {"enabled": false}',
        )
    if case.at(f"{_ZERO}.offload_param.device") == OFFLOAD_DEVICES[Tier.SSD] and zero_params.rounds_late_fp32(case.config):
        yield warning(
            f"{_ZERO}.offload_param.device: a model in fp32 that is not built under zero.Init would be written to SSD as bf16"
            " (patches/0002)",
            "with deepspeed.zero.Init(config_dict_or_path=ds_vertical.prepare(config)):  # build the model in it",
        )
