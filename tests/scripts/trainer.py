"""Train a small Llama with the Hugging Face Trainer, as its documentation writes it; nothing in here knows ds_vertical.

deepspeed train.py --deepspeed ds_config.json --output_dir out [--model_name_or_path folder]
"""

from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = None


model_args, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(args.seed)

tokens = torch.randint(0, 128, (22, 8), generator=torch.Generator().manual_seed(0))
data = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})

config = LlamaConfig(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=2816,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
if model_args.model_name_or_path:
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
else:
    model = AutoModelForCausalLM.from_config(config)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data.select(range(18)),
    eval_dataset=data.select(range(18, 22)),
    data_collator=default_data_collator,
)
trainer.train()
trainer.save_model()
