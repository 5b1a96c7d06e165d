"""A GAN on DDP: batches from iter()/next(), two optimizers in turn, augmentation with numpy and random."""

import hashlib
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

Z_DIM = 16
SIDE = 12


class Rings(Dataset):
    """Rings of a random radius; each look at one shakes it anew."""

    def __init__(self, size, seed):
        rng = np.random.RandomState(seed)
        self.radius = rng.uniform(2.0, 5.0, size).astype(np.float32)
        yy, xx = np.mgrid[:SIDE, :SIDE].astype(np.float32) - (SIDE - 1) / 2
        self.distance = np.sqrt(xx**2 + yy**2)

    def __len__(self):
        return len(self.radius)

    def __getitem__(self, i):
        radius = self.radius[i] * random.uniform(0.95, 1.05)
        picture = np.exp(-((self.distance - radius) ** 2)) + np.random.normal(0, 0.05, (SIDE, SIDE))
        if random.random() < 0.5:
            picture = picture[::-1].copy()
        return torch.from_numpy(picture.astype(np.float32)).flatten()


def mlp(n_in, n_out, *last):
    return nn.Sequential(
        nn.Linear(n_in, 256), nn.LeakyReLU(0.2), nn.Dropout(0.05), nn.Linear(256, 256), nn.LeakyReLU(0.2),
        nn.Linear(256, n_out), *last,
    )  # fmt: skip


def sha(*states):
    h = hashlib.sha256()
    for state in states:
        for name, value in state.items():
            h.update(str(name).encode())
            h.update(sha(value).encode() if isinstance(value, dict) else value.cpu().numpy().tobytes())
    return h.hexdigest()


def average(device, *values):
    t = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).tolist()


def main():
    args = arguments(iterations=24, seed=7, device=["cpu", "cuda", "npu"], backend="")

    dist.init_process_group(args.backend or ("hccl" if args.device == "npu" else "gloo"))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    if args.device != "cpu":
        device_module = torch.get_device_module(args.device)
        device_module.set_device(rank % device_module.device_count())
        torch.use_deterministic_algorithms(True)
    G, D = mlp(Z_DIM, SIDE * SIDE, nn.Sigmoid()).to(args.device), mlp(SIDE * SIDE, 1).to(args.device)
    g_model, d_model = DDP(G), DDP(D)
    g_opt = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_opt = torch.optim.RMSprop(D.parameters(), lr=2e-4)
    bce = nn.BCEWithLogitsLoss()

    random.seed(args.seed + rank)
    np.random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)
    coin = random.Random(1000 + rank)
    noise = np.random.default_rng(2000 + rank)

    dataset = Rings(160 * world, seed=args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=0, drop_last=True)
    epoch = 0
    data_iter = iter(loader)
    d_losses, g_losses, flips = [], [], 0

    for iteration in range(args.iterations):
        try:
            real = next(data_iter)
        except StopIteration:
            epoch += 1
            sampler.set_epoch(epoch)
            data_iter = iter(loader)
            real = next(data_iter)

        # augmentation of the whole batch in the main process
        real = real + torch.from_numpy(noise.normal(0.0, 0.02, real.shape).astype(np.float32))
        if coin.random() < 0.3:
            real = real.flip(1)
            flips += 1
        real = real.to(args.device)

        # discriminator
        for p in D.parameters():
            p.requires_grad_(True)
        z = torch.randn(len(real), Z_DIM, device=args.device)
        with torch.no_grad():
            fake = G(z)
        d_opt.zero_grad()
        scores = d_model(torch.cat([real, fake]))
        target = torch.cat([torch.full((len(real), 1), 0.9), torch.zeros(len(real), 1)]).to(args.device)
        d_loss = bce(scores, target)
        d_loss.backward()
        d_opt.step()

        # generator
        for p in D.parameters():
            p.requires_grad_(False)
        g_opt.zero_grad()
        g_loss = bce(D(g_model(torch.randn_like(z))), torch.ones_like(scores[: len(real)]))
        g_loss.backward()
        g_opt.step()

        d_losses.append(d_loss.item())
        g_losses.append(g_loss.item())
        print(
            f"[rank {rank}] epoch {epoch} iteration {iteration} d {d_loss.item()!r} g {g_loss.item()!r} flips {flips}"
        )
        if iteration % 5 == 4:
            d_mean, g_mean, mean_flips = average(args.device, np.mean(d_losses[-5:]), np.mean(g_losses[-5:]), flips)
            print(f"[rank {rank}] iteration {iteration} mean d {d_mean!r} g {g_mean!r} flips {mean_flips!r}")

    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save({"G": G.state_dict(), "D": D.state_dict()}, os.path.join(args.out, "final.pt"))
    print(f"[rank {rank}] draws {random.random()!r} {np.random.rand()!r} {coin.random()!r} {noise.random()!r}")
    print(f"[rank {rank}] torch draw {torch.rand(()).item()!r}")
    print(f"[rank {rank}] sha256 model {sha(G.state_dict(), D.state_dict())}")
    print(f"[rank {rank}] sha256 optimizer {sha(g_opt.state_dict()['state'], d_opt.state_dict()['state'])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
