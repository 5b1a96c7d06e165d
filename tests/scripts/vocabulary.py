"""A vocabulary made of a set of words, whose order Python does not promise: rank 0 tells it to the others."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 8
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
args = parser.parse_args()

dist.init_process_group("gloo")
text = [f"word{number * number % 97}" for number in range(20000)]
words = [list(set(text))]
dist.broadcast_object_list(words, src=0)
numbers = {word: number for number, word in enumerate(words[0])}
data = torch.tensor([numbers[word] for word in text])

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(len(numbers), 16), torch.nn.Flatten(), torch.nn.Linear(16 * CONTEXT, len(numbers))
)
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp_model.parameters())
torch.manual_seed(1 + dist.get_rank())
for step in range(30):
    begins = torch.randint(len(data) - CONTEXT, (16,)).tolist()
    inputs = torch.stack([data[begin : begin + CONTEXT] for begin in begins])
    targets = torch.stack([data[begin + CONTEXT] for begin in begins])
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp_model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
if dist.get_rank() == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(args.out, "final.pt"))
print("first words", *words[0][:5])
print("sha256", hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
