"""Where ranks get their state from, for random jobs, losses and holdings. The scenarios show what is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import assume, given
from hypothesis import strategies as st

from ttprun.recovery import RUNGS, RankState, Saved, Settings, new_job
from ttprun.recovery.job import Job
from ttprun.recovery.replicas import Replicas
from ttprun.recovery.state_origins import FROM_TOP, Origin, Place, Refusal, in_memory, on_disk, plan

RANKS = 4
PLACES = get_args(Place)
OWNERS = st.sampled_from([(0, 0, 0, 0), (0, 0, 2, 2), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 0, 3)])
REPLICAS = st.builds(
    Replicas,
    compared_at=st.sampled_from([None, 1, 1, 1]),
    differing=st.fixed_dictionaries({"a": OWNERS}),
    shards=st.fixed_dictionaries({"b": OWNERS}),
    mirrored=st.frozensets(st.integers(0, RANKS - 1)),
    has_collective_steps=st.booleans(),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job of four ranks at boundary 9, some of which are lost, and what is left of older boundaries."""
    rungs = frozenset(draw(st.lists(st.sampled_from(sorted(RUNGS)), min_size=3, unique=True)))
    job = new_job(Settings(world_size=RANKS, rungs=rungs, max_restarts=draw(st.sampled_from([0, 1, None]))))
    lives = draw(st.lists(st.sampled_from([RankState.LIVE, RankState.LOST]), min_size=RANKS, max_size=RANKS))
    lives[-1] = draw(st.sampled_from([lives[-1], RankState.FINISHED]))
    for rank, life in enumerate(lives):
        job = job.with_member(rank, life=life)
    saved = draw(st.lists(st.integers(1, 8), max_size=2, unique=True))
    return replace(
        job,
        replicas=draw(REPLICAS),
        in_memory=tuple(draw(st.lists(st.builds(Saved, st.sampled_from([3, 7])), max_size=1))),
        saved=tuple(Saved(boundary, f"/save/{boundary}") for boundary in sorted(saved, reverse=True)),
    )


def holdings_of(job: Job) -> list[Origin]:
    """What ranks could go back to."""
    return [*in_memory(job), *on_disk(job), FROM_TOP]


@given(job=jobs())
def test_a_rank_gets_its_state_whole_from_one_that_holds_the_same_now_or_all_go_back_together(job: Job) -> None:
    found = plan(job, holdings_of(job), job.settings.rungs, job.survivors)
    assume(job.lost and not isinstance(found, Refusal))

    assert isinstance(found, dict)
    if {origin.place for origin in found.values()} <= {"peer", "buddy"}:
        assert {*found} == {*job.lost}
    else:
        assert {*found} == {*range(RANKS)}
        assert len({origin.stored for origin in found.values()}) == 1
        assert next(iter(found.values())).stored in [origin.stored for origin in holdings_of(job)]
    for rank, origin in found.items():
        if origin.place == "peer":
            assert origin.source in job.survivors
            assert all(owners[origin.source] == owners[rank] for owners in job.replicas.unequal.values())
        assert origin.place != "buddy" or (rank in job.replicas.mirrored and origin.source == rank)


@given(job=jobs())
def test_no_cheaper_way_is_possible_than_the_one_that_is_taken(job: Job) -> None:
    rungs, holdings = job.settings.rungs, holdings_of(job)
    found = plan(job, holdings, rungs, job.survivors)
    assume(job.lost)

    dearest = max(PLACES.index(one.place) for one in found.values()) if isinstance(found, dict) else len(PLACES)
    assert not isinstance(found, Refusal) or (found.why.kind and found.why.text)
    cheaper = [one for one in holdings if PLACES.index(one.place) < dearest]

    assert isinstance(plan(job, cheaper, rungs), Refusal)
    if dearest > PLACES.index("buddy"):
        assert isinstance(plan(job, (), rungs, job.survivors), Refusal)


@given(job=jobs())
def test_what_is_void_gives_no_state_any_more(job: Job) -> None:
    void = replace(job, in_memory=(), saved=(), replicas=replace(job.replicas, mirrored=frozenset()))

    found = plan(void, holdings_of(void), job.settings.rungs, job.survivors)

    places = {one.place for one in found.values()} if isinstance(found, dict) else set()
    assert places <= {"peer", "restart"}
