"""Hypothesis keeps a folder of its own: not in the working tree, where pytest trips over it."""

import tempfile
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "ttprun-hypothesis")
