"""Loaded by each rank's Python at its start: hands over to ttprun's hooks, and to the `sitecustomize` it hides.

Standard library only, no torch import. It takes itself off PYTHONPATH, so a rank's children are not hooked, hides the
seed that this Python was given for its hashes (text_hashes.py), and lets no exception out: with the hooks broken, the
script runs as under torchrun.
"""

import os
import sys


def _leave_path() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != here]
    if inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(inherited)
    else:
        os.environ.pop("PYTHONPATH", None)


def _hide_hash_seed() -> None:
    given = os.environ.pop("_TTPRUN_HASH_SEED", None)
    if given:
        os.environ["PYTHONHASHSEED"] = given
    elif given is not None:
        os.environ.pop("PYTHONHASHSEED", None)


def _run_hidden() -> None:
    import importlib

    mine = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine


try:
    _leave_path()
    _hide_hash_seed()
    _run_hidden()
finally:
    if "_TTPRUN_CHANNEL_FD" in os.environ:
        try:
            from ttprun.rank.bootstrap import install

            install.begin()
        except Exception as _error:
            print(f"ttprun: the hooks could not be installed, this rank is not protected: {_error!r}", file=sys.stderr)
