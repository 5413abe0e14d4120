"""Train LoRA adapters of a small Llama with PEFT and Trainer, as PEFT's documentation writes it; nothing in here knows
ds_vertical.

deepspeed train.py --deepspeed ds_config.json --output_dir out
"""

import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
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
model = AutoModelForCausalLM.from_config(config)
peft_config = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()

trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=default_data_collator)
trainer.train()
trainer.save_model()
