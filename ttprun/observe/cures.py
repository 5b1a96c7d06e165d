"""What to do about a reason for which a rank was, or could not be, replaced. Begin with `with_cure`."""

from __future__ import annotations

import re

_MARK = "; what helps: "
_SAID = r"cannot be recorded: |: use |: give each|: zero |: seed |: make |: call |: write|, or broadcast|user_paths"
# What a reason names -> what helps, something that can be done. The first that is found.
_CURES = (
    (_SAID, ""),
    (
        "another batch|other samples|batch of a DataLoader number|DataLoaders have yielded",
        "let dataset and sampler give the same each time the script begins",
    ),
    ("carries gradients across", "zero the gradients before or after each step"),
    ("other random states", "draw from a generator that the script seeds, or keeps in a variable"),
    (
        "no other rank holds|no single rank holds|are sharded over the ranks|its own part",
        "--buddy on or a larger --buddy-memory, to mirror each rank's own part (on the CPU), or --snapshot-every "
        "10steps: see 'Covered by a snapshot only' in 'ttprun guide limits'",
    ),
    ("different weights", "seed the weights alike in all ranks, or broadcast them before the first step"),
    ("loss number|input of a collective", "keep what the step depends on in variables or in objects with state_dict"),
    (
        "was not followed|is not followed|is followed from the next run|training loop of",
        "name the package in user_paths of the configuration: see 'ttprun guide frameworks'",
    ),
    (
        "too large to record|graph is not recorded",
        "compute it again after the step, or --snapshot-every 10steps: see 'Covered by a snapshot only' in 'ttprun "
        "guide limits'",
    ),
    (
        "in the lost rank, and the replacement has",
        "let the set-up make it before the training loop, the same each time the script begins",
    ),
    (
        "issues '|has shape|the lost rank was at|has not come|comes to|did not reach|the script's end",
        "let the set-up do the same each time the script begins, whatever an earlier run has left (files, time, names)",
    ),
    ("record_limit_mib|journal_limit_mib", "raise it: see 'ttprun guide configuration'"),
)  # fmt: skip


def cure_of(reason: str) -> str:
    """What helps against it; "" if nothing is known to, or the reason itself says so."""
    return next((cure for pattern, cure in _CURES if re.search(pattern, reason)), "")


def says_cure(reason: str) -> bool:
    """Whether a reason itself says what helps."""
    return bool(re.search(_SAID, reason))


def with_cure(reason: str) -> str:
    """A reason with what helps, for one line."""
    cure = cure_of(reason)
    return f"{reason}{_MARK}{cure}" if cure and _MARK not in reason else reason


def split_cure(reason: str) -> tuple[str, str]:
    """(the reason, what helps) of what `with_cure` has returned."""
    why, _, cure = reason.partition(_MARK)
    return why, cure
