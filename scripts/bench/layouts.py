"""A loop whose parameters are sharded over the ranks: FSDP2, HSDP, or tensor parallelism by DTensor.

torchrun --nproc-per-node 2 layouts.py --layout fsdp --steps 110
"""

import time

STARTED_AT_S = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measured import Steps, framework_arguments  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

IMPORTED_AT_S = time.time()
CLASSES = 10


def sharded(model: torch.nn.Sequential, layout: str, world: int) -> torch.nn.Sequential:
    """The model in one of the layouts: fsdp: over all ranks; hsdp: two replicas; tp: each pair of layers over all."""
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        for block in model[:-1]:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model
    replicas = 2 if layout == "hsdp" else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replica", "shard"))
    mesh = mesh["shard"] if replicas == 1 else mesh
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    parser = framework_arguments(__doc__)
    parser.add_argument("--layout", default="fsdp", choices=["fsdp", "hsdp", "tp"])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    blocks = (
        torch.nn.Sequential(
            torch.nn.Linear(args.width, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, args.width)
        )
        for _ in range(args.blocks)
    )
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(args.width, CLASSES))
    model = sharded(model, args.layout, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seed = 0 if args.layout == "tp" else dist.get_rank()
    batches = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        inputs = torch.randn(args.batch_size, args.width, generator=batches)
        targets = torch.randint(CLASSES, (args.batch_size,), generator=batches)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.done(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
