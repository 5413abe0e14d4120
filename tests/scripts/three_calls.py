"""Train a small Llama with DeepSpeed's three calls, as its documentation writes them; nothing in here knows ds_vertical.

deepspeed train.py --deepspeed --deepspeed_config ds_config.json --output_dir out
"""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=2816,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = AutoModelForCausalLM.from_config(config)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

tokens = torch.randint(0, 128, (24, 9))
loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)
for epoch in range(2):
    for inputs, targets in loader:
        inputs, targets = inputs.to(engine.device), targets.to(engine.device)
        logits = engine(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary():
            print(f"epoch {epoch} loss {loss.item():.6f}")
engine.save_checkpoint(args.output_dir)
