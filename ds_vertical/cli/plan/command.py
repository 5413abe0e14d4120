"""`ds-vertical plan`: how to train a model on a machine, why, what it costs, and the JSON for it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from ds_vertical.cli.common import JsonObject, parse_bytes
from ds_vertical.cli.plan.counted_specs import counted_spec, default_length
from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.cli.plan.half_steps import TwoHalves, json_changes, two_halves
from ds_vertical.cli.plan.pieces import time_pieces
from ds_vertical.config.deepspeed_keys import AIO
from ds_vertical.config.section import SECTION
from ds_vertical.engine.machine_cache import cached_report, disks_of, joint_report, shares_by_rates
from ds_vertical.errors import ConfigError, CostsError
from ds_vertical.io.atomic_file import check_out, write_out
from ds_vertical.model.hf import named_shape, read_fields, shape_names
from ds_vertical.planner import machine as profile
from ds_vertical.planner import memory_budget
from ds_vertical.planner.candidate import Candidate, into_node_bytes, most_micro_batches, without_garbage_collection
from ds_vertical.planner.closed_forms import horizontal_step, stock_placement
from ds_vertical.planner.machine import Profile, read_links
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, estimated, shape_of, without_frozen
from ds_vertical.planner.network import Network, with_pairs
from ds_vertical.planner.search import Plan, PlanError, Task, choose
from ds_vertical.types import TensorKind, Tier, TierBytes, per_tier

_BAD_INPUT, _NO_PLAN = 2, 1
_DAY_S = 86400
_TIMED_SIZES = (1, 2, 4)  # sequences per micro-batch that are timed; larger ones follow from the last two
_IN_PLACE = 'on_nonfinite "stop": early steps in place, one generation of files on SSD; a norm that is not finite ends the run'
_WORTH = 0.99  # of the exact step's seconds: from there on acco is recommended
_LEVELS_ASSUMED = "that levels on GPUs run beside the computation, which they do not so far"
_EXAMPLE = """example:
  ds-vertical limits --path /ssd
  ds-vertical plan --model my_model/config.json --tokens-per-step 65536 --nvme-path /ssd --out ds_config.json
  ds-vertical plan --model gpt_65b --tokens-per-step 65536 --machine a100_server
  ds-vertical plan --model llama_3_8b --lora 16 --tokens-per-step 65536 --machine a100_server
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan, writes the JSON. Returns 0; 1 where no setting fits the machine; 2 for bad input."""
    options = parsed(sys.argv[1:] if argv is None else argv)
    try:
        check_out(options.out)
        found = plan(options)
        if options.out:
            write_out(options.out, json.dumps(found["config"], indent=2) + "\n")
    except PlanError as error:
        print(f"ds-vertical plan: {options.model} on {options.machine or 'this machine'}: {error}", file=sys.stderr)
        return _NO_PLAN
    except (ConfigError, CostsError, OSError) as error:
        print(f"ds-vertical plan: {error}", file=sys.stderr)
        return _BAD_INPUT
    print(json.dumps(found, indent=2) if options.json else "\n".join(plan_lines(found)))
    if options.out and not options.json:
        print(f"written: {options.out}")
    return 0


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, as `plan` takes them."""
    return _parser().parse_args(list(argv))


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ds-vertical plan", description=__doc__, epilog=_EXAMPLE, formatter_class=form)
    parser.add_argument("--model", required=True, help=f"path of a Hugging Face config, or one of {', '.join(shape_names())}")
    parser.add_argument("--tokens-per-step", type=int, required=True, metavar="N", help="of one optimizer step, all ranks")
    parser.add_argument("--sequence-length", type=int, metavar="S", help="tokens (default: the model's, 2048 at most)")
    parser.add_argument("--micro-batch-size", type=int, metavar="B", help="sequences (default: chosen)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the parameters (default bf16)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank alone (PEFT's)")
    targets = "modules that have adapters, e.g. q_proj,v_proj (default: PEFT's for the model's type)"
    parser.add_argument("--lora-targets", metavar="NAMES", help=targets)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient_clipping, 0 for none (default 1.0)")
    speculation = "with clipping: plan for steps in the backward, redone where the norm asks for clipping"
    parser.add_argument("--speculation", action="store_true", help=speculation)
    stop = "stop: without clipping, early steps in place, with one generation of files (default: where two do not fit)"
    parser.add_argument("--on-nonfinite", choices=("skip", "stop"), help=stop)
    parser.add_argument("--num-ranks", type=int, default=1, help="ranks (GPUs) of a machine (default 1)")
    parser.add_argument("--nodes", type=int, default=1, help="machines like this one (default 1)")
    parser.add_argument("--links", type=Path, help="file of `ds-vertical limits --links --out`: rates between ranks")
    rounding = "ranks may send weights as INT8 and gradients as INT4 between machines, which is not exact"
    parser.add_argument("--allow-rounding", action="store_true", help=rounding)
    assumed = "plan levels on GPUs, too, as if they ran beside the computation there"
    parser.add_argument("--assume-levels", action="store_true", help=assumed)
    names = ", ".join(profile.shipped())
    parser.add_argument("--machine", help=f"file of `ds-vertical limits --out`, or {names} (default: this one's limits)")
    paths = "folder on the SSD (default /tmp/ds_vertical); several: one on each SSD"
    parser.add_argument("--nvme-path", nargs="+", default=["/tmp/ds_vertical"], help=paths)
    host = "use so much in all, e.g. 64G; the JSON then says so too (default: what the machine has)"
    parser.add_argument("--host-memory", metavar="BYTES", help=host)
    parser.add_argument("--out", type=Path, help="DeepSpeed JSON to write")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def plan(options: argparse.Namespace) -> JsonObject:
    """The plan as JSON fields. Raises ConfigError, CostsError, PlanError."""
    times_pieces = options.machine is None  # whose memory is to go back
    return _planned(options) if times_pieces else without_garbage_collection(_planned)(options)


