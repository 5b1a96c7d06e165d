"""The benchmark of a fixed rate of faults: what is drawn, and what is read from the logs."""

from __future__ import annotations

import sys
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "bench"))
import faults


def test_a_seed_gives_the_same_faults_each_time_at_the_mean_rate() -> None:
    first, again, other = ([*islice(faults.draw_faults(seed, 4, 30.0), 500)] for seed in (7, 7, 8))

    assert first == again != other
    assert [one.after_s for one in first] == sorted(one.after_s for one in first)
    assert mean([first[0].after_s, *(b.after_s - a.after_s for a, b in pairwise(first))]) == (
        pytest.approx(30.0, rel=0.2)
    )
    assert {one.rank for one in first} == {0, 1, 2, 3}


def test_progress_is_that_of_the_slowest_rank_and_falls_when_all_go_back() -> None:
    steps = [[(0, 10.0), (1, 12.0), (0, 20.0), (1, 22.0)], [(0, 11.0), (1, 13.0), (0, 21.0), (1, 23.0)]]

    found = faults.progress_of(steps, began_s=5.0)

    assert found == [(5.0, 0), (6.0, 1), (8.0, 2), (15.0, 1), (18.0, 2)]


def test_a_job_that_has_failed_has_no_goodput_and_a_drawing_has_each_job() -> None:
    good = faults.Outcome("torchrun", whole_s=100.0, step_s=1.2, progress=[(10.0, 1), (100.0, 50)])
    failed = faults.Outcome("ttprun", whole_s=10.0, problem="exit code 1")

    assert (faults.goodput(good, 50), faults.goodput(failed, 50)) == (0.6, 0.0)
    assert sum(line.count("o") for line in faults.drawn([good, failed], 50)[1:-2]) == 2
