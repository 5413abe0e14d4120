"""Train a small Llama in a loop of Accelerate's, as its documentation writes it; nothing in here knows ds_vertical.

accelerate launch --config_file accelerate.yaml train.py --output_dir out

Where Accelerate's configuration names no DeepSpeed JSON, --deepspeed_config does.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--output_dir", required=True)
args = parser.parse_args()

set_seed(0)
plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config) if args.deepspeed_config else None
accelerator = Accelerator(deepspeed_plugin=plugin)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=2816,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
tokens = torch.randint(0, 128, (22, 8))
data = [{"input_ids": row, "labels": row} for row in tokens]
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.6f}")
accelerator.save_state(args.output_dir)
