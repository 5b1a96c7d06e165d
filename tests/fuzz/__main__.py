"""Fuzz with many cases: python -m tests.fuzz --cases 100000 [target ...]"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.targets import TARGETS
from tests.fuzz.test_fuzz import fuzz

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cases", type=int, default=100_000, help="of each target (default 100,000)")
parser.add_argument("targets", nargs="*", help=f"default: all of them ({', '.join(TARGETS)})")
options = parser.parse_args()
for name in options.targets or TARGETS:
    began_s = time.monotonic()
    fuzz(name, options.cases)
    print(f"{name}: {options.cases} cases in {time.monotonic() - began_s:.0f} s", flush=True)
sys.exit(0)
