"""A loop of the script's own with accelerate, as its documentation has it.

torchrun --nproc-per-node 2 accelerate_loop.py --steps 110 --step-logs logs
"""

import time

STARTED_AT_S = time.time()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402
from measured import Steps, framework_arguments, sha256_of  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

IMPORTED_AT_S = time.time()
SAMPLES, WIDTH, CLASSES = 4096, 1024, 10


def newest(folder):
    """The last state that was saved whole; None if there is none."""
    states = sorted(folder.glob("state-*[0-9]"), key=lambda path: int(path.name.partition("-")[2])) if folder else []
    return states[-1] if states else None


def main() -> None:
    args = framework_arguments(__doc__).parse_args()
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = torch.nn.Sequential(
        *(part for _ in range(3) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())),
        torch.nn.Linear(WIDTH, CLASSES),
    )
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    done = 0
    last = newest(args.checkpoint)
    if last is not None:
        accelerator.load_state(last)
        done = int(last.name.partition("-")[2])
    for epoch in range(done // len(loader), 1 + args.steps // len(loader)):
        loader.set_epoch(epoch)
        skip = done - epoch * len(loader)
        for inputs, targets in accelerator.skip_first_batches(loader, skip) if skip else loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps.done(done)
            done += 1
            if args.checkpoint is not None and done % args.checkpoint_every == 0:
                accelerator.save_state(args.checkpoint / f"draft-{done}")
                if accelerator.is_main_process:
                    (args.checkpoint / f"draft-{done}").rename(args.checkpoint / f"state-{done}")
                accelerator.wait_for_everyone()
            if done >= args.steps:
                break
    if accelerator.is_main_process:
        print(f"sha256 {sha256_of(accelerator.unwrap_model(model))}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
