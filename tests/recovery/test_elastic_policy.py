"""The policy of `--elastic`: who trains and who waits, on a clock of the tests' own. Scenarios A8-A17, A23, A24."""

from __future__ import annotations

import pytest

from ttprun.recovery.elastic_policy import (
    COOLDOWN_S,
    MOST_COOLDOWN_S,
    REFUSED_S,
    SETTLE_S,
    Membership,
    MembershipPlan,
    NodesObserved,
    parse_hosts,
)

LONG_AGO = -100.0


def plan(
    members: str, waiting: str = "", at_s: float = 0.0, policy: Membership | None = None, **more: object
) -> MembershipPlan:
    """The plan for hosts with names of one letter."""
    observation = NodesObserved(
        at_s=at_s, members=tuple(members), waiting=tuple((host, LONG_AGO) for host in waiting), **more
    )  # type: ignore[arg-type]
    return (policy or Membership(1, 3)).planned(observation)


def test_a12_nodes_that_wait_join_behind_those_that_train_up_to_the_most() -> None:
    found = plan("a", "bcd")

    assert (found.stay, found.join, found.is_due, found.why_not) == ((0,), (0, 1), True, "")


def test_a16_at_full_size_those_that_come_and_go_disturb_nobody() -> None:
    assert not plan("abc", "d").is_due
    assert not plan("abc", "").is_due


def test_a24_newcomers_that_come_within_a_moment_join_together() -> None:
    policy = Membership(1, 4)

    early = policy.planned(NodesObserved(at_s=3.2, members=("a",), waiting=(("b", 0.0), ("c", 0.9))))
    later = policy.planned(NodesObserved(at_s=0.9 + SETTLE_S, members=("a",), waiting=(("b", 0.0), ("c", 0.9))))

    assert not early.is_due
    assert (later.is_due, later.join) == (True, (0, 1))


def test_those_with_whom_the_ranks_could_not_go_on_wait_each_time_twice_as_long_and_hinder_no_departure() -> None:
    policy = Membership(1, 4).with_refused(3, 0.0)

    first = plan("ab", "c", at_s=REFUSED_S - 1, policy=policy)
    both = plan("ab", "cd", at_s=1.0, policy=policy)
    fewer = plan("ab", "cde", at_s=1.0, policy=Membership(1, 5).with_refused(5, 0.0))
    left = plan("abc", "d", at_s=1.0, policy=policy, leaving=frozenset({0}))
    again = policy.with_refused(3, REFUSED_S)

    assert (first.join, first.is_due, first.why_not) == ((), False, "")
    assert first.waits == "with 3 nodes the ranks could not go on; that is tried again later"
    assert (both.join, both.is_due) == ((0, 1), True)
    assert (fewer.join, fewer.is_due) == ((0, 1), True)
    assert (left.stay, left.join, left.is_due, left.why_not) == ((1, 2), (), True, "")
    assert plan("ab", "c", at_s=REFUSED_S, policy=policy).join == (0,)
    assert [plan("ab", "c", at_s=REFUSED_S * times, policy=again).is_due for times in (2.9, 3.0)] == [False, True]


def test_a13_a_departure_waits_for_nobody_and_takes_along_who_waits() -> None:
    policy = Membership(1, 3)

    found = policy.planned(NodesObserved(at_s=0.1, members=("a", "b"), leaving=frozenset({1}), waiting=(("c", 0.0),)))

    assert (found.stay, found.join, found.leave, found.is_due) == ((0,), (0,), (1,), True)


def test_a14_in_a_rolling_exchange_the_first_node_is_always_a_survivor() -> None:
    first = plan("ab", "c", leaving=frozenset({0}), policy=Membership(2, 2))
    second = plan("bc", "d", leaving=frozenset({0}), policy=Membership(2, 2))

    assert [(one.stay, one.join, one.why_not) for one in (first, second)] == [((1,), (0,), "")] * 2


def test_a15_all_nodes_may_be_exchanged_at_once() -> None:
    found = plan("ab", "cd", leaving=frozenset({0, 1}), policy=Membership(2, 2))

    assert (found.stay, found.join, found.leave, found.why_not) == ((), (0, 1), (0, 1), "")


def test_a8_too_few_nodes_cannot_train_and_the_plan_says_how_many_are_missing() -> None:
    found = plan("abc", lost=frozenset({1, 2}), policy=Membership(2, 3))

    assert (found.stay, found.why_not) == ((0,), "1 of at least 2 nodes are there")


def test_a9_when_a_node_comes_there_are_enough_again() -> None:
    found = plan("abc", "d", lost=frozenset({1, 2}), policy=Membership(2, 3))

    assert (found.stay, found.join, found.is_due, found.why_not) == ((0,), (0,), True, "")


def test_a11_a_host_whose_node_was_lost_waits_and_each_time_twice_as_long() -> None:
    policy = Membership(1, 2)

    waits_s = []
    for at_s in (0.0, 1000.0, 3000.0):
        policy = policy.with_lost(["b"], at_s)
        waits_s.append(policy.quarantines["b"].until_s - at_s)

    assert waits_s == [COOLDOWN_S, 2 * COOLDOWN_S, 4 * COOLDOWN_S]
    assert plan("a", "b", at_s=3000.0 + 4 * COOLDOWN_S - 0.1, policy=policy).join == ()
    assert plan("a", "b", at_s=3000.0 + 4 * COOLDOWN_S, policy=policy).join == (0,)
    assert plan("a", "c", at_s=3000.0, policy=policy).join == (0,)


def test_those_that_must_wait_are_named_until_they_may_train_again() -> None:
    policy = Membership(1, 3).with_lost(["a"], 0.0).with_lost(["b"], 5.0)

    assert [policy.quarantined(at_s) for at_s in (5.0, COOLDOWN_S, COOLDOWN_S + 5.0)] == [("a", "b"), ("b",), ()]


def test_a11_the_wait_does_not_grow_for_ever() -> None:
    policy = Membership(1, 2)
    for _ in range(40):
        policy = policy.with_lost(["b"], 0.0)

    assert policy.quarantines["b"].until_s == MOST_COOLDOWN_S


def test_a17_a_lost_node_that_comes_back_joins_again() -> None:
    policy = Membership(1, 2).with_lost(["b"], 0.0)

    smaller = plan("ab", lost=frozenset({1}), policy=policy)
    again = plan("a", "b", at_s=COOLDOWN_S, policy=policy)

    assert (smaller.stay, smaller.is_due) == ((0,), True)
    assert (again.stay, again.join, again.is_due) == ((0,), (0,), True)


def test_a_host_that_is_no_longer_named_leaves_and_one_that_is_not_named_does_not_join() -> None:
    found = plan("abc", "de", named={"a": 1, "c": 1, "e": 1}, policy=Membership(1, 4))

    assert (found.stay, found.leave, found.join) == ((0, 2), (1,), (1,))


def test_a_host_has_as_many_launchers_as_its_slots_allow() -> None:
    found = plan("aa", "ab", named={"a": 2, "b": 1}, policy=Membership(1, 4))

    assert (found.stay, found.join) == ((0, 1), (1,))


def test_a23_what_a_discovery_command_prints_is_read_in_order_without_blanks_and_duplicates() -> None:
    found = parse_hosts("b:4\n\n  a:2  # the old one\nb:8\nc\n# d\n", 2)

    assert list(found.items()) == [("b", 2), ("a", 1), ("c", 1)]


@pytest.mark.parametrize("text", ["a:", "a:two", "a:-1"])
def test_a23_a_line_that_names_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:slots"):
        parse_hosts(text, 2)
