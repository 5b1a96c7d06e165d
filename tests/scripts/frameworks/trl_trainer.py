"""trl's SFTTrainer or DPOTrainer on a tiny Llama: config, tokenizer and rows are made on the spot."""

import argparse
import copy

from datasets import Dataset
from digests import print_digests_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--method", choices=["sft", "dpo"], default="sft")
parser.add_argument("--save", action="store_true")
parser.add_argument("--evaluate", action="store_true")
args = parser.parse_args()

WORDS = "the cat sat on a mat and then it saw one small dog run over some grass to his red house".split()


def sentence(number, length):
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(length))


def rows(count, first=0):
    found = []
    for number in range(first, first + count):
        prompt = sentence(number, 3)
        if args.method == "sft":
            found.append({"text": prompt + " " + sentence(number + 1, 5 + number % 7)})
        else:
            chosen, rejected = sentence(number + 1, 4 + number % 3), sentence(number + 2, 4 + number % 4)
            found.append({"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected})
    return Dataset.from_list(found)


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>", "<pad>"], show_progress=False)
    tokenizer.train_from_iterator([sentence(i, 12) for i in range(50)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


set_seed(1)
tokenizer = make_tokenizer()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
)
common = {
    "output_dir": "checkpoints",
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 2,
    "save_strategy": "steps" if args.save else "no",
    "save_steps": 4,
    "eval_strategy": "steps" if args.evaluate else "no",
    "eval_steps": 4,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": 32,
    "seed": 7,
}
train, evaluation = rows(40), rows(10, first=40)
if args.method == "sft":
    config = SFTConfig(dataset_text_field="text", **common)
    trainer = SFTTrainer(model, config, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer)
else:
    config = DPOConfig(beta=0.1, **common)
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),
        config,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
    )
result = trainer.train()


print(f"steps {trainer.state.global_step} loss {result.training_loss!r}")
print_digests_of(trainer)
