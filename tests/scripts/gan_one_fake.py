"""A GAN on DDP whose generator learns from the very pictures that the discriminator has learnt from: `fake` lives on.

Between the two steps of an iteration the graph of `fake` is needed, which nobody can record.
"""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments(iterations=30)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10))
D = nn.Sequential(nn.utils.spectral_norm(nn.Linear(10, 16)), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
g_model, d_model = DDP(G), DDP(D, broadcast_buffers=False)
g_opt = torch.optim.RMSprop(G.parameters(), 1e-2)
d_opt = torch.optim.RAdam(D.parameters(), 1e-2)

torch.manual_seed(10 + rank)
totals, scores = torch.zeros(2), []
for i in range(args.iterations):
    real = torch.randn(16, 10).sin()
    fake = g_model(torch.randn(16, 4))

    d_loss = softplus(-d_model(real)).mean() + softplus(d_model(fake.detach())).mean()
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()

    g_loss = softplus(-d_model(fake)).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()

    totals += torch.tensor([d_loss.item(), g_loss.item()])
    scores.append(float(totals[0]))
    print(f"[rank {rank}] iteration {i} losses {totals.tolist()!r}")

print(f"[rank {rank}] scores {len(scores)} sum {sum(scores)!r} draw {torch.rand(()).item()!r}")
finish([*G.state_dict().values(), *D.state_dict().values()], args.out, {"G": G.state_dict(), "D": D.state_dict()})
