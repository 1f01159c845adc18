"""An execution's wait for a processor, and its number of sockets, from the kernel's counts."""

from __future__ import annotations

from rayapp.sandbox.local.levels.limits import Use, num_sockets


def test_threads_that_wait_one_after_the_other_have_waited_for_the_sum() -> None:
    use = Use()
    for first_s, second_s in ((1.0, 0.0), (1.0, 2.0), (1.0, 2.5)):
        use.take({}, {"1/task/1": int(first_s * 1e9), "1/task/2": int(second_s * 1e9)}, warm_pages=0)

    assert use.waited_s == 3.5


def test_a_wait_before_the_job_of_a_session_does_not_count() -> None:
    use = Use()
    use.forget({}, {"1/task/1": 5_000_000_000})
    use.take({}, {"1/task/1": 6_000_000_000}, warm_pages=0)

    assert use.waited_s == 1.0


def test_the_sockets_of_a_namespace_are_counted_but_those_of_tcp() -> None:
    assert num_sockets("sockets: used 41\nTCP: inuse 16 orphan 0 tw 43 alloc 17 mem 388\nUDP: inuse 0 mem 0\n") == 25
    assert num_sockets("") == 0
