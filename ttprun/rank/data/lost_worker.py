"""An error of a DataLoader's connection to one of its workers: the worker was killed while the rank fetched from it.

torch reports a dead worker itself, in words by which `ttprun.recovery` knows that the script has not failed. But a
process that is being killed closes its connections a moment before its parent can see that it is dead; then the script
ends with "connection reset", "refused", or at the end of the stream.
"""

from __future__ import annotations

from ttprun.rank.position.variables import variables_of

_DEATH_LIMIT_S = 1.0  # of a worker that has closed its connections


def lost_worker(error: BaseException) -> str:
    """The death of a DataLoader's worker that shows as this error, in torch's words; "" if it is none.

    error   that has ended the script, with its traceback

    Blocks for _DEATH_LIMIT_S at most, and only if the error came out of a DataLoader's connection.
    """
    trace = error.__traceback__ if isinstance(error, (OSError, EOFError)) else None
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "torch.utils.data.dataloader":
        trace = trace.tb_next
    if trace is None:
        return ""
    from multiprocessing.connection import wait  # torch has imported it; a script that has no DataLoader need not

    loader = variables_of(trace.tb_frame).get("self")
    workers = {worker.sentinel: worker.pid for worker in getattr(loader, "_workers", ())}
    ended = wait(list(workers), _DEATH_LIMIT_S)
    return f"DataLoader worker (pid {workers[ended[0]]}) exited unexpectedly" if ended else ""
