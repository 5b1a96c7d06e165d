"""A training step of the size of GPT-2 (124 million parameters), for gpu_check.py; data are drawn on the CPU.

    torchrun --nproc-per-node 2 gpt2.py --device cuda --steps 30 --report reports

`--size small` is for a machine without a GPU. Begin with main().
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured import sha256_of, write_report
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "configs" / "examples"))
from char_gpt import CharGPT

SEED = 1234
# vocabulary, length, width, layers, heads
SIZES = {"gpt2": (50257, 1024, 768, 12, 12), "small": (512, 64, 64, 2, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "npu"])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl", "hccl"])
    parser.add_argument("--size", default="gpt2", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5, help="steps that the report leaves out")
    parser.add_argument("--batch-size", type=int, default=4, help="samples of one rank in one step")
    parser.add_argument("--report", type=Path, help="existing directory for one report a rank")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    is_gpu = args.device != "cpu"
    if is_gpu:
        device_module = torch.get_device_module(args.device)
        device_module.set_device(dist.get_rank() % device_module.device_count())
        torch.use_deterministic_algorithms(True)

    vocabulary, length, width, layers, heads = SIZES[args.size]
    torch.manual_seed(SEED)
    model = CharGPT(vocabulary, length, width, layers, heads, dropout=0.1).to(args.device)
    model.head.weight = model.characters.weight
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(SEED + 1 + dist.get_rank())

    step_s: list[float] = []
    cpu_before_s = time.process_time()
    for step in range(args.steps):
        began_s = time.perf_counter()
        text = torch.randint(vocabulary, (args.batch_size, length + 1)).to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=is_gpu):
            logits = ddp_model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_gpu:
            device_module.synchronize()
        if step >= args.warm_up:
            step_s.append(time.perf_counter() - began_s)
        else:
            cpu_before_s = time.process_time()

    if args.report is not None:
        write_report(args.report, model, step_s, time.process_time() - cpu_before_s)
    if dist.get_rank() == 0:
        print(f"sha256 {sha256_of(model.cpu())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
