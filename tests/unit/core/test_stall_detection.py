"""Stalled work is noticed even if the process answers; idle time, slow work and long work are no stall."""

from __future__ import annotations

import pytest

from rayapp.core.errors import StalledError
from rayapp.core.timing import InHand
from support import make


@pytest.fixture
def clock() -> make.Clock:
    return make.Clock()


@pytest.fixture
def in_hand(clock: make.Clock) -> InHand:
    return InHand(clock)


def check(in_hand: InHand) -> None:
    in_hand.check_moves(60.0, who="vllm-server-0", work="requests")


def test_work_of_which_nothing_moves_is_a_stall_and_the_error_says_how_much_for_how_long(
    clock: make.Clock, in_hand: InHand
) -> None:
    with in_hand.one(), in_hand.one():
        clock.now += 59.0
        check(in_hand)
        clock.now += 2.0
        with pytest.raises(StalledError, match="none of the 2 requests in progress advanced for 61 s"):
            check(in_hand)


def test_time_without_work_does_not_count(clock: make.Clock, in_hand: InHand) -> None:
    clock.now += 3600.0
    check(in_hand)
    with in_hand.one():
        clock.now += 59.0
        check(in_hand)


def test_slow_work_that_moves_is_left_alone(clock: make.Clock, in_hand: InHand) -> None:
    with in_hand.one():
        for _ in range(10):
            clock.now += 59.0
            in_hand.moved()
            check(in_hand)


def test_work_that_ends_is_a_move_for_the_rest_and_work_that_fails_is_none(clock: make.Clock, in_hand: InHand) -> None:
    with in_hand.one():
        clock.now += 50.0
        with in_hand.one():
            pass
        clock.now += 50.0
        check(in_hand)
        with pytest.raises(ZeroDivisionError), in_hand.one():
            _ = 1 / 0
        clock.now += 11.0
        with pytest.raises(StalledError, match="for 61 s"):
            check(in_hand)


def test_one_piece_past_its_deadline_is_a_stall_whatever_the_others_do(clock: make.Clock, in_hand: InHand) -> None:
    with in_hand.one():
        clock.now += 299.0
        with in_hand.one():
            in_hand.check_ends(300.0, who="rollout-worker-0", work="groups")
        clock.now += 1.0
        with pytest.raises(StalledError, match="one of the 1 groups in progress has not ended after 300 s"):
            in_hand.check_ends(300.0, who="rollout-worker-0", work="groups")
    in_hand.check_ends(300.0, who="rollout-worker-0", work="groups")
