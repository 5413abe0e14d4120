"""One rank of the two-rank runs of tests/engine/integrations/test_two_ranks.py, started with the launcher's variables set.

    python tests/support/bridge_worker.py JOB.json

The job: {"folder": of the runs, "out": folder for rank<R>.pt, "runs": [{"name", "bridge", "vertical", "options"}, ...]}, the
options those of `harness.base_config`.

[Note: whose rounding] Stock adds the gradients of all ranks once for each micro-batch, in the dtype of communication, which is
bf16 for a bf16 model. Ours adds the micro-batches in fp32 first, and then the ranks, in fp32. With "communication_data_type":
"fp32" stock rounds no sum to bf16 either, and the two agree.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
import trainer_runs

M = 4  # micro-batches of a step, on each rank
NUM_STEPS = 3


def by_trainer(folder: Path, vertical: bool, options: dict[str, Any]) -> dict[str, Any]:
    """A Trainer on two ranks: what it has logged, DeepSpeed's counters, final weights."""

    def train(folder: Path, config: dict[str, Any], seen: trainer_runs.Seen) -> Any:
        from transformers import Trainer

        config["data_types"] = {"grad_accum_dtype": "fp32"}
        args = trainer_runs.arguments_for(folder, config, eval_strategy="epoch")
        rows = trainer_runs.token_rows(22)  # windows of 4 and 2
        given = {"train_dataset": rows, "eval_dataset": rows[:6], "callbacks": [trainer_runs.recorder(seen)]}
        trainer = Trainer(model=trainer_runs.tiny_llama(), args=args, **given)
        trainer.train()
        predictions = trainer.predict(rows[:14]).predictions  # windows of 1 and 3
        seen.more["predicted"] = predictions.shape
        seen.logs.append({"eval_loss": float(abs(predictions.astype("float64")).mean())})
        return trainer

    seen = trainer_runs.run_arm(folder, vertical=vertical, train=train, num_micro_batches=M, **options)
    return {
        "losses": [log["loss"] for log in seen.logs if "loss" in log],
        "norms": [log["grad_norm"] for log in seen.logs if "grad_norm" in log],
        "evaluation": [log["eval_loss"] for log in seen.logs if "eval_loss" in log],
        "events": seen.events,
        "counters": seen.more,
        "weights": seen.weights,
    }


def by_three_calls(folder: Path, vertical: bool, options: dict[str, Any]) -> dict[str, Any]:
    """A loop of the three calls on two ranks."""
    import ds_vertical

    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 512, (NUM_STEPS * M, 2, 1, 20), generator=generator)[:, rank]
    batches: list[Any] = [{"input_ids": each, "labels": each} for each in rows]
    config = harness.small_buffers(harness.base_config(folder, num_micro_batches=M, **options))
    prepared = ds_vertical.prepare(config)
    found: dict[str, Any] = {"losses": [], "norms": []}
    with harness.running(prepared, trainer_runs.tiny_llama, vertical=vertical) as (engine, model):
        for index, batch in enumerate(ds_vertical.look_ahead(batches) if vertical else batches):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            found["losses"].append(loss.item())
            if index % M == M - 1:
                found["norms"].append(float(engine.get_global_grad_norm()))
        found["counters"] = harness.counters(engine)
        found["weights"] = harness.read_weights(model)
    return found


BRIDGES = {"trainer": by_trainer, "three calls": by_three_calls}


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    harness.start_process_group()
    results = {}
    for run in job["runs"]:
        folder = Path(job["folder"]) / run["name"].replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        results[run["name"]] = BRIDGES[run["bridge"]](folder, run["vertical"], run["options"])
    torch.save(results, Path(job["out"]) / f"rank{os.environ['RANK']}.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
