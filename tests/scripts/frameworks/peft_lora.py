"""LoRA adapters on a tiny frozen GPT-2, by peft, with transformers.Trainer."""

import argparse
import os
import random

import torch
from digests import print_digests
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
VOCABULARY, LENGTH = 64, 16


class Sentences(Dataset):
    def __init__(self, count, seed):
        generator = random.Random(seed)
        self.sentences = [[generator.randrange(3, VOCABULARY) for _ in range(LENGTH)] for _ in range(count)]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        words = torch.tensor(self.sentences[index])
        return {"input_ids": words, "labels": words}


def train_by_trainer(model):
    arguments = TrainingArguments(
        output_dir="checkpoints",
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        num_train_epochs=2,
        logging_steps=2,
        save_strategy="steps" if args.save else "no",
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(40, 1))
    result = trainer.train()
    return trainer.optimizer, trainer.lr_scheduler, result.training_loss


set_seed(1)
base = GPT2LMHeadModel(
    GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
)
lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"])
model = get_peft_model(base, lora)
optimizer, scheduler, loss = train_by_trainer(model)
print(f"loss {loss!r}")
held = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
print_digests(os.environ["RANK"], **{name: one.state_dict() for name, one in held.items()})
