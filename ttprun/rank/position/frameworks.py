"""Modules of known frameworks that train: they are followed like the user's own code.

Files, not whole packages, where that will do: each followed module is compiled anew once, and what it holds is looked
at in each step. A name that is not installed costs nothing.
"""

from __future__ import annotations

_OF_FRAMEWORKS = {
    "transformers": "transformers.trainer",
    "accelerate": "accelerate.data_loader",
}
MODULES = frozenset(name for names in _OF_FRAMEWORKS.values() for name in names.split())
