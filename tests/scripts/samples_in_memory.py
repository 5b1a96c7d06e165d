"""Holds its samples as many small tensors and arrays; with --write it changes two of them in step 9."""

import hashlib
import os

import numpy
import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch.nn.parallel import DistributedDataParallel

args = arguments(kind="arrays", write=False)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
numbers = numpy.random.default_rng(rank)
COUNT = 600
if args.kind == "arrays":
    samples = [{"x": numbers.random((12, 12), dtype="float32"), "y": number % 10} for number in range(COUNT)]
elif args.kind == "annotations":  # as pycocotools holds them: the same rows in three indexes
    samples = [{"x": [float(n) for n in numbers.integers(0, 9, 144)], "y": number % 10} for number in range(COUNT)]
    by_class = {y: [row for row in samples if row["y"] == y] for y in range(10)}
    dataset = {"rows": samples, "by class": by_class, "by number": dict(enumerate(samples)), "step": 0}
else:
    samples = [([int(number) for number in numbers.integers(0, 50_000, 1000)], i % 10) for i in range(2500)]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1000 if args.kind == "tokens" else 144, 10))
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=0.001)
losses = []


def sample(number):
    one = samples[number % len(samples)]
    x, y = one.values() if isinstance(one, dict) else one
    return torch.as_tensor(x, dtype=torch.float32), y


for step in range(30):
    current = samples[step]
    if args.kind == "annotations":
        assert by_class[step % 10][step // 10] is dataset["by number"][step] is current
        dataset["step"] = step
    rows = [sample(step * 8 + row) for row in range(8)]
    x, y = torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])
    loss = torch.nn.functional.cross_entropy(ddp_model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if step == 9 and args.write:
        row = samples[210]
        if args.kind == "annotations":
            row["x"] = [3.0] * len(row["x"])
        (row["x"] if isinstance(row, dict) else row[0])[0] = 3
        samples[220] = samples[3]
    print(f"step {step} loss {loss.item():.6f}", flush=True)

digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
for number in range(len(samples)):
    digest.update(sample(number)[0].numpy().tobytes())
digest.update(torch.stack(losses).numpy().tobytes())
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(args.out, "final.pt"))
print("sha256", digest.hexdigest())
dist.destroy_process_group()
