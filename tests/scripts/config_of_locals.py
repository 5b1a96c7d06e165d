"""The settings of a run are `locals()` of its main function, changed before and while it trains."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel


def main(out: str, lr: float = 0.001, width: int = 32, steps: int = 16):
    config = locals()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config["lr"] *= dist.get_world_size()
    config["width"] *= 2
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, config["width"]), torch.nn.Dropout(0.1), torch.nn.Linear(config["width"], 1)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    torch.manual_seed(1 + rank)
    for step in range(config["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = config["lr"]
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        config["lr"] *= 0.9
        print(f"[rank {rank}] step {step} loss {loss.item()!r} lr {config['lr']!r} width {config['width']}")
    print(f"[rank {rank}] names {sorted(config)} {sorted(locals())}")
    finish(net.parameters(), out, net.state_dict())


if __name__ == "__main__":
    main(arguments().out)
