"""The same hashes of texts in all ranks of a job, and so the same order of what a set of texts gives.

Python draws a seed for them at each start. A replacement would go through a set of texts in another order than the lost
rank did: a vocabulary made of one would number its words otherwise, and all that was made from that would differ. So
ranks and standbys are started with one seed, and the shim hides that from the script and from its children.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "PYTHONHASHSEED"
HIDDEN = "_TTPRUN_HASH_SEED"  # what the user has in its place, as the shim puts it back
_SEED = "1"  # in every job, so that one that resumes from a checkpoint has it as well


def seed_for(environment: Mapping[str, str]) -> str:
    """The seed for Pythons with that environment: the user's, if there is one."""
    given = environment.get(VARIABLE, "")
    return given if given.isdigit() else _SEED


def seeded(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank's Python is started with beside that environment."""
    return {VARIABLE: seed_for(environment), HIDDEN: environment.get(VARIABLE, "")}


_has_seed_of_user = False


def note_who_seeded() -> None:
    """Note whether the user has given a seed. Called before the script can set the variable itself, to no effect."""
    global _has_seed_of_user
    _has_seed_of_user = os.environ.get(VARIABLE, "").isdigit()


def have_seed_of_user() -> bool:
    """Whether texts have the same hashes in each run, so that a script can count on the order of a set of them."""
    return _has_seed_of_user
