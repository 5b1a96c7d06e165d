"""Process groups that survive a lost peer: over a backend that can be replaced, with a journal of their collectives.

PATCHES is what they change in a script's process: rows of the table that `ttprun explain` prints. What they need of
whoever uses them: current_rank.py. May import: introspect, device, protocol.
Begin with process_group.py (what happens at each collective), then journal.py.
"""

from __future__ import annotations

from typing import Literal

from ttprun.introspect.patching import Patch

_C10D = "torch.distributed.distributed_c10d"
_CAPTURING: tuple[tuple[str, str, Literal["script", "imported"]], ...] = (
    ("torch.cuda.graphs", "CUDAGraph", "script"),
    ("torch_npu.npu", "NPUGraph", "imported"),
)
_SYNCHRONIZING: tuple[tuple[str, Literal["script", "imported"]], ...] = (
    ("torch.cuda", "script"),
    ("torch.accelerator", "imported"),
    ("torch_npu.npu", "imported"),
)
PATCHES: tuple[Patch, ...] = (
    Patch(
        "threading",
        "Thread.start",
        "groups.thread_collectives:wrap_start",
        "to give the collectives of a thread that a replay starts once more the lost rank's results",
    ),
    Patch(
        _C10D,
        "init_process_group",
        "groups.group_making:wrap_init_process_group",
        "to give the script a process group whose connection can be replaced",
        "always",
    ),
    Patch(
        _C10D,
        "new_group",
        "groups.group_making:wrap_new_group",
        "to make the connections of these groups replaceable, too",
        "always",
    ),
    Patch(
        _C10D,
        "destroy_process_group",
        "groups.group_making:wrap_destroy_process_group",
        "to stop tracking a group that the script destroys",
        "always",
    ),
    Patch(
        _C10D,
        "split_group",
        "groups.group_making:wrap_split_group",
        "to make managed groups of the parts, whose connections can be replaced too",
        "always",
    ),
    *(
        Patch(f"torch.distributed.fsdp._fully_shard.{module}", method, f"groups.waits:{wrap}", why, "imported")
        for module, method, wrap, why in (
            (
                "_fsdp_param_group",
                "FSDPParamGroup.wait_for_unshard",
                "wrap_wait_for_unshard",
                "on a device, to wait for a gather where its result is unpacked",
            ),
            (
                "_fsdp_param_group",
                "FSDPParamGroup.post_backward",
                "wrap_post_backward",
                "on a device, to wait for a reduction before the next one is put together",
            ),
            (
                "_fsdp_state",
                "FSDPState._root_post_backward_final_callback",
                "wrap_final_callback",
                "on a device, to wait for the last reduction of a backward pass",
            ),
        )
    ),
    Patch(
        _C10D,
        "batch_isend_irecv",
        "groups.group_making:wrap_batch_isend_irecv",
        "over a device's backend, to start the batch together, as torch does for groups of its own only",
    ),
    *(
        Patch(
            module,
            f"{graph}.capture_begin",
            "groups.group_making:wrap_capture_begin",
            "to know of graphs, which run without Python: after the first step no rank is replaced from then on",
            where,
        )
        for module, graph, where in _CAPTURING
    ),
    *(
        Patch(
            module,
            "synchronize",
            "groups.group_making:wrap_synchronize",
            "to wait for the collectives before it: one that a fault has ended is issued again first",
            where,
        )
        for module, where in _SYNCHRONIZING
    ),
    Patch(
        "torch.distributed._symmetric_memory",
        "rendezvous",
        "groups.group_making:wrap_rendezvous",
        "to know that the script's kernels reach into other ranks' memory: no rank is replaced from then on",
        "imported",
    ),
    Patch(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._get_ddp_logging_data",
        "groups.group_making:wrap_ddp_logging_data",
        "to name the script's backend there, not our own",
        "always",
    ),
    *(
        Patch(
            f"torch.distributed.checkpoint._async_{kind}_executor",
            f"_{kind.capitalize()}BasedAsyncCheckpointExecutor.execute_save",
            "groups.thread_collectives:wrap_execute_save",
            "to know which checkpoints dcp.async_save has not finished; in a replay, to save nothing",
            "imported",
        )
        for kind in ("thread", "process")
    ),
    Patch(
        "torch._jit_internal",
        "_extract_tensors",
        "groups.work:wrap_extract_tensors",
        "to let DDP read results from our futures without pickling them",
    ),
)
