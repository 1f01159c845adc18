"""Values cross the sandbox's border unchanged, and hostile bytes never get past it."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.sandbox.local.wire import split_frames
from rayapp.sandbox.verdict.codec import call_results, decode_frames, encode_inputs, max_frames, off_the_loop
from rayapp.sandbox.verdict.compare import equal
from rayapp.sandbox.verdict.harness import MAX_DEPTH, frame, pack, run_calls, unpack
from support.timing import takes_at_most_s

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
plain = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.sets(keys),
    max_leaves=20,
)


def frames_of(code: str, inputs: list[list[object]], function: str = "f") -> list[bytes]:
    sent: list[bytes] = []
    run_calls(code, function, encode_inputs(inputs), sent.append)
    return sent


@given(plain)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    seen = decode_frames([frame("value", 0, pack(value))], 1)
    assert seen.calls[0].ok
    assert equal(value, seen.calls[0].value)
    assert equal(value, unpack(json.loads(json.dumps(pack(value)))))
    assert equal(value, value)


@pytest.mark.parametrize(
    "value",
    [1 << 20_000, -(2**53), 2**53, 1e308, -math.inf, "\ud800", b"\x00\xff", ((),), {(1,): {2}}],
    ids=["20000-bit int", "-2**53", "2**53", "1e308", "-inf", "surrogate", "bytes", "nested tuple", "tuple key"],
)
def test_edges_of_the_types_come_back(value: object) -> None:
    assert equal(value, decode_frames([frame("value", 0, pack(value))], 1).calls[0].value)


@given(st.binary(max_size=200))
def test_random_bytes_are_never_a_result(raw: bytes) -> None:
    seen = decode_frames([raw], 3)
    assert call_results(seen, 3, "missing") == (call_results(decode_frames([], 3), 3, "missing"))


@pytest.mark.parametrize(
    "raw",
    [
        b'["value",0,{"x":[]}]',
        b'["value",0,{"s":[[]]}]',
        b'["value",0,{"s":[1,1]}]',
        b'["value",0,{"d":[[1,2],[1,3]]}]',
        b'["value",0,{"d":[[1]]}]',
        b'["value",0,{"t":5}]',
        b'["value",0,{"i":"zz"}]',
        b'["value",0,{"f":"1"}]',
        b'["value",0,{"b":"1"}]',
        b'["value",0,{"t":[],"s":[]}]',
        b'["value",0,NaN]',
        b'["value",true,1]',
        b'["value",-1,1]',
        b'["value",9,1]',
        b'["value",0,1,2]',
        b'{"value":0}',
        b'"value"',
        b"[" * 100_000 + b"]" * 100_000,
        b'["value",0,' + b"[" * 150 + b"]" * 150 + b"]",
        b'["value",0,"' + b"a" * (1 << 20) + b'"]',
        b'["value",0,[' + b"1," * 300_000 + b"1]]",
        b'["value",0,' + b"9" * 10_000 + b"]",
    ],
)
def test_bytes_our_harness_would_not_write_give_no_value(raw: bytes) -> None:
    assert not any(result.ok for result in call_results(decode_frames([raw], 3), 3, "missing"))


def test_keys_made_to_collide_do_not_hold_up_the_reader() -> None:
    multiples = [{"i": hex(k * (2**61 - 1))} for k in range(20_000)]
    with takes_at_most_s(5):
        seen = decode_frames([frame("value", 0, {"s": multiples})], 1)
    assert not seen.calls[0].ok


def test_two_results_for_one_call_are_a_failure() -> None:
    seen = decode_frames([frame("value", 0, 1), frame("value", 0, 2), frame("value", 0, 1)], 1)
    assert not seen.calls[0].ok


def test_two_million_empty_frames_are_read_up_to_the_first() -> None:
    empty = bytes(4)
    honest = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (frame("defined"), frame("value", 0, 7)))

    with takes_at_most_s(2):
        seen = decode_frames(split_frames(honest + empty * 2_000_000), 1)

    assert seen.calls[0].value == 7


def test_no_more_frames_are_read_than_an_honest_run_has() -> None:
    frames = iter([frame("defined")] * 2_000_000)

    decode_frames(frames, 3)

    assert sum(1 for _ in frames) == 2_000_000 - max_frames(3)


def test_a_value_of_too_many_parts_costs_its_own_call_only() -> None:
    code = "def f(n): return [1] * n"

    seen = decode_frames(frames_of(code, [[300_000], [3]]), 2)

    assert [seen.calls[index].ok for index in (0, 1)] == [False, True]
    assert seen.calls[0].error == "ValueError: the value has more than 200000 parts"


async def test_the_event_loop_goes_on_while_large_results_are_read() -> None:
    raw = frame("value", 0, [1.5] * 190_000)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    seen = await off_the_loop(len(raw), lambda: decode_frames([raw], 1))
    ticking.cancel()

    assert seen.calls[0].ok
    assert ticks > 1


def test_missing_results_are_counted_as_failed_calls() -> None:
    results = call_results(decode_frames([frame("value", 1, 5)], 3), 3, "ended")
    assert [result.ok for result in results] == [False, True, False]
    assert results[0].error == "ended"


def test_each_call_gets_its_own_arguments() -> None:
    code = "seen = []\ndef f(items):\n    seen.append(items)\n    for old in seen: old.clear()\n    return len(seen)"
    seen = decode_frames(frames_of(code, [[[1, 2]], [[1, 2]]]), 2)
    assert [seen.calls[0].value, seen.calls[1].value] == [1, 2]


def test_arguments_keep_their_types() -> None:
    code = "def f(*args):\n    return [type(arg).__name__ for arg in args]"
    seen = decode_frames(frames_of(code, [[1, True, 1.0, (1,), {1}, {1: 2}, b"a", None]]), 1)
    assert seen.calls[0].value == ["int", "bool", "float", "tuple", "set", "dict", "bytes", "NoneType"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = = 1", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("g = 1", "NameError: the code defines no function f"),
        ("f = 3", "NameError: the code defines no function f"),
        (
            "class E(Exception):\n def __str__(self): raise MemoryError\nraise E",
            "E: <its message can't be shown>",
        ),
    ],
)
def test_a_definition_that_fails_says_why(code: str, error: str) -> None:
    seen = decode_frames(frames_of(code, [[1]]), 1)
    assert not seen.is_defined
    assert seen.definition_error.startswith(error)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise KeyError('k')", "KeyError: 'k'"),
        ("raise SystemExit", "SystemExit"),
        ("return object()", "TypeError: object is not plain data"),
        ("return type('L', (list,), {})()", "TypeError: L is not plain data"),
        ("a = []\n    a.append(a)\n    return a", "ValueError: the value is nested more than"),
        ("return 'a' * (1 << 21)", "ValueError: the value takes more than"),
        ("return f(x)", "RecursionError"),
    ],
)
def test_a_call_that_fails_says_why_and_the_next_one_runs(body: str, error: str) -> None:
    code = f"def f(x):\n    if x: return 7\n    {body}"
    seen = decode_frames(frames_of(code, [[0], [1]]), 2)
    assert seen.calls[0].error.startswith(error)
    assert seen.calls[1].value == 7
    assert seen.is_done


def test_a_value_as_deep_as_allowed_comes_back() -> None:
    code = f"def f(n):\n    a = 0\n    for _ in range({MAX_DEPTH}): a = [a]\n    return a"
    assert decode_frames(frames_of(code, [[0]]), 1).calls[0].ok
