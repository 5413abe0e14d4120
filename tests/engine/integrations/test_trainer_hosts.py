"""A Trainer's script on two hosts, by DeepSpeed's launcher: the folder of its checkpoints, shared, and on each host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import ROOT
from trainer_runs import trainer_config
from two_hosts import TwoHosts, launch

pytestmark = [pytest.mark.slow, pytest.mark.two_hosts, pytest.mark.timeout(900)]
SCRIPT = f"""
import runpy, sys
import ds_vertical
from ds_vertical.engine.checkpoint import shared_dir
shared_dir.BETWEEN_LOOKS_S = 0.05
ds_vertical.patch()
runpy.run_path({str(ROOT / "tests" / "scripts" / "trainer.py")!r}, run_name="__main__")
"""
TRAINING = """--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --max_steps 1 --max_grad_norm 1.0
 --learning_rate 1e-3 --logging_steps 1 --report_to none --bf16 true --use_cpu true""".split()


def train(hosts: TwoHosts, output_dir: Path, *words: str) -> tuple[int, str]:
    """The launch's status, and what its ranks have said."""
    config = trainer_config(hosts.ssd, vertical=True, num_micro_batches=2, rows=1)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = "--save_on_each_node" not in words
    (hosts.shared / "config.json").write_text(json.dumps(config))
    (hosts.shared / "train.py").write_text(SCRIPT)
    launch.write_settings(hosts, 1)
    given = ["--deepspeed", str(hosts.shared / "config.json"), "--output_dir", str(output_dir), *TRAINING, *words]
    log = hosts.shared / "log"
    status = launch.start(hosts, hosts.shared / "train.py", given, log).wait(400)
    return status, log.read_text(errors="replace")


def test_a_folder_that_hosts_do_not_share_is_refused_ahead_of_the_first_step(tmp_path: Path) -> None:
    with TwoHosts(tmp_path) as hosts:
        own, shared = hosts.own / "out", hosts.shared / "out"
        status, said = train(hosts, own)
        assert status != 0
        assert f"CheckpointError: {own}: host nodeB does not see what rank 0 on host nodeA has just written" in said, said
        assert "or pass save_on_each_node=True to TrainingArguments, with " in said
        assert "'loss'" not in said and "bridge Trainer" not in said, "a step has been"
        assert [list((host.own / "out").glob(".*")) for host in hosts.hosts if (host.own / "out").exists()] == [[]]
        for folder, words in ((shared, ()), (own, ("--save_on_each_node", "true"))):
            status, said = train(hosts, folder, *words)
            assert status == 0 and "'loss'" in said and "bridge Trainer" in said, said
        saved = "checkpoint-1/global_step1"
        assert sorted(path.name for path in (shared / saved).glob("rank*")) == ["rank0", "rank1"]
        for rank, host in enumerate(hosts.hosts):
            assert [path.name for path in (host.own / "out" / saved).glob("rank*")] == [f"rank{rank}"]
            assert (host.own / "out" / "checkpoint-1" / "trainer_state.json").is_file()
