"""Scripts whose tensors are on the simulated NPU of the tests, with its backend hccl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Run

COUNTS = """
import json, torch, torch.distributed as dist, torch_npu

dist.init_process_group("hccl")
rank = dist.get_rank()
torch.npu.set_device(rank)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).to("npu")
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = torch.utils.data.TensorDataset(torch.randn(960, 64), torch.randint(0, 8, (960,)))
sampler = torch.utils.data.DistributedSampler(data)
newest, seen, norms = None, [], []
for inputs, labels in torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler):
    optimizer.zero_grad()
    inputs, labels = (one.pin_memory().to("npu", non_blocking=True) for one in (inputs, labels))
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    scheduler.step()
    counts = [torch.npu.drains(), torch.npu.copied_to_host()[1]]
    seen += [[now - before for now, before in zip(counts, newest)]] if newest else []
    newest = counts
json.dump(seen[10:], open(f"counts-{rank}", "w"))
dist.destroy_process_group()
"""


def test_a_step_waits_for_the_device_once_however_many_buffers_the_model_has(
    run_ttprun: Callable[..., Run], tmp_path: Path
) -> None:
    """For one copy, before the step, at a comparison of all weights, too; under torchrun it never waits. What is noted
    of losses and of what collectives are given is sent in two more copies, for which nothing waits."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)

    result = run_ttprun(str(script), 2, options=["--verify-every", "25"], device="npu")

    assert result.exit_code == 0, result.story()
    counts = [json.loads((result.folder / f"counts-{rank}").read_text()) for rank in range(2)]
    assert [[drains for drains, _ in steps] for steps in counts] == [[1] * 19] * 2, result.story()
    assert max(copies for steps in counts for _, copies in steps) == 1 + 2, result.story()
