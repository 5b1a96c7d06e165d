"""A tiny GPT-2 trained by transformers.Trainer, on text that is made on the spot; the arguments add what people use."""

import argparse
import random

import torch
from digests import print_digests_of
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--save", action="store_true")
parser.add_argument("--callback", action="store_true")
args = parser.parse_args()

set_seed(1)
VOCABULARY = 64


def sentences(count, seed):
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(6, 17))] for _ in range(count)]


class Sentences(Dataset):
    def __init__(self, count, seed):
        self.sentences = sentences(count, seed)

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return {"input_ids": self.sentences[index], "labels": self.sentences[index]}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {"input_ids": 0, "labels": -100}
    found = {
        name: torch.tensor([list(row[name]) + [filler] * (longest - len(row[name])) for row in rows])
        for name, filler in padded.items()
    }
    found["attention_mask"] = (found["labels"] != -100).long()
    return found


class Averaged(TrainerCallback):
    """Keeps a moving average of the loss, and a list that grows."""

    def __init__(self):
        self.average = 0.0
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.average = 0.9 * self.average + 0.1 * float(logs["loss"])
            self.seen.append((state.global_step, self.average))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 7 == 0:
            control.should_log = True


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
)
arguments = TrainingArguments(
    output_dir="checkpoints",
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=args.accumulate,
    learning_rate=1e-3,
    num_train_epochs=2,
    warmup_steps=3,
    logging_steps=2,
    eval_strategy="steps" if args.evaluate else "no",
    eval_steps=4,
    save_strategy="steps" if args.save else "no",
    save_steps=4,
    save_total_limit=2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=7,
)
callbacks = []
average = Averaged()
if args.callback:
    callbacks.append(average)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Sentences(40, 1),
    eval_dataset=Sentences(10, 2),
    data_collator=collate,
    callbacks=callbacks,
)
result = trainer.train()

rank = trainer.args.process_index


print(f"rank {rank} steps {trainer.state.global_step} loss {result.training_loss!r}")
print(f"rank {rank} average {average.average!r} of {len(average.seen)}")
print_digests_of(trainer)
