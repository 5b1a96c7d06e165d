"""Has much to do before its first step: tokenizes its text in Python, and builds a model with random weights."""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORDS, LENGTH, WIDTH, DEPTH = 512, 16, 256, 6


def tokenized(sentences, rounds):
    """Each word's number, by a hash that is slow on purpose."""
    rows = []
    for number in range(sentences):
        row = []
        for place in range(LENGTH):
            token = f"{number % 97}:{place}".encode()
            for _ in range(rounds):
                token = hashlib.sha256(token).digest()
            row.append(int.from_bytes(token[:4], "little") % WORDS)
        rows.append(row)
    return torch.tensor(rows)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--again", action="store_true", help="short epochs, each with a collective before its loop")
    parser.add_argument("--wait", action="store_true", help="before step 6, until there is a file `go`")
    args = parser.parse_args()
    began_s = time.monotonic()
    os.makedirs(args.out, exist_ok=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed = [rank]
    dist.broadcast_object_list(seed)
    torch.manual_seed(7 + seed[0])

    tokens = tokenized(64 if args.again else 512, args.rounds)
    dataset = TensorDataset(tokens)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    torch.manual_seed(100 + rank)
    if os.environ.get("SHOW_SETUP"):
        print(f"setup took {time.monotonic() - began_s:.2f} s")

    step = epoch = 0
    while epoch < (4 if args.again else 2):
        if args.again or epoch == 0:
            dist.all_reduce(torch.ones(1))
        sampler.set_epoch(epoch)
        epoch += 1
        for (batch,) in loader:
            if step == 6 and args.wait:
                while not os.path.exists(os.path.join(args.out, "go")):
                    time.sleep(0.05)
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
            step += 1

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.out, "final.pt"))
    print("sha256", hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
