"""Scripts whose tensors are on the simulated NPU of the tests, with its backend hccl."""

from __future__ import annotations

from tests.e2e.harness import WHILE_TRUE, Undisturbed

ON_NPU = ["--device=npu", "--backend=hccl"]


def test_plain_torchrun_trains_on_it_with_equal_weights_in_all_ranks(undisturbed: Undisturbed) -> None:
    result = undisturbed(WHILE_TRUE, 2, ON_NPU, device="npu")

    assert result.exit_code == 0, result.story()
    models = {rank: [line for line in lines if "sha256 model" in line] for rank, lines in result.hashes.items()}
    assert sorted(models) == [0, 1], result.story()
    assert models[0][0].replace("[rank 0]", "[rank 1]") == models[1][0], result.story()
