"""A framework that owns its train function, as Megatron does, with all callbacks of mindio_ttp.

    ttprun --mindio --nproc-per-node 4 scripts/examples/megatron_like.py --out /tmp/megatron
    ttprun --mindio --nproc-per-node 4 --allow-faults --fault kill:rank=1,step=20,phase=backward \\
        scripts/examples/megatron_like.py --out /tmp/megatron                        # recover: the rank is replaced
    ... scripts/examples/megatron_like.py --device npu --break 20:1:high             # retry: in the same process
    ttprun --mindio --rungs persist ... --fault kill:rank=1,step=20 ...              # dump; resume with --load
    ... scripts/examples/megatron_like.py --hot-switch 20:1          # a healthy rank gets a new process, as planned
    ttprun --mindio --rungs resize ... --fault kill:rank=3,step=20 ... --upgrade 40    # the others continue; then all

Two tensor-parallel times two data-parallel ranks (or more; `--pipeline-parallel 2` times two stages), on the CPU over
gloo or on NPUs over hccl. On an NPU the callbacks call torch_npu's own functions, in the order in which MindSpeed-LLM's
do. `--break` makes memory or a link of the simulated NPU (tests/simulated_npu) fail.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_parts import REPLICAS, Gpt, Layers, Optimizer, Pipeline, Schedule, batch_of
from mindio_ttp.controller_ttp import tft_notify_controller_change_strategy, tft_notify_controller_prepare_action
from mindio_ttp.framework_ttp import (
    RepairType,
    tft_end_updating_os,
    tft_exception_handler,
    tft_get_reboot_type,
    tft_get_repair_type,
    tft_init_controller,
    tft_init_processor,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_clean_handler,
    tft_register_rebuild_group_handler,
    tft_register_rename_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_register_stream_sync_handler,
    tft_register_zit_downgrade_rebuild_handler,
    tft_register_zit_upgrade_rebuild_handler,
    tft_register_zit_upgrade_repair_handler,
    tft_register_zit_upgrade_rollback_handler,
    tft_report_load_ckpt_step,
    tft_set_dp_group_info,
    tft_set_optimizer_replica,
    tft_set_update_end_time,
    tft_set_update_start_time,
    tft_start_controller,
    tft_start_processor,
    tft_start_updating_os,
)

RET_OK, RET_ERROR, RET_NO_REBUILD = 0, 1, 2
NO_MEMORY, OUTSIDE_POOL, TEMPORARY = 0, 1, 2  # of torch_npu's check_uce_in_memory
LATEST = "latest_checkpointed_iteration.txt"
KINDS = ("low", "activation", "weight", "high", "moment", "link")


class State:
    """All that the train function works on: a callback changes it here, and the function finds it when it re-enters.

    iteration   steps that are complete
    consumed    samples that are used up
    """

    def __init__(self, options: argparse.Namespace, layers: Layers, is_joining: bool) -> None:
        self.options, self.layers, self.is_joining = options, layers, is_joining
        self.iteration = self.consumed = 0
        self.broken = None if is_joining else options.broken  # another process has another device
        self.build()

    def build(self) -> None:
        """Model and optimizer in new memory."""
        self.model = Gpt(self.layers).to(self.options.device)
        self.optimizer = Optimizer(self.model, self.layers)
        self.pipeline = Pipeline(self.model, self.layers)
        self.schedule = Schedule(self.options.steps)


@tft_exception_handler
def train(state: State) -> None:
    """The train function: it begins, or goes on, at `state.iteration`."""
    if state.is_joining:
        state.is_joining = False
        raise RuntimeError("ARF FINISH")
    layers, data = state.layers, iter(range(state.consumed, 1 << 62))
    while state.iteration < state.options.steps:
        optimizer, batch, gradients = state.optimizer, next(data), []
        for part in layers.parts:
            fail_if_due(state)
            state.model.zero_grad()
            loss = state.pipeline.run(batch_of(batch, part).to(state.options.device))
            gradients.append(optimizer.flat_gradients())
        gradient = optimizer.reduce_gradients(gradients)
        dist.barrier(group=layers.world_group)
        tft_start_updating_os()
        tft_set_update_start_time()
        optimizer.update(gradient, state.schedule.rate, state.iteration + 1)
        tft_set_update_end_time()
        tft_end_updating_os(state.iteration + 1)
        optimizer.gather_weights()
        state.iteration += 1
        state.consumed += 1
        state.schedule.step += 1
        if loss is not None and layers.tp_rank == layers.dp_rank == 0 and state.iteration % 10 == 0:
            print(f"iteration {state.iteration} loss {loss.item():.6f}", flush=True)
        if state.options.save_every and state.iteration % state.options.save_every == 0:
            save_periodically(state)
        if layers.is_first and state.options.hot_switch and state.options.hot_switch[0] == state.iteration:
            tft_notify_controller_prepare_action("hot switch", dict.fromkeys(state.options.hot_switch[1:], 1))
        if layers.is_first and state.options.upgrade == state.iteration:
            tft_notify_controller_change_strategy("upgrade")
        tft_pause_train(state.iteration)


def save_periodically(state: State) -> None:
    """The first holder of each shard writes it; what is lost with all its copies comes from here."""
    layers = state.layers
    if layers.dp_rank in layers.first_holders:
        write_shard(state, state.iteration)
    dist.barrier(group=layers.world_group)
    if layers.is_first:
        rename(state.iteration, [state])


def fail_if_due(state: State) -> None:
    """Have memory or a link of the simulated NPU fail, once."""
    if state.broken is None or state.broken[:2] != (state.iteration, state.layers.rank):
        return
    from torch_npu import breaking  # the simulated one alone has this

    kind, state.broken = state.broken[2], None
    optimizer, block = state.optimizer, state.model.blocks[0]
    if kind == "link":
        breaking.fail_next_collective()
    elif kind == "activation":  # it is read by what comes next in this forward pass

        def fail(module: Any, inputs: Any, output: torch.Tensor) -> None:
            handle.remove()
            breaking.fail_memory(output)

        handle = block.register_forward_hook(fail)
    elif kind == "moment":  # it is read in the midst of the update
        breaking.fail_memory(optimizer.exp_avg)
    else:
        failed = {"high": optimizer.main, "weight": block.out.weight.data}.get(kind, torch.ones(4, device="npu"))
        breaking.fail_memory(failed)
        failed.add_(0)  # read


# The callbacks, in the order of a recovery. args[0] is the train function's own argument.


def stop(args: Any, ctx: Any) -> None:
    """End what runs on the device."""
    if args[0].options.device == "npu" and torch.npu.stop_device(torch.npu.current_device()):
        raise RuntimeError("the device was not stopped")


def clean(is_uce_error: bool, args: Any, ctx: Any) -> int:
    """Make the device ready for work; say whether memory that held something was lost."""
    if args[0].options.device == "cpu":
        return RET_OK
    device = torch.npu.current_device()
    check = torch.npu.check_uce_in_memory(device) if is_uce_error else NO_MEMORY
    if check == OUTSIDE_POOL:
        return RET_ERROR
    if tft_get_repair_type() == "retry":
        dist.reinit_process_group(group=None, rebuild_link=False)
    torch.npu.restart_device(device)
    return RET_NO_REBUILD if check == TEMPORARY else RET_OK


def rebuild_group(fault_ranks: list[int], args: Any, ctx: Any) -> None:
    """A process was replaced: connect the groups anew that are kept; those of the optimizer are made anew."""
    layers = args[0].layers
    if args[0].options.device == "npu" and tft_get_repair_type() != "retry":
        for group in layers.kept_groups():
            dist.reinit_process_group(group, rebuild_link=True)
    layers.renew()


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], repair_info: dict[str, Any], args: Any, ctx: Any
) -> None:
    """Send what the optimizer keeps, or receive it."""
    state, kind = args[0], RepairType(repair_info["repair_type"])
    if kind is RepairType.RT_UCE_LOWLEVEL:
        return
    if need_rebuild:
        state.build()
    if kind in (RepairType.RT_LOAD_CKPT, RepairType.RT_LOAD_REBUILD):
        tft_report_load_ckpt_step(load(state))
        return
    group = dist.new_group(sorted(repair_info["rank_list"]), use_local_synchronization=True)
    for source, target in zip(repair_info["src"], repair_info["dst"], strict=True):
        for tensor in state.optimizer.tensors():
            if kind is RepairType.RT_SEND:
                dist.send(tensor, target, group=group)
            else:
                dist.recv(tensor, source, group=group)
    if state.options.device == "npu":
        for tensor in state.optimizer.tensors():
            torch.npu._recovery.update_npu_tensor_to_safe(tensor)
    synchronize()  # before the group ends, which aborts what has not completed on the device
    dist.destroy_process_group(group)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if dist.get_backend() == "hccl":
        torch.npu.synchronize()


def rollback(step: int, args: Any, ctx: Any) -> None:
    """Learning rate, data and weights are those of `step` again."""
    state = args[0]
    state.iteration = state.consumed = state.schedule.step = step
    state.optimizer.gather_weights()


# The same of a smaller group, and of one that is whole again.


def downgrade_rebuild(dp_ranks: list[int], world_ranks: list[int], args: Any, params: str) -> None:
    """Only these ranks are left; the tensor-parallel groups among them are connected."""
    args[0].layers.shrink(dp_ranks, world_ranks)


def upgrade_rebuild(ranks: list[int], args: Any, params: str) -> None:
    """These ranks have come back; the groups that were made at the start are connected."""
    args[0].layers.be_whole()


def upgrade_repair(
    step: int, need_rebuild: bool, error_ranks: list[int], repair_info: dict[str, Any], args: Any, params: str
) -> None:
    """As for ranks that are replaced."""
    repair(step, need_rebuild, error_ranks, repair_info, args, None)


def upgrade_rollback(step: int, args: Any, params: str) -> None:
    """As in every recovery."""
    rollback(step, args, None)


def save_ckpt(step: int, save_info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    """Write this rank's shard, if it was chosen to."""
    state = args[0]
    if state.layers.rank in save_info[0]["ranks"]:
        write_shard(state, step)


