"""The job as torchrun would run it, for when ttprun itself fails before the ranks have begun.

A bug of ours, or a release of torch that is not as we think, must not keep a job from running. Begin with `run`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from ttprun.cli.options import add_options


def can_run(error: Exception) -> bool:
    """Whether the job may be begun again: no rank has started, and it is not torch's own rendezvous that failed."""
    elastic = sys.modules.get("ttprun.agent.launcher.elastic_agent")
    has_started = elastic is not None and elastic.ReplacingAgent.has_started_ranks
    return not has_started and not isinstance(error, RendezvousError)


def run(words: Sequence[str], error: Exception) -> int:
    """Say why protection is off, and run the command line by torch's own launcher. Returns the exit code.

    words   of the command line, ours among them
    error   what has kept ttprun from running it
    """
    why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    print(
        f"ttprun: an error in ttprun itself ({why}); protection is off, and the job runs as under torchrun; "
        "'ttprun doctor' checks this machine",
        file=sys.stderr,
    )
    parser = torchrun.get_args_parser()
    with contextlib.suppress(Exception):
        add_options(parser)
    try:
        torchrun.run(parser.parse_args(list(words)))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0
