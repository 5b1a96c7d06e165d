"""Scripts whose tensors are on the simulated NPU of the tests, with its backend hccl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import WHILE_TRUE, Run, Undisturbed

ON_NPU = ["--device=npu", "--backend=hccl"]


def test_plain_torchrun_trains_on_it_with_equal_weights_in_all_ranks(undisturbed: Undisturbed) -> None:
    result = undisturbed(WHILE_TRUE, 2, ON_NPU, device="npu")

    assert result.exit_code == 0, result.story()
    models = {rank: [line for line in lines if "sha256 model" in line] for rank, lines in result.hashes.items()}
    assert sorted(models) == [0, 1], result.story()
    assert models[0][0].replace("[rank 0]", "[rank 1]") == models[1][0], result.story()


COUNTS_COPIES = """
import torch, torch.distributed as dist, torch_npu

dist.init_process_group("hccl")
torch.npu.set_device(dist.get_rank())
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)).to("npu")
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[dist.get_rank()])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
newest, seen = 0, set()
for step in range(30):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64, device="npu")).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    count = torch.npu.copied_to_host()[1]
    seen |= {count - newest} if step > 20 else set()
    newest = count
open(f"copies-{dist.get_rank()}", "w").write(str(max(seen)))
dist.destroy_process_group()
"""


def test_a_step_copies_few_times_to_the_host_however_many_buffers_the_model_has(
    run_ttprun: Callable[..., Run], tmp_path: Path
) -> None:
    """Two notes each in the forward pass, at the loss and in the backward pass; all else before the step, together."""
    script = tmp_path / "counts_copies.py"
    script.write_text(COUNTS_COPIES)

    result = run_ttprun(str(script), 2, device="npu")

    assert result.exit_code == 0, result.story()
    assert max(int((result.folder / f"copies-{rank}").read_text()) for rank in range(2)) <= 12, result.story()
