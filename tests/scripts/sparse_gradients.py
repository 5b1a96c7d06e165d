"""A bag of words with a sparse embedding: its gradients hold the rows that a batch has met, and no others."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, LENGTH, BATCH, STEPS = 500, 12, 8, 24


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, sparse=True)
        self.head = nn.Linear(16, 2)

    def forward(self, words):
        return self.head(F.dropout(self.embedding(words).mean(1), 0.1, self.training))


def make_optimizers(kind, model):
    embedding, rest = list(model.embedding.parameters()), list(model.head.parameters())
    if kind != "sparse-adam":
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)]
    return [torch.optim.SparseAdam(embedding, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def main():
    args = arguments(optimizer="sparse-adam", by_hand=False)

    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    own = BagOfWords()
    model = own if args.by_hand else DDP(own)
    optimizers = make_optimizers(args.optimizer, own)
    torch.manual_seed(100 + rank)
    for step in range(STEPS):
        words = torch.randint(WORDS, (BATCH, LENGTH))
        loss = F.cross_entropy(model(words), (words.sum(1) % 2))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if args.by_hand:
            for parameter in own.parameters():
                parameter.grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        met = own.embedding.weight.grad.coalesce().indices().numel()
        for optimizer in optimizers:
            optimizer.step()
        print(f"[rank {rank}] step {step} loss {loss.item()!r} rows {met}")

    finish(own.state_dict().values(), args.out, own.state_dict())


if __name__ == "__main__":
    main()
