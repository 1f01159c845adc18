"""New groups go to the server with the fewest, stay there, and avoid a server that is being replaced."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.routing import Router
from rayapp.rollout.order import Cohort, GroupRequest, neighbours


def alone(group_id: int) -> GroupRequest:
    return GroupRequest(group_id=group_id, policy_version=0)


def test_a_new_group_goes_to_the_server_with_the_fewest() -> None:
    router = Router(3)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(router.placed(alone(i))) for i in range(3))
        assert [first.server, second.server, third.server] == [0, 1, 2]
        with router.placed(alone(3)) as fourth:
            assert fourth.server == 0
            with router.placed(alone(4)) as fifth:
                assert fifth.server == 1
        # The fourth has ended, so server 0 has one group again, as all have.
        with router.placed(alone(5)) as sixth:
            assert sixth.server == 0


def test_a_server_that_is_being_replaced_gets_nothing_while_another_is_up() -> None:
    down = {0}
    router = Router(2, is_up=lambda server: server not in down)
    with router.placed(alone(0)) as first, router.placed(alone(1)) as second:
        assert [first.server, second.server] == [1, 1]
    down.add(1)
    with router.placed(alone(2)) as third:  # no server is up: the group waits for the one that comes back
        assert third.server == 0


def test_a_cohort_is_dealt_out_by_place_although_its_ids_have_gaps() -> None:
    # Ids 4, 6, 8 all have remainder 0: by id they would share one server.
    router = Router(2)
    requests = [
        GroupRequest(group_id=group_id, policy_version=0, cohort=Cohort(place=place, size=3))
        for place, group_id in enumerate((4, 6, 8))
    ]
    with ExitStack() as stack:
        assert [stack.enter_context(router.placed(r)).server for r in requests] == [0, 1, 0]
    assert [neighbours(r.cohort, 2) for r in requests] == [2, 1, 2]


@settings(deadline=None)
@given(
    num_servers=st.integers(1, 5),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60),
)
def test_loads_never_differ_by_more_than_what_has_ended(num_servers: int, events: list[tuple[bool, int]]) -> None:
    # Without endings, least-loaded keeps all loads within one of each other; each ending can widen that by one.
    router, open_groups, num_ended = Router(num_servers), [], 0
    for starts, which in events:
        if starts or not open_groups:
            stack = ExitStack()
            stack.enter_context(router.placed(alone(which)))
            open_groups.append(stack)
        else:
            open_groups.pop(which % len(open_groups)).close()
            num_ended += 1
    metrics = router.metrics()
    assert metrics["routing/groups_max"] - metrics["routing/groups_min"] <= 1 + num_ended
    for stack in open_groups:
        stack.close()
    assert router.metrics()["routing/groups_max"] == 0.0
