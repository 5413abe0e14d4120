"""`ds_vertical.patch()`: whose engine is made, in which folder, of which configuration."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from scripts_as_they_are import CONFIG

# Prints one JSON object. Every case is what scripts do with DeepSpeed's own names.
CASES = """
import base64, copy, json, sys
from argparse import Namespace
from pathlib import Path

import deepspeed
import torch
from torch import nn

stock = deepspeed.initialize
import ds_vertical

ds_vertical.patch()
once = deepspeed.initialize, deepspeed.zero.Init.__init__
ds_vertical.patch()
found = {"patched": once[0] is not stock, "idempotent": once == (deepspeed.initialize, deepspeed.zero.Init.__init__)}
path = sys.argv[1]
config = json.loads(Path(path).read_text())
before = copy.deepcopy(config)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean()

def build(given):
    with deepspeed.zero.Init(config_dict_or_path=given):
        return Model()

def folder(model):
    return str(Path(next(model.parameters()).nvme_swapper.swap_folder))

def seen(engine):
    return {"kind": type(engine).__name__, "folder": folder(engine.module), "section": engine.config.get("vertical_schedule"),
            "state": engine.config["zero_optimization"]["offload_optimizer"]["nvme_path"]}

policy, reference = build(config), build(path)  # both ahead of either engine, as DPO has them
found["folders"] = [folder(policy), folder(reference)]
engine = deepspeed.initialize(None, policy, config_params=config)[0]
found["policy"] = seen(engine)
no_optimizer = {key: value for key, value in config.items() if key != "optimizer"}
found["reference"] = seen(deepspeed.initialize(model=reference, config=no_optimizer)[0])
found["unchanged"] = config == before

late = build(config)
adam = deepspeed.ops.adam.DeepSpeedCPUAdam(late.parameters())
by_code = deepspeed.initialize(model=late, optimizer=adam, config=no_optimizer)
found["late"] = seen(by_code[0])
encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
found["args"] = seen(deepspeed.initialize(args=Namespace(deepspeed_config=path), model=build(encoded))[0])
off = copy.deepcopy(config)
off["zero_optimization"]["vertical_schedule"] = {"enabled": False}
found["off"] = seen(deepspeed.initialize(model=build(off), config=off)[0])
none = copy.deepcopy(off)
del none["zero_optimization"]["vertical_schedule"]
none["zero_optimization"]["offload_param"] = {"device": "cpu"}
none["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
found["none"] = type(deepspeed.initialize(model=build(none), config=none)[0]).__name__

def refusal(*calls, **arguments):
    # of `deepspeed.initialize`, or of what is given
    try:
        (calls or [deepspeed.initialize])[0](**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

with deepspeed.zero.Init(config_dict_or_path=config):
    halves = nn.ModuleList([nn.Linear(32, 32)])
halves.append(build(config))
found["halves"] = refusal(model=halves, config=config)
found["twice"] = refusal(args=Namespace(deepspeed_config=path), model=Model(), config=config)
found["auto"] = refusal(model=Model(), config=config | {"gradient_clipping": "auto"})
found["lightning"] = []
for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
    strategy = {"__name__": f"{package}.strategies.deepspeed"}  # the module's name is what is refused, wherever it lies
    exec("def setup(call, **arguments): return call(**arguments)", strategy)
    found["lightning"].append(refusal(strategy["setup"], call=deepspeed.initialize, model=Model(), config=config))
    found["lightning"].append(refusal(strategy["setup"], call=deepspeed.zero.Init, config_dict_or_path=config))
found["misspelt"] = refusal(model=Model(), config=none | {"vertical_shedule": {}})
loss = engine.train_batch(iter([torch.ones(1, 32), torch.zeros(1, 32)]))  # trains beside all the others
found["loss"] = float(loss)
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("patch")
    config, script = folder / "config.json", folder / "cases.py"
    config.write_text(json.dumps(CONFIG).replace("/ssd", str(folder / "ssd")))
    script.write_text(CASES)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}
    command = [sys.executable, str(script), str(config)]
    done = forks.run(folder, command, os.environ | alone, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "ssd").iterdir()) == [], "folders of runs were left behind"
    told = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(told.removeprefix("FOUND ")) | {"log": done.stdout + done.stderr}


def test_patching_twice_is_patching_once(found: dict[str, Any]) -> None:
    assert found["patched"] and found["idempotent"]


def test_each_model_has_a_folder_of_its_own_which_its_engine_finds(found: dict[str, Any]) -> None:
    policy, reference = found["folders"]
    run_of = {name: Path(name).relative_to(ssd_of(found)).parts[0] for name in (policy, reference)}
    assert run_of[policy] != run_of[reference], "the second zero.Init has cleared the first one's files"
    assert found["policy"]["folder"] == policy and found["reference"]["folder"] == reference
    assert Path(found["policy"]["state"]).name == run_of[policy]
    assert found["unchanged"], "the script's own configuration was changed"
    assert found["loss"] > 0


def ssd_of(found: dict[str, Any]) -> Path:
    return Path(found["policy"]["state"]).parent


def test_the_section_makes_the_engine(found: dict[str, Any]) -> None:
    for case in ("policy", "late", "args"):
        assert found[case]["kind"] == "VerticalEngine", case
    assert found["off"]["kind"] == found["none"] == "DeepSpeedEngine"
    assert found["log"].count("the configuration has no vertical_schedule section: DeepSpeed's own order trains") == 1


def test_an_engine_that_trains_nothing_is_stocks_without_the_section(found: dict[str, Any]) -> None:
    assert found["reference"]["kind"] == "DeepSpeedEngine" and found["reference"]["section"] is None
    assert found["log"].count("an engine without an optimizer is DeepSpeed's own") == 1


def test_what_cannot_be_trained_is_refused_in_our_words(found: dict[str, Any]) -> None:
    assert found["halves"].startswith("ConfigError: initialize(model=...): parts of the model were built under 2 zero.Init")
    assert found["twice"].startswith("ConfigError: initialize: got both config= and args.deepspeed_config=")
    assert found["auto"].startswith('ConfigError: gradient_clipping: got "auto"')
    assert found["misspelt"].startswith('ConfigError: vertical_shedule: unknown section; did you mean "vertical_schedule"?')


def test_a_call_by_lightnings_strategy_is_refused(found: dict[str, Any]) -> None:
    assert len(found["lightning"]) == 8
    for said in found["lightning"]:
        assert said.startswith("ConfigError: vertical_schedule: Lightning's DeepSpeedStrategy drives this engine"), said
