"""Image classification with accelerate and a loop of its own, in the manner of transformers' *_no_trainer.py.

A ViT from its configuration alone, torchvision's random augmentation, and a metric of `evaluate`'s kind by hand.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from torchvision import transforms
from transformers import ViTConfig, ViTForImageClassification, get_scheduler

EPOCHS = 3


def main():
    accelerator = Accelerator()
    set_seed(1)
    pictures = load_dataset("imagefolder", data_files={"train": "pictures/train/**", "validation": "pictures/val/**"})
    drawn = transforms.Compose(
        [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    fixed = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor()])

    def with_pixels(change):
        return lambda rows: rows | {"pixel_values": [change(picture.convert("RGB")) for picture in rows["image"]]}

    def collate(rows):
        pixels = torch.stack([row["pixel_values"] for row in rows])
        return {"pixel_values": pixels, "labels": torch.tensor([row["label"] for row in rows])}

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    labels = pictures["train"].features["label"].names
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=len(labels), **sizes))
    train = DataLoader(
        pictures["train"].with_transform(with_pixels(drawn)), shuffle=True, collate_fn=collate, batch_size=3
    )
    held_out = DataLoader(pictures["validation"].with_transform(with_pixels(fixed)), collate_fn=collate, batch_size=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=EPOCHS * len(train))
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)
    for epoch in range(EPOCHS):
        model.train()
        for batch in train:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for batch in held_out:
            with torch.no_grad():
                guessed = model(**batch).logits.argmax(-1)
            guessed, wanted = accelerator.gather_for_metrics((guessed, batch["labels"]))
            right, count = right + int((guessed == wanted).sum()), count + len(wanted)
        accelerator.print(f"epoch {epoch}: {right / count:.3f}")
        accelerator.save_state(f"out/epoch_{epoch}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out", is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
