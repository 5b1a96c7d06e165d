"""A pipeline of two stages by torch.distributed.pipelining (1F1B), times data parallelism if there are four ranks.

torchrun --nproc-per-node 2 pipelined.py --steps 110
"""

import time

STARTED_AT_S = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measured import Steps, framework_arguments  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402

IMPORTED_AT_S = time.time()
STAGES = 2


def main() -> None:
    parser = framework_arguments(__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=4)
    args = parser.parse_args()
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // STAGES
    mesh = init_device_mesh("cpu", (replicas, STAGES), mesh_dim_names=("dp", "pp"))
    place = mesh["pp"].get_local_rank()
    torch.manual_seed(place)
    layers = (torch.nn.Sequential(torch.nn.Linear(args.width, args.width), torch.nn.ReLU()) for _ in range(args.layers))
    model = torch.nn.Sequential(*layers)
    stage = PipelineStage(model, place, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=args.microbatches, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for step in range(args.steps):
        inputs = torch.randn(args.batch_size, args.width, generator=batches)
        optimizer.zero_grad()
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs.sin())
        if replicas > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        optimizer.step()
        steps.done(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