def write_shard(state: State, step: int) -> None:
    """Write what this rank's optimizer keeps."""
    folder = Path(state.options.out) / f"iter_{step:07d}_tmp"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state.optimizer.tensors(), folder / shard_file(state.layers))


def rename(step: int, args: Any) -> None:
    """All shards are there."""
    out = Path(args[0].options.out)
    (out / f"iter_{step:07d}_tmp").rename(out / f"iter_{step:07d}")
    (out / LATEST).write_text(f"{step}\n")


def shard_file(layers: Layers) -> str:
    """Ranks that hold the same have the same file."""
    stage = f"pp_{layers.stage}_" if layers.pp > 1 else ""
    return f"{stage}tp_{layers.tp_rank}_shard_{layers.shard}.pt"


def load(state: State) -> int:
    """Read this rank's shard of the newest checkpoint; returns its step."""
    out = Path(state.options.load or state.options.out)
    step = int((out / LATEST).read_text())
    saved = torch.load(
        out / f"iter_{step:07d}" / shard_file(state.layers), weights_only=True, map_location=state.options.device
    )
    for tensor, stored in zip(state.optimizer.tensors(), saved, strict=True):
        tensor.copy_(stored)
    return step


def register(state: State) -> None:
    """Declare where the copies are, and register all callbacks."""
    layers = state.layers
    replica = {"rank_list": layers.dp_ranks, "replica_cnt": REPLICAS, "replica_shift": 0}
    tft_set_optimizer_replica(layers.rank, [replica])
    tft_set_dp_group_info(layers.rank, layers.dp_ranks)
    tft_register_stop_handler(stop)
    tft_register_clean_handler(clean)
    tft_register_rebuild_group_handler(rebuild_group)
    tft_register_repair_handler(repair)
    tft_register_rollback_handler(rollback)
    tft_register_save_ckpt_handler(save_ckpt)
    tft_register_rename_handler(rename)
    tft_register_stream_sync_handler(synchronize)
    tft_register_zit_downgrade_rebuild_handler(downgrade_rebuild)
    tft_register_zit_upgrade_rebuild_handler(upgrade_rebuild)
    tft_register_zit_upgrade_repair_handler(upgrade_repair)
    tft_register_zit_upgrade_rollback_handler(upgrade_rollback)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="megatron_like_out", help="folder for checkpoints and final.pt")
    parser.add_argument("--load", help="folder to resume from, if there is a checkpoint in it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--pipeline-parallel", type=int, choices=(1, 2), default=1)
    parser.add_argument("--save-every", type=int, default=0, help="iterations between two checkpoints; 0: none")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    parser.add_argument("--deterministic", action="store_true", help="kernels that give the same bits in each run")
    parser.add_argument(
        "--break", dest="broken", type=break_of, help=f"STEP:RANK:{'|'.join(KINDS)}, on the simulated NPU"
    )
    parser.add_argument("--hot-switch", type=switch_of, help="STEP:RANK[:RANK...]: these get new processes as planned")
    parser.add_argument("--upgrade", type=int, help="STEP after which ranks that have left are called back")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        tft_init_controller(rank, world, False, True, True)
        tft_start_controller("127.0.0.1", 8000, False)
    tft_init_processor(rank, world, False, False, "", True, True, True)
    tft_start_processor("127.0.0.1", 8000)
    if tft_is_reboot_node():
        print(f"rank {rank} has a new process ({tft_get_reboot_type()})", flush=True)
    torch.use_deterministic_algorithms(options.deterministic)
    if options.device == "npu":
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if options.device == "cpu" else "hccl")
    layers = Layers(rank, world, options.tensor_parallel, options.dropout, options.pipeline_parallel)
    layers.make_groups()
    state = State(options, layers, tft_is_reboot_node())
    torch.manual_seed(1234 + layers.dp_rank)
    if options.load and (Path(options.load) / LATEST).exists():
        state.iteration = state.consumed = state.schedule.step = load(state)
        state.optimizer.gather_weights()
    register(state)
    train(state)
    weights = torch.nn.utils.parameters_to_vector(state.model.parameters()).detach().cpu()
    print(f"rank {rank} sha256 {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}", flush=True)
    if layers.is_first:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        torch.save(weights, Path(options.out) / "final.pt")
    dist.destroy_process_group()


def break_of(text: str) -> tuple[int, int, str]:
    """ "20:1:high" -> (20, 1, "high")"""
    step, rank, kind = text.split(":")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"'{kind}' is not a kind of fault; use one of {', '.join(KINDS)}")
    return int(step), int(rank), kind


def switch_of(text: str) -> tuple[int, ...]:
    """ "20:1:3" -> (20, 1, 3)"""
    return tuple(map(int, text.split(":")))


if __name__ == "__main__":
    main()