def _planned(options: argparse.Namespace) -> JsonObject:
    _check(options)
    whole = _linked(_profile(options), options)
    ranks = options.nodes * options.num_ranks
    levels = options.nodes > 1 and options.num_ranks > 1 and (whole.machine.one_memory or options.assume_levels)
    on_cpu = dict.fromkeys(("reduces_twice", "in_memory", "sums_in_memory"), whole.machine.one_memory)
    network = Network(options.nodes, options.num_ranks, levels, **on_cpu)
    network = with_pairs(network, whole.machine)
    machine = replace(whole, machine=whole.machine.shared(options.num_ranks))
    spec, fields = _spec(options)
    if options.machine is None and machine.machine.one_memory:
        spec = replace(spec, sums_in_fp32=not spec.made_by_products or _sums_in_fp32(options.dtype))
    task = Task(
        spec,
        options.tokens_per_step,
        _seconds(options, machine, spec, fields),
        ranks,
        options.clip,
        options.micro_batch_size,
        options.speculation,
        None if options.on_nonfinite is None else options.on_nonfinite == "stop",
        flops_per_byte=machine.flops_per_byte(spec.dtype),
        network=network,
        rounding=options.allow_rounding,
        least_file_bytes=max(Task.least_file_bytes, int(str((machine.aio or AIO)["block_size"]))),  # as stock
    )
    if not any(task.counts()):
        fitting = -(-options.tokens_per_step // (spec.sequence_length * ranks))
        has = f"a step of {options.tokens_per_step} tokens has {fitting} sequence(s) a rank"
        advice = f"write {fitting} or less, or more --tokens-per-step"
        raise ConfigError(f"--micro-batch-size {options.micro_batch_size}: {has}; {advice}")
    found = choose(task, machine.machine, _limits(machine, options), (memory_budget.libraries(machine.process_bytes),))
    locked = not machine.machine.one_memory
    training = TrainingOptions(options.clip, tuple(options.nvme_path), locked, machine.aio or AIO)
    config = write_config(found.chosen, spec, training)
    if options.host_memory is not None:
        config[SECTION]["host_memory_bytes"] = _host_bytes(options)
    return _report(found, task, machine, options) | {"config": config}


def _check(options: argparse.Namespace) -> None:
    for package, extra in (("scipy", "plan"), ("transformers", "hf")):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed, which plans need: pip install 'ds-vertical[{extra}]'")
    if options.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"--lora {options.lora}: peft is not installed, which makes the adapters: pip install peft")
    if options.lora is None and options.lora_targets is not None:
        raise ConfigError(f"--lora-targets {options.lora_targets}: write the adapters' rank beside it: --lora RANK")
    for name in ("tokens_per_step", "sequence_length", "micro_batch_size", "num_ranks", "nodes", "lora"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: write 1 or more")
    if not 0 <= options.clip < float("inf"):
        raise ConfigError(f"--clip {options.clip}: write the norm to clip to, or 0 for none")
    _host_bytes(options)


def _host_bytes(options: argparse.Namespace) -> int | None:
    try:
        return parse_bytes(options.host_memory) if options.host_memory is not None else None
    except ValueError as error:
        raise ConfigError(f"--host-memory: {error}") from None


def _profile(options: argparse.Namespace) -> Profile:
    if options.machine:
        return profile.read_profile(options.machine)
    paths = options.nvme_path
    found = [cached_report(path) for path in paths]
    reports = [report for report in found if report is not None]
    if len(reports) < len(paths):
        raise ConfigError(
            "this machine has not been measured yet: run `ds-vertical limits --path FOLDER_ON_THE_SSD` once, or name a"
            f" machine with --machine ({', '.join(profile.shipped())}, or a file)"
        )
    disks = disks_of(paths)
    return Profile.from_dict("this machine", joint_report(reports, shares_by_rates(reports, disks), disks))


def _linked(machine: Profile, options: argparse.Namespace) -> Profile:
    """With the links of a file, where one is given. Raises CostsError where links are needed that nobody has measured."""
    if options.links is not None:
        machine = replace(machine, machine=machine.machine.with_links(read_links(options.links)))
    if options.assume_levels and not machine.machine.one_memory:
        machine = replace(machine, assumed=(*machine.assumed, _LEVELS_ASSUMED))
    if options.nodes > 1 and machine.machine.net_cross_bytes_per_s is None:
        raise CostsError(
            f"--nodes {options.nodes}: {machine.name} says nothing of the links between machines; measure them with"
            " `ds-vertical limits --links --hostfile HOSTFILE --out links.json`, and write --links links.json"
        )
    return machine


def _spec(options: argparse.Namespace) -> tuple[ModelSpec, JsonObject]:
    path = named_shape(options.model)
    fields = read_fields(path)
    length = options.sequence_length or default_length(fields)
    counted = counted_spec(path, fields, length, options.dtype)
    if counted is not None and options.lora is None:
        return counted, fields
    from ds_vertical.cli.plan.fake_run import Lora, read_spec

    targets = tuple(filter(None, (options.lora_targets or "").split(",")))
    lora = None if options.lora is None else Lora(options.lora, targets)
    return read_spec(Path(options.model).stem, fields, length, options.dtype, lora), fields


def _sums_in_fp32(dtype: str) -> bool:
    """As the kernels of this machine do, where `initialize` of the plan's run measures them, too."""
    from ds_vertical.cli.plan.fake_run import TORCH_DTYPES
    from ds_vertical.engine.budget.kernel_copies import sums_in_fp32

    return sums_in_fp32(TORCH_DTYPES[dtype])


def _limits(machine: Profile, options: argparse.Namespace) -> TierBytes:
    """Of one rank: each has a device of its own, the other tiers are divided among the ranks."""
    given = {**machine.capacity, Tier.HOST: _host_bytes(options) or machine.capacity[Tier.HOST]}
    ranks = per_tier({Tier.DEVICE: 1, Tier.HOST: options.num_ranks, Tier.SSD: options.num_ranks})
    return {tier: None if size is None else size / ranks[tier] for tier, size in given.items()}


def _seconds(options: argparse.Namespace, machine: Profile, spec: ModelSpec, fields: JsonObject) -> Callable[[int], Seconds]:
    """Of the model's pieces by sequences per micro-batch: timed where this is the machine, else from its operations."""
    if options.machine is None:
        timed = _timed(spec, fields, options.num_ranks)
        return lambda size: without_frozen(spec, timed(size))
    rate = machine.flops_per_s.get(spec.dtype)
    if rate is None:
        raise CostsError(f"rates.{spec.dtype}_flops_per_s: missing in {options.machine}; run `ds-vertical limits` again")
    return lambda size: estimated(spec, size, rate)


def _timed(spec: ModelSpec, fields: JsonObject, num_ranks: int) -> Callable[[int], Seconds]:
    @cache
    def timed(size: int) -> Seconds:
        if size > _TIMED_SIZES[-1]:
            less, most = (timed(s) for s in _TIMED_SIZES[-2:])
            grown = (size - _TIMED_SIZES[-1]) / (_TIMED_SIZES[-1] - _TIMED_SIZES[-2])
            slopes = {key: value + grown * (value - less.pieces[key]) for key, value in most.pieces.items()}
            return replace(most, **{key: max(0.0, value) for key, value in slopes.items()})
        print(f"timing a block of {spec.name} with micro-batches of {size}", file=sys.stderr, flush=True)
        return time_pieces(spec, fields, size, num_ranks)

    return timed


# ---- what is shown


def _report(found: Plan, task: Task, machine: Profile, options: argparse.Namespace) -> JsonObject:
    chosen, spec, ranks = found.chosen, task.spec, options.num_ranks
    tokens = chosen.choice.micro_batch_size * chosen.choice.num_micro_batches * spec.sequence_length * task.num_ranks
    return {
        "model": {
            "name": spec.name,
            "elements": spec.num_elements,
            "trained_elements": spec.trained_elements,
            "sequence_length": spec.sequence_length,
        },
        "machine": {"name": machine.name, "date": machine.date, "assumed": list(machine.assumed), "tuned_aio": machine.aio},
        "setting": chosen.choice.to_json(),
        "tokens_per_step": tokens,
        "step_s": chosen.estimate_s,
        "tokens_per_s": tokens / chosen.estimate_s,
        "flops_per_s": tokens / spec.sequence_length * spec.flops / chosen.estimate_s,
        "bound_s": chosen.bound.seconds,
        "resource": chosen.bound.resource,
        "busy_s": chosen.bound.busy_s,
        "stock": _stock(task, machine, _limits(machine, options)),
        "others": [{"differs": what, "step_over_chosen": ratio} for what, ratio in found.differences()],
        "keep_reason": _keep_reason(found),
        "nodes": options.nodes,
        "ranks_per_node": options.num_ranks,
        "into_node_bytes": into_node_bytes(chosen),
        "elastic": _elastic(chosen, task, _limits(machine, options)),
        "acco": _acco(two_halves(chosen), chosen),
        "menu": _menu(chosen),
        "memory": [asdict(item) for item in chosen.items],
        "ssd_bytes": chosen.ssd_bytes,
        "traffic": asdict(chosen.traffic),
        "written_bytes_per_day": ranks * chosen.traffic.written * _DAY_S / chosen.estimate_s,
        "drive_writes_per_day": _drive_writes(chosen, machine, ranks),
    }


def _elastic(chosen: Candidate, task: Task, limits: TierBytes) -> JsonObject | None:
    """How many micro-batches `vertical_schedule.elastic` may give a rank of a step's, and for how many there is room; None with
    one rank."""
    if task.num_ranks == 1:
        return None
    most = task.num_ranks * (chosen.choice.num_micro_batches - 1) + 1  # each other rank brings one at least
    return {"most": most, "fitting": most_micro_batches(chosen, limits, most)}


def _acco(halves: TwoHalves | None, chosen: Candidate) -> JsonObject | None:
    """What a step of two halves would take; None where acco does not train."""
    if halves is None:
        return None
    short = {tier.value: num_bytes for tier, num_bytes in halves.short.items()}
    return {
        "copies": halves.copies,
        "step_s": halves.step_s,
        "step_over_chosen": halves.step_s / chosen.estimate_s,
        "short": short,
    }


def _menu(chosen: Candidate) -> list[JsonObject]:
    """What a layer could keep for one micro-batch, of the chosen sizes: by every policy, not the chosen one alone."""
    points = () if chosen.menu is None else chosen.menu.points
    return [{"name": point.name, "bytes": point.num_bytes, "saved_s": point.saved_s} for point in points]


def _keep_reason(found: Plan) -> str:
    """Why the plan keeps what it keeps."""
    chosen = found.chosen
    policy, resource = chosen.choice.policy, chosen.bound.resource.replace("_", " ")
    other = found.best_otherwise
    if other is None:
        return "no other policy fits, or was counted"
    ratio = other.estimate_s / chosen.estimate_s - 1
    if policy == "none":
        return f'"{other.choice.policy}" would change the step by {ratio:+.1%}, since {resource} decides it'
    seconds = chosen.choice.kept.point.saved_s if chosen.choice.kept else 0.0
    where = f"saves {1e3 * seconds:.3g} ms of each layer's recompute for each micro-batch"
    return f'{where}; with "{other.choice.policy}" the step takes {ratio:+.1%}'


def _kept_text(setting: JsonObject) -> str:
    kept = setting["kept"]
    if not kept:
        return 'backward: activations.keep "none", all but the last layer is computed again'
    if not kept["cell_bytes"]:
        return f'backward: activations.keep "{kept["policy"]}", without what no gradient needs'
    where = ", ".join(f"{kept[tier]:.0%} on {tier}" for tier in Tier if kept[tier])
    return f'backward: activations.keep "{kept["policy"]}", {kept["cell_bytes"] / 1e6:.1f} MB a layer and micro-batch, {where}'


def _elastic_lines(found: JsonObject) -> list[str]:
    """What to write where ranks bring different numbers of micro-batches."""
    if found["elastic"] is None:
        return []
    most, fitting = found["elastic"]["most"], found["elastic"]["fitting"]
    if fitting == most:
        return [f"ranks of unequal speed: a rank has room for {most} micro-batches, the most that elastic may give it"]
    bound = f'"elastic": {{"max_micro_batches": {fitting}}}'
    return [f"ranks of unequal speed: a rank has room for {fitting} micro-batches; with elastic, write {bound}"]


def _acco_lines(found: JsonObject) -> list[str]:
    """Whether two halves a step are worth the try, which only a faster step can be: they are not exact."""
    acco = found["acco"]
    if acco is None:
        return []
    would = f"acco (two halves a step, not exact): {acco['step_s']:.2f} s a step ({acco['step_over_chosen'] - 1:+.1%})"
    if acco["short"]:
        lacking = ", ".join(f"{num_bytes / 1e9:.1f} GB of {tier} memory" for tier, num_bytes in acco["short"].items())
        return [f"{would}, and a rank lacks {lacking} for it"]
    if acco["step_over_chosen"] > _WORTH:
        return [f"{would}: not worth it here"]
    own = json_changes(found["config"], acco["copies"], found["ranks_per_node"])
    wanted = ", ".join(f"{path} {json.dumps(value)}" for path, value in own.items() if value is not None)
    gone = "".join(f"; remove {path}" for path, value in own.items() if value is None)
    return [f"{would}: where the loss allows it (docs/acco.md), write {wanted}{gone}"]


def _nodes_lines(found: JsonObject) -> list[str]:
    """How ranks on several nodes send each other weights and gradients."""
    if found["nodes"] == 1:
        return []
    levels, how = found["setting"]["levels"], "over all ranks at once"
    if levels is not None:
        copied, summed, share = (levels[key] for key in ("ranks_per_node", "gradients", "copy_share"))
        apart = "of a node" if copied == found["ranks_per_node"] else "that share a copy"
        sums = f" (gradients also over the {summed} of a node)" if summed != copied else ""
        how = f"over the {copied} ranks {apart}{sums}, then over the nodes"
        how += f"; copies of {share:.0%} of the layers wait in their memory"
        rounded = [what for what in ("weights", "gradients") if levels[f"quantized_{what}"]]
        how += f"; {' and '.join(rounded)} rounded on their way" if rounded else ""
    return [f"{found['nodes']} nodes: collectives {how}; {found['into_node_bytes'] / 1e9:.2f} GB into a node a step"]


def _stock(task: Task, machine: Profile, limits: TierBytes) -> JsonObject:
    """The least that a step of stock ZeRO-Infinity takes on as many tokens, with the micro-batches that suit it best of those
    whose layers fit into the device; its activations rest in host memory, those of one micro-batch at a time."""
    steps: list[tuple[float, int]] = []
    for size, count in task.counts():
        shape = shape_of(task.spec, task.seconds(size), Division(size, num_shards=task.num_ranks, network=task.network))
        device = shape.working_bytes + 2 * max(shape.layer_elements) * shape.param_bytes
        room = limits[Tier.DEVICE]
        if steps and room is not None and device > room:
            break
        resting = 0.0 if machine.machine.one_memory else 1.0
        placement = stock_placement(shape, limits[Tier.HOST]).with_shares(TensorKind.ACTIVATIONS, {Tier.HOST: resting})
        found = horizontal_step(replace(shape, placement=placement), machine.machine, count)
        steps.append((found.seconds, size))
    seconds, size = min(steps)
    return {"step_s": seconds, "micro_batch_size": size}


def _drive_writes(chosen: Candidate, machine: Profile, ranks: int) -> float | None:
    written = ranks * chosen.traffic.written * _DAY_S / chosen.estimate_s
    size = machine.capacity[Tier.SSD]
    return written / size if size else None


def plan_lines(found: JsonObject) -> list[str]:
    """The plan as lines for the terminal."""
    setting, model, traffic = found["setting"], found["model"], found["traffic"]
    machine, place = found["machine"], setting["placement"]
    early = f"{1 - setting['delay']:.0%} in the backward, the rest " if setting["early"] else ""
    measured = f"measured {machine['date']}" if machine["date"] else "assumed, not measured"
    trained = f" ({model['trained_elements'] / 1e6:.1f} M trained)" if model["trained_elements"] < model["elements"] else ""
    shown = [
        f"{model['name']}: {model['elements'] / 1e9:.2f} G parameters{trained}, {model['sequence_length']} tokens a sequence;"
        f" on {machine['name']} ({measured})",
        f"micro-batches of {setting['micro_batch_size']}, M = {setting['num_micro_batches']}: {found['tokens_per_step']} tokens"
        " a step, all ranks together",
        f"layers of {setting['blocks_per_layer']} block(s), {setting['window']} ahead; optimizer steps {early}in the next"
        " forward",
        f"resting: parameters {place['parameters_on_ssd']:.0%} on SSD, state {place['state_on_ssd']:.0%}, waiting gradients"
        f" {place['gradients_on_ssd']:.0%}; activations {place['activations_on_host']:.0%} in host memory,"
        f" {place['activations_on_ssd']:.0%} on SSD",
        f"{_kept_text(setting)}: {found['keep_reason']}",
        f"predicted: {found['step_s']:.2f} s a step, {found['tokens_per_s']:.1f} tokens/s,"
        f" {found['flops_per_s'] / 1e12:.1f} TFLOP/s without the recompute; bound {found['bound_s']:.2f} s by"
        f" {found['resource']} ({found['step_s'] / found['bound_s']:.2f})",
        f"stock ZeRO-Infinity at its best (micro-batches of {found['stock']['micro_batch_size']}):"
        f" {found['stock']['step_s']:.2f} s or more ({found['stock']['step_s'] / found['step_s']:.2f} x)",
        "busy: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["busy_s"].items()),
    ]
    shown += ([_IN_PLACE] if setting["in_place"] else []) + _nodes_lines(found) + _elastic_lines(found) + _acco_lines(found)
    shown += [f"instead: {other['differs']}: {other['step_over_chosen'] - 1:+.1%}" for other in found["others"]]
    read = sum(value for key, value in traffic.items() if key.endswith("_read"))
    written = sum(value for key, value in traffic.items() if key.endswith("_written"))
    wear = found["drive_writes_per_day"]
    often = "" if wear is None else f" ({wear:.1f} times what is free)"
    shown.append(
        f"SSD: {read / 1e9:.2f} GB read and {written / 1e9:.2f} GB written a step and rank,"
        f" {found['written_bytes_per_day'] / 1e12:.1f} TB written a day{often}"
    )
    shown.append(f"on SSD: {found['ssd_bytes'] / 1e9:.1f} GB")
    tuned = "the fastest tried here" if machine["tuned_aio"] else "the default; `ds-vertical limits --tune-aio` tries others"
    shown.append("aio: " + ", ".join(f"{key} {value}" for key, value in found["config"]["aio"].items()) + f" ({tuned})")
    items = tuple(memory_budget.BudgetItem(**item) for item in found["memory"])
    return [*shown, *memory_budget.budget_lines(items), *(f"assumed: {text}" for text in machine["assumed"])]


if __name__ == "__main__":
    sys.exit(main())
