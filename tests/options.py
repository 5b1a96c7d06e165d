"""What a rank of a test knows of the configuration. No torch."""

from __future__ import annotations

from ttprun.protocol.to_rank import Options

OPTIONS = Options(
    allow_faults=False,
    record_limit_mib=1,
    journal_limit_mib=64,
    commit_timeout_s=5.0,
    is_replaced=True,
    keeps_state=False,
    mirror=[],
    mirror_copies=[],
    mirror_copies_bytes=0,
    own_state=[],
    buffers=[],
    snapshot_every_steps=0,
    verify_every=0,
    overhead_budget=0.0,
    may_rerun=True,
    mindio=False,
    retry_on=[],
    device_errors={},
    nan_limit_s=None,
    user_paths=[],
    follow=[],
    is_strict=False,
    loops=None,
    prints_traceback=True,
)
