"""A small GPT trained in one `while True` at module level, in the manner of nanoGPT.

torchrun --nproc-per-node 2 while_true_get_batch.py --max_iters=40 --out=out
"""

import argparse as corpus_module
import ast
import hashlib
import inspect
import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
out = "out"
eval_interval = 10
eval_iters = 3
gradient_accumulation_steps = 3
batch_size = 4
block_size = 32
n_layer = 2
n_head = 4
n_embd = 64
dropout = 0.1
learning_rate = 3e-3
min_lr = 3e-4
max_iters = 40
warmup_iters = 5
beta2 = 0.95
weight_decay = 0.1
grad_clip = 1.0
backend = "gloo"
device = "cpu"  # or "cuda", "npu": with fewer of them than ranks, some share one
seed = 1337
# overridden from the command line: --name=value
for arg in sys.argv[1:]:
    key, _, val = arg.removeprefix("--").partition("=")
    if key not in globals():
        raise ValueError(f"unknown config key: {key}")
    try:
        globals()[key] = ast.literal_eval(val)
    except (SyntaxError, ValueError):
        globals()[key] = val
# -----------------------------------------------------------------------------

init_process_group(backend=backend)
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
if device != "cpu":
    device_module = torch.get_device_module(device)
    device_module.set_device(int(os.environ["LOCAL_RANK"]) % device_module.device_count())
    torch.use_deterministic_algorithms(True)
seed_offset = ddp_rank  # each process gets a different seed
if master_process:
    os.makedirs(out, exist_ok=True)

text = inspect.getsource(corpus_module)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
n = int(0.9 * len(data))
train_data, val_data = data[:n], data[n:]


def get_batch(split):
    d = train_data if split == "train" else val_data
    ix = torch.randint(len(d) - block_size, (batch_size,))
    x = torch.stack([d[i : i + block_size] for i in ix])
    y = torch.stack([d[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + F.dropout(self.mlp(self.ln_2(x)), dropout, self.training)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(chars), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx, targets):
        x = F.dropout(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)), dropout, self.training)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


torch.manual_seed(seed)
model = GPT().to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}],
    lr=learning_rate,
    betas=(0.9, beta2),
)
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=15)
model = DDP(model)
raw_model = model.module
ctx = nullcontext()
torch.manual_seed(seed + 1 + seed_offset)


@torch.no_grad()
def estimate_loss():
    result = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                logits, loss = model(X, Y)
            losses[k] = loss.item()
        result[split] = losses.mean()
    model.train()
    return result


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def sha(state):
    h = hashlib.sha256()
    for name in sorted(state):
        h.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()


X, Y = get_batch("train")  # fetch the very first batch
iter_num = 0
local_iter_num = 0
best_val_loss = 1e9
running_loss = -1.0
tokens_seen = 0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"[rank {ddp_rank}] step {iter_num}: train {losses['train'].item()!r}, val {losses['val'].item()!r}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, os.path.join(out, "ckpt.pt"))

    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        # prefetch the next batch while the model is busy
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    lossf = loss.item() * gradient_accumulation_steps
    if local_iter_num >= 5:
        running_loss = lossf if running_loss == -1.0 else 0.9 * running_loss + 0.1 * lossf
    tokens_seen += X.numel() * gradient_accumulation_steps
    print(
        f"[rank {ddp_rank}] iter {iter_num}: loss {lossf!r}, running {running_loss!r}, lr {lr!r}, "
        f"scale {scaler.get_scale()!r}, tokens {tokens_seen}"
    )
    iter_num += 1
    local_iter_num += 1
    if iter_num >= max_iters:
        break

if master_process:
    torch.save(raw_model.state_dict(), os.path.join(out, "final.pt"))
    print(f"[rank {ddp_rank}] best val loss {float(best_val_loss)!r}")
print(f"[rank {ddp_rank}] sha256 model {sha(raw_model.state_dict())}")
moments = {f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
print(f"[rank {ddp_rank}] sha256 optimizer {sha(moments)}")
print(f"[rank {ddp_rank}] sha256 next batch {sha({'x': X, 'y': Y})}")
destroy_process_group()
