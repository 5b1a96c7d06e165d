"""Masked language modelling with accelerate and a loop of its own, in the manner of transformers' *_no_trainer.py.

Gradients accumulate over two batches; each epoch is evaluated with gathered losses; every fifth step is saved.
"""

import json
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling, get_scheduler

EPOCHS, BATCH = 3, 2


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with="tensorboard", project_dir="out")
    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained("model")
    model = AutoModelForMaskedLM.from_pretrained("model")
    texts = load_dataset("json", data_files={"train": "text/train.jsonl", "validation": "text/validation.jsonl"})
    with accelerator.main_process_first():
        tokens = texts.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=32, return_special_tokens_mask=True),
            batched=True, remove_columns=["text"],
        )  # fmt: skip
    collate = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15)
    train_loader = DataLoader(tokens["train"], shuffle=True, collate_fn=collate, batch_size=BATCH)
    held_out = DataLoader(tokens["validation"], collate_fn=collate, batch_size=BATCH)
    plain = [parameter for name, parameter in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decayed = [parameter for parameter in model.parameters() if all(parameter is not other for other in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    steps = EPOCHS * math.ceil(len(train_loader) / 2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, train_loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, train_loader, held_out, scheduler
    )
    accelerator.init_trackers("mlm", {"epochs": EPOCHS})
    progress = tqdm(range(steps), disable=not accelerator.is_local_main_process)
    done = 0
    for epoch in range(EPOCHS):
        model.train()
        total = 0
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update(1)
                done += 1
                if done % 5 == 0:
                    accelerator.save_state(f"out/step_{done}")
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(BATCH)))
        perplexity = math.exp(torch.cat(losses).nan_to_num().mean())
        accelerator.print(f"epoch {epoch}: perplexity {perplexity:.4f}")
        accelerator.log({"perplexity": perplexity, "train_loss": total.item() / len(train_loader)}, step=done)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out", is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        with open("out/all_results.json", "w") as file:
            json.dump({"perplexity": perplexity}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
