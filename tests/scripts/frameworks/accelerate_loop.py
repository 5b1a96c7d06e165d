"""A loop of the script's own with accelerate, as its examples have it; the arguments add what people use."""

import argparse
import json

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from digests import print_digests
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save", action="store_true")
args = parser.parse_args()


class Lines(GeneralTracker):
    """A tracker that appends to a file."""

    name = "lines"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.file = open("tracked.jsonl", "a")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        self.file.write(json.dumps(values) + "\n")

    @on_main_process
    def log(self, values, step=None):
        self.file.write(json.dumps(values | {"step": step}) + "\n")
        self.file.flush()


PartialState(cpu=True)  # a tracker is made before the Accelerator, and asks it
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate, log_with=Lines())
accelerator.init_trackers("example", config={"accumulate": args.accumulate})
set_seed(3)
x = torch.randn(90, 8)
data = TensorDataset(x, (x.sum(dim=1) > 0).long())
train_loader = DataLoader(data, batch_size=4, shuffle=True)
eval_loader = DataLoader(TensorDataset(x[:21], data.tensors[1][:21]), batch_size=4)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=200)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)


def train(loader):
    global done, total
    for batch, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.item()
        done += 1
        if done % 5 == 0:
            accelerator.log({"loss": total / done}, step=done)


done, total = 0, 0.0
for epoch in range(2):
    model.train()
    train(train_loader)
    model.eval()
    right, count = 0, 0
    for batch, labels in eval_loader:
        with torch.no_grad():
            found = model(batch).argmax(dim=-1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        right, count = right + int((found == labels).sum()), count + len(labels)
    accelerator.print(f"epoch {epoch} right {right} of {count}")
    accelerator.log({"right": right}, step=done)
    if args.save:
        accelerator.save_state(f"state-{epoch}")
accelerator.end_training()


rank = accelerator.process_index
print(f"rank {rank} steps {done} total {total!r}")
held = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler}
print_digests(rank, **{name: one.state_dict() for name, one in held.items()})
