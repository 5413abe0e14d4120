"""A training script as Accelerate's documentation writes them: it knows nothing of ds_vertical.

Arguments: the JSON, where to write what was computed, and what is done besides ("plain", "own_loss", "workers", "saving", the
names of `LOADERS`).
"""

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate import skip_first_batches as skipped
from accelerate.state import PartialState
from accelerate.utils import DummyOptim, DummyScheduler, GradientAccumulationPlugin, set_seed
from models import MixerModel
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

config, out, kind = sys.argv[1:]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


# by kind: batches of the loader, whether windows end where it does, and what the loop iterates over
LOADERS: dict[str, tuple[int, bool, Any]] = {
    "uneven": (7, True, lambda prepared, plain: prepared),  # on two ranks the second one's last batch is made of the first rows
    "skipped": (8, True, lambda prepared, plain: skipped(prepared, 1)),
    "across": (6, False, lambda prepared, plain: prepared),
    "across, with a rest": (8, False, lambda prepared, plain: prepared),
    "skipped stream": (7, True, lambda prepared, plain: skipped(DataLoader(Stream(plain), batch_size=2), 1)),
    "skipped stream, with a rest": (8, True, lambda prepared, plain: skipped(DataLoader(Stream(plain), batch_size=2), 1)),
}
if int(os.environ["WORLD_SIZE"]) > 1:
    PartialState(cpu=True)  # Accelerate takes a machine without a GPU for one process otherwise
num_batches, ends_windows, chosen = LOADERS.get(kind, (8, True, lambda prepared, plain: prepared))
accelerator: Any = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=ends_windows),
)
set_seed(5)
model = MixerModel(num_layers=2)
rows = torch.randint(0, 257, (2 * num_batches, 12), generator=torch.Generator().manual_seed(3))  # windows of 3, 3 and 2
data: Any = [{"input_ids": row, "labels": row} for row in rows]
workers = 2 if kind == "workers" else 0
loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
held_out = DataLoader(data[:4], batch_size=2)
optimizer = DummyOptim(model.parameters())
scheduler = DummyScheduler(optimizer)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

found: dict[str, Any] = {"losses": [], "norms": [], "lr": [], "sync": [], "evaluation": []}
for epoch in range(2):
    model.train()
    for batch in chosen(loader, data):
        with accelerator.accumulate(model):
            if kind == "own_loss":
                logits = model(batch["input_ids"][:, :-1])
                targets = batch["input_ids"][:, 1:].flatten()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
            else:
                loss = model(**batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["sync"].append(accelerator.sync_gradients)
        found["lr"].append(scheduler.get_last_lr())
    model.eval()
    with torch.no_grad():
        for batch in held_out:
            found["evaluation"].append(accelerator.gather_for_metrics(model(**batch)).tolist())
    if kind == "saving" and epoch == 0:
        accelerator.save_state(f"{out}.state")
        accelerator.load_state(f"{out}.state")
weights = accelerator.get_state_dict(model) or {}  # none but on the first rank
found["weights"] = {name: sha256(tensor.float().numpy().tobytes()).hexdigest() for name, tensor in weights.items()}
found["steps"], found["engine"] = model.global_steps, type(model).__name__
Path(out + (f".{accelerator.process_index}" if accelerator.num_processes > 1 else "")).write_text(json.dumps(found))
if accelerator.num_processes > 1 and weights:
    torch.save(weights, f"{out}.weights")
