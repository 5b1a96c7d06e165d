"""Fuzz with many cases: python -m tests.fuzz --cases 100000 [--seed 1] [target ...]

After a failure it goes on with the next target; the exit code is 1 if one has failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.fuzz.targets import TARGETS
from tests.fuzz.test_fuzz import fuzz

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cases", type=int, default=100_000, help="of each target (default 100,000)")
parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="the same one draws the same cases")
parser.add_argument("targets", nargs="*", metavar="target", help=f"default: all of them ({', '.join(TARGETS)})")
options = parser.parse_args()
failed = []
for name in options.targets or TARGETS:
    began_s = time.monotonic()
    try:
        fuzz(name, options.cases, options.seed)
    except Exception:
        traceback.print_exc()
        failed.append(name)
    result = "FAILED within" if name in failed else "passed"
    spent_s = time.monotonic() - began_s
    print(f"{name}: {result} {options.cases} cases, seed {options.seed}, in {spent_s:.0f} s", flush=True)
sys.exit(1 if failed else 0)
