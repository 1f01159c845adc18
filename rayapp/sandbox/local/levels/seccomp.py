"""Builds seccomp filters, as classic BPF, and installs them. Called by the isolation levels, inside the zygote only.

Which calls they refuse is in `rules.py`. A filter is a binary search over system call numbers: a list would make each
installation three times as long, since the kernel runs it for every number to find those it can always allow.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable, Mapping, Sequence

from rayapp.sandbox.local.levels import kernel, syscalls

_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_NOT_BELOW, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_X32_BIT = 0x40000000
_FARTHEST = 255
"""Instructions that a conditional jump can skip."""

INSTRUCTION = struct.Struct("<HBBI")
"""Layout of an instruction for the kernel; the fields are those of `Instruction`."""
Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""
Block = tuple[Instruction, ...]
"""Instructions that end in a return on every path."""

PERMIT: Block = ((_RETURN, 0, 0, _ALLOW),)


def refuse(number: int = errno.EPERM) -> Block:
    return ((_RETURN, 0, 0, _ERRNO | number),)


def no_effect() -> Block:
    """The call returns 0 at once."""
    return refuse(0)


def _argument(index: int, *, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGS_AT + 8 * index + 4 * high)


def only_with(index: int, value: int) -> Block:
    """Allowed if this argument (32 bits: a pid) is the value."""
    return (_argument(index), (_JUMP_EQUAL, 0, 1, value), *PERMIT, *refuse())


def not_with(index: int, *values: int) -> Block:
    """Refused if this argument (32 bits) is one of the values."""
    last = len(values) - 1
    tests = [(_JUMP_EQUAL, last - at, 1 if at == last else 0, value) for at, value in enumerate(values)]
    return (_argument(index), *tests, *refuse(), *PERMIT)


def without_bits(index: int, bits: int) -> Block:
    return (_argument(index), (_JUMP_ANY_BIT, 0, 1, bits), *refuse(), *PERMIT)


def not_masked(index: int, mask: int, value: int) -> Block:
    """Refused if this argument (32 bits), masked, is the value."""
    return (_argument(index), (_AND, 0, 0, mask), (_JUMP_EQUAL, 0, 1, value), *refuse(), *PERMIT)


def with_bits(index: int, bits: int, *, forbidden: int, number: int) -> Block:
    """Allowed if one of `bits` is set and none of `forbidden`; without `bits` the error is `number`."""
    return (
        _argument(index),
        (_JUMP_ANY_BIT, 0, 1, forbidden),
        *refuse(),
        (_JUMP_ANY_BIT, 0, 1, bits),
        *PERMIT,
        *refuse(number),
    )


def both(first: tuple[int, int], second: tuple[int, int], mask: int = 0xFFFFFFFF) -> Block:
    """Allowed if two arguments have these values; the second one is masked first."""
    return (
        _argument(first[0]),
        (_JUMP_EQUAL, 0, 4, first[1]),
        _argument(second[0]),
        (_AND, 0, 0, mask),
        (_JUMP_EQUAL, 0, 1, second[1]),
        *PERMIT,
        *refuse(),
    )


def every(*tests: tuple[int, int, tuple[int, ...]]) -> Block:
    """Allowed if each of these arguments (32 bits), masked, is one of its values: (index, mask, values)."""
    return (*(step for test in tests for step in _one_of(*test)), *PERMIT)


def pairs(first: int, second: int, allowed: Mapping[int, tuple[int, ...]]) -> Block:
    """Allowed if the first argument is a key, and the second one of that key's values."""
    found: list[Instruction] = []
    for value, seconds in allowed.items():
        rest = (*_one_of(second, 0xFFFFFFFF, seconds), *PERMIT)
        found += [_argument(first), (_JUMP_EQUAL, 0, len(rest), value), *rest]
    return (*found, *refuse())


def refused_or(first: Block, otherwise: Block) -> Block:
    """What the first one permits, the other decides."""
    assert first[-1:] == PERMIT
    return (*first[:-1], *otherwise)


def _one_of(index: int, mask: int, values: Sequence[int]) -> Block:
    """Goes on behind itself if the argument, masked, is one of the values; else refuses."""
    tests = [(_JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return (_argument(index), (_AND, 0, 0, mask), *tests, *refuse())


def null_pointer(index: int) -> Block:
    """Allowed if this argument (64 bits) is 0."""
    return (
        _argument(index),
        (_JUMP_EQUAL, 0, 3, 0),
        _argument(index, high=True),
        (_JUMP_EQUAL, 0, 1, 0),
        *PERMIT,
        *refuse(),
    )


def dies_with(first: tuple[int, int], second: tuple[int, int]) -> Block:
    """Kills the caller if two arguments have these values, else allowed."""
    return (
        _argument(first[0]),
        (_JUMP_EQUAL, 0, 3, first[1]),
        _argument(second[0]),
        (_JUMP_EQUAL, 0, 1, second[1]),
        (_RETURN, 0, 0, _KILL),
        *PERMIT,
    )


def program(rules: Mapping[str, Block], *, unknown: Block = PERMIT, machine: str | None = None) -> bytes:
    """A filter: these rules by name of the call, `unknown` above the highest number known, the rest allowed.

    Names that this architecture lacks are left out; a call of another architecture kills the process.
    """
    machine = machine or syscalls.machine()
    numbers = syscalls.NUMBERS[machine]
    by_number = {numbers[name]: block for name, block in rules.items() if name in numbers}
    head: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, syscalls.AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        # The x32 calls of x86-64 have the same effect under other numbers.
        (_JUMP_NOT_BELOW, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
    ]
    return _assemble([*head, *_search(_segments(by_number, unknown))])


def _segments(by_number: Mapping[int, Block], unknown: Block) -> list[tuple[int, Block]]:
    """(first number, block) in order; each holds up to the next one's first number."""
    found = [(0, by_number.get(0, PERMIT))]
    for number in range(1, syscalls.HIGHEST + 1):
        block = by_number.get(number, PERMIT)
        if block != found[-1][1]:
            found.append((number, block))
    return [*found, (syscalls.HIGHEST + 1, unknown)]


def _search(segments: Sequence[tuple[int, Block]]) -> list[Instruction]:
    if len(segments) == 1:
        return list(segments[0][1])
    middle = len(segments) // 2
    below, above = _search(segments[:middle]), _search(segments[middle:])
    first = segments[middle][0]
    if len(below) <= _FARTHEST:
        return [(_JUMP_NOT_BELOW, len(below), 0, first), *below, *above]
    return [(_JUMP_NOT_BELOW, 0, 1, first), (_JUMP, 0, 0, len(below)), *below, *above]


def _assemble(instructions: Iterable[Instruction]) -> bytes:
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in instructions)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def installation(code: bytearray) -> kernel.Step:
    """Puts a filter on the process that takes this step, and all it will fork. Needs no_new_privs.

    Args:
        code: the filter; it may be written to until the step is taken, but keeps its length.
    """
    shared = (ctypes.c_char * len(code)).from_buffer(code)
    filtering = _Program(len(code) // INSTRUCTION.size, ctypes.addressof(shared))
    filtering.kept = shared
    mode = ctypes.c_ulong(kernel.SECCOMP_MODE_FILTER)
    return kernel.prctl_step(kernel.PR_SET_SECCOMP, mode, ctypes.pointer(filtering))


def install(code: bytes) -> None:
    """Put a filter on this process now.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    kernel.take([installation(bytearray(code))])
