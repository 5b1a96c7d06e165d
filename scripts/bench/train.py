"""The script that the benchmarks run: data-parallel training as people write it, with checkpoints of its own.

    torchrun --nproc-per-node 2 train.py --steps 110 --step-logs logs --checkpoint last.pt --report reports

It saves every 50 steps, and begins after the newest checkpoint. Each step's batch is drawn from the step's own seed,
so a run that was resumed trains on what an undisturbed one does. Begin with main().
"""

import os
import time

STARTED_AT_S = time.time()

import argparse  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from measured import Steps, add_turns, sha256_of, write_report  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

IMPORTED_AT_S = time.time()
SAMPLES, CLASSES, SEED = 4096, 10, 1234


def build_model(width: int, depth: int) -> nn.Module:
    """A perceptron of `depth` hidden layers of `width` x `width` weights."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def set_up(width: int, depth: int) -> tuple[Tensor, Tensor, nn.Module, torch.optim.Optimizer]:
    """All samples and their labels, the model and its optimizer: the same in every rank."""
    torch.manual_seed(SEED)
    data, labels = torch.randn(SAMPLES, width), torch.randint(CLASSES, (SAMPLES,))
    model = build_model(width, depth)
    return data, labels, model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def draw_batch(data: Tensor, labels: Tensor, size: int, number: int) -> tuple[Tensor, Tensor]:
    """The samples of the batch of this number, of all that all ranks draw: inputs [size, width] and labels [size]."""
    generator = torch.Generator().manual_seed(SEED + 1 + number)
    chosen = torch.randint(len(data), (size,), generator=generator)
    return data[chosen], labels[chosen]


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Rank 0 writes the checkpoint, and puts it in the place of the last one; the others wait."""
    if dist.get_rank() == 0:
        draft = path.with_suffix(".tmp")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps_done": steps_done}, draft)
        os.replace(draft, path)
    dist.barrier()


def load_checkpoint(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the checkpoint, if there is one; returns the steps that it has done."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["steps_done"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one rank in one step")
    parser.add_argument("--step-logs", type=Path, help="existing directory for one log a rank")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--report", type=Path, help="existing directory for one report of step time and memory a rank")
    parser.add_argument("--warm-up", type=int, default=10, help="steps that the report leaves out")
    add_turns(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)

    data, labels, model, optimizer = set_up(args.width, args.depth)
    steps_done = load_checkpoint(args.checkpoint, model, optimizer)
    ddp_model = DDP(model)

    step_s: list[float] = []
    cpu_before_s = time.process_time()
    for step in range(steps_done, args.steps):
        began_s = time.perf_counter()
        number = step * dist.get_world_size() + dist.get_rank()
        inputs, targets = draw_batch(data, labels, args.batch_size, number)
        loss = F.cross_entropy(ddp_model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.done(step)
        if step - steps_done >= args.warm_up:
            step_s.append(time.perf_counter() - began_s)
        else:
            cpu_before_s = time.process_time()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.6f}", flush=True)
        if args.checkpoint is not None and (step + 1) % args.checkpoint_every == 0:
            save_checkpoint(args.checkpoint, model, optimizer, step + 1)

    if args.report is not None:
        write_report(args.report, model, step_s, time.process_time() - cpu_before_s)
    if dist.get_rank() == 0:
        print(f"sha256 {sha256_of(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
