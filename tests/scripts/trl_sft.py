"""Fine-tune a small Llama with TRL's SFTTrainer, as its documentation writes it; nothing in here knows ds_vertical.

deepspeed train.py --deepspeed ds_config.json --output_dir out [--lora true]
"""

from dataclasses import dataclass

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    lora: bool = False


script, args = HfArgumentParser((ScriptArguments, SFTConfig)).parse_args_into_dataclasses()
set_seed(args.seed)

words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(125))]
vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
data = Dataset.from_dict({"text": [" ".join(f"w{(7 * row + 3 * i) % 125}" for i in range(4 + row % 6)) for row in range(22)]})

config = LlamaConfig(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=2816,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_config(config),
    args=args,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if script.lora else None,
)
trainer.train()
trainer.save_model()
