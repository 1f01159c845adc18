"""Reads the tests of a code problem from a row's ground truth, in any format of this table. No I/O.

| fields | data set |
|---|---|
| `inputs`, `outputs`, `fn_name` | PRIME's rows for verl, and rows from `rayapp data prepare` |
| `input_output` | APPS, TACO: JSON text with the fields above |
| `public_tests`, `private_tests`, `generated_tests` | CodeContests |
| `public_test_cases`, `private_test_cases`, `metadata` | LiveCodeBench |
| `test_list`, `test_setup_code` or `test_imports` | MBPP |
| `prompt`, `entry_point`, `test` | HumanEval |

The first four formats are converted to PRIME's form, and then to tests. A field `language` names the language of a
program (`languages.py`). With `fn_name` the tests call the function of this name; each input is a list of arguments, or
a text with one JSON value per line. Without `fn_name` each input is the standard input of a program.
"""

from __future__ import annotations

import base64
import functools
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from keyword import iskeyword
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.code.conditions import humaneval_tests, mbpp_tests
from rayapp.tasks.code.hidden_cases import CallTest, CodeTests, Comparison, StdinTest, is_returned, same_output
from rayapp.tasks.code.languages import language_of

Fields = Mapping[str, Any]
_LEAST_OUTPUT_BYTES = 1 << 20
_OUTPUT_RATIO = 8  # a right output may have more digits and white space than the expected one
_MOST_DECODED_BYTES = 1 << 28
_TEXT_OPS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"})
_OTHER_OPS = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"})


@functools.lru_cache(maxsize=32)
def read_tests(ground_truth: str, comparison: Comparison = "lines") -> CodeTests:
    """Return the tests of a row (JSON text in a format above), cached for all completions of a group. An InputError
    says why the problem can't be scored."""
    try:
        return _read_fields(_loaded(ground_truth, "ground_truth"), comparison)
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        # boundary: a data set's row may hold anything
        raise InputError(f"its ground_truth can't be read as a problem: {type(error).__name__}: {error}") from error


def _read_fields(fields: object, comparison: Comparison) -> CodeTests:
    if not isinstance(fields, dict):
        raise InputError(f"its ground_truth must be an object with tests, not {fields!r:.80}")
    if "test_list" in fields:
        setup = [fields.get("test_setup_code") or "", *(fields.get("test_imports") or ())]
        return mbpp_tests(_list(fields, "test_list"), "\n".join(setup))
    if "entry_point" in fields:
        return humaneval_tests(*(_text(fields, name) for name in ("prompt", "entry_point", "test")))
    return _of_prime(prime_form(fields), comparison)


def as_json(ground_truth: object) -> str:
    """Return the ground truth of a row, which may be a struct, as JSON text."""
    try:
        return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"its ground_truth can't be written as JSON: {error}") from error


def prime_form(fields: Fields) -> dict[str, Any]:
    """Convert one of the first four formats to PRIME's: `{inputs, outputs, fn_name, num_public, language}`."""
    found = _prime_form(fields)
    return found | {"language": fields["language"]} if fields.get("language") else found


def _prime_form(fields: Fields) -> dict[str, Any]:
    if "input_output" in fields:
        return prime_form(_loaded(_text(fields, "input_output"), "input_output"))
    if "public_tests" in fields:
        return _of_codecontests(fields)
    if "public_test_cases" in fields:
        return _of_livecodebench(fields)
    if "inputs" in fields and "outputs" in fields:
        return dict(fields)
    have = ", ".join(sorted(fields)) or "no fields"
    raise InputError(f"its ground_truth has no tests: it must have the fields inputs and outputs, not {have}")


def _of_prime(fields: Fields, comparison: Comparison) -> CodeTests:
    inputs, outputs = _list(fields, "inputs"), _list(fields, "outputs")
    if not inputs:
        raise InputError("it has no tests: the list inputs is empty")
    if len(inputs) != len(outputs):
        raise InputError(f"it has {len(inputs)} inputs and {len(outputs)} outputs: each input needs one output")
    function = fields.get("fn_name") or ""
    if not isinstance(function, str) or (function and (not function.isidentifier() or iskeyword(function))):
        raise InputError(f"fn_name must be the name of a function, not {function!r:.60}")
    language = language_of(fields.get("language"))
    if language is not None and function:
        raise InputError(
            f"fn_name {function!r} is only for Python: programs in {language.name} read standard input. Leave fn_name "
            "out"
        )
    make = partial(_call_test if function else _stdin_test, comparison)
    return CodeTests(
        tests=tuple(make(*pair) for pair in zip(inputs, outputs, strict=True)),
        function=function,
        may_be_method=True,
        has_usual_imports=True,
        num_public=int(fields.get("num_public") or 0),
        language=language,
    )


def _stdin_test(comparison: Comparison, given: object, expected: object) -> StdinTest:
    wanted = _joined(expected, "outputs")
    return StdinTest(
        stdin=_joined(given, "inputs"),
        is_expected=partial(same_output, wanted, comparison),
        max_output_bytes=max(_LEAST_OUTPUT_BYTES, _OUTPUT_RATIO * len(wanted.encode())),
        expected=wanted,
    )


def _joined(value: object, name: str) -> str:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise InputError(f"each of its {name} must be a text or a list of lines, but one is {value!r:.60}")
    return "\n".join(lines)


def _call_test(comparison: Comparison, given: object, expected: object) -> CallTest:
    if isinstance(given, str):
        given = [_loaded(line, "inputs") for line in given.split("\n")]
    if not isinstance(given, list):
        raise InputError(f"each of its inputs must be a list of arguments or JSON lines, but one is {given!r:.60}")
    if isinstance(expected, str):
        expected = _loaded(expected, "outputs")
    # In APPS and similar data sets, dicts have numbers as keys, but JSON writes all keys as strings.
    arguments = tuple(_with_number_keys(argument) if comparison == "lines" else argument for argument in given)
    return CallTest(calls=(arguments,), condition=partial(is_returned, expected, comparison))


def _with_number_keys(value: object) -> object:
    if isinstance(value, dict) and all(key.removeprefix("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _of_codecontests(fields: Fields) -> dict[str, Any]:
    parts = [_pairs(fields.get(name)) for name in ("public_tests", "private_tests", "generated_tests")]
    pairs = [pair for part in parts for pair in part]
    return {
        "inputs": [given for given, _ in pairs],
        "outputs": [wanted for _, wanted in pairs],
        "num_public": len(parts[0]),
    }


def _pairs(tests: Any) -> list[tuple[object, object]]:
    """Return pairs from the hub's form {input: [...], output: [...]}, or from [{input, output}]."""
    match tests:
        case None:
            return []
        case {"input": list(given), "output": list(wanted)} if len(given) == len(wanted):
            return list(zip(given, wanted, strict=True))
        case [*items] if all(isinstance(item, dict) and {"input", "output"} <= item.keys() for item in items):
            return [(item["input"], item["output"]) for item in items]
    raise InputError(f"its tests must have lists `input` and `output` of the same length, not {tests!r:.80}")


def _of_livecodebench(fields: Fields) -> dict[str, Any]:
    public = _loaded(_text(fields, "public_test_cases"), "public_test_cases")
    private = _private_cases(fields.get("private_test_cases") or "[]")
    cases = [*public, *private]
    if not all(isinstance(case, dict) for case in cases):
        raise InputError("each of its test cases must be an object")
    kinds = {case.get("testtype") for case in cases}
    if kinds not in ({"stdin"}, {"functional"}):
        found = ", ".join(sorted(map(str, kinds))) or "none"
        raise InputError(
            f"its test cases must all have the testtype stdin, or all functional; the testtypes are {found}"
        )
    metadata = _loaded(fields.get("metadata") or "{}", "metadata")
    function = metadata.get("func_name") if kinds == {"functional"} else None
    if kinds == {"functional"} and not function:
        raise InputError("its tests are functional, but its metadata has no func_name")
    inputs, outputs = ([case.get(name) for case in cases] for name in ("input", "output"))
    return {"inputs": inputs, "outputs": outputs, "fn_name": function, "num_public": len(public)}


def _private_cases(encoded: str) -> list[Any]:
    # JSON text, or JSON text that is pickled, deflated and base64-encoded
    try:
        found = json.loads(encoded)
    except ValueError:
        found = _loaded(_decoded(encoded), "private_test_cases")
    if not isinstance(found, list):
        raise InputError(f"private_test_cases must hold a list of cases, not {found!r:.60}")
    return found


def _decoded(encoded: str) -> str:
    try:
        inflate = zlib.decompressobj()
        pickled = inflate.decompress(base64.b64decode(encoded, validate=True), _MOST_DECODED_BYTES)
        if not inflate.eof:
            raise ValueError(f"the data is truncated, or larger than {_MOST_DECODED_BYTES >> 20} MiB")
        return _pickled_text(pickled)
    except (ValueError, zlib.error) as error:
        raise InputError(f"private_test_cases can't be decoded: {error}") from error


def _pickled_text(pickled: bytes) -> str:
    """Return the only string in a pickle, without unpickling: a pickle is a program and could do anything."""
    operations = [(operation.name, argument) for operation, argument, _ in pickletools.genops(pickled)]
    texts = [argument for name, argument in operations if name in _TEXT_OPS]
    others = {name for name, _ in operations} - _TEXT_OPS - _OTHER_OPS
    if len(texts) != 1 or others:
        raise ValueError(
            f"the pickle must hold exactly one string, but it holds {len(texts)} strings and uses "
            f"{len(others)} pickle operations for other objects"
        )
    (text,) = texts
    return text.decode() if isinstance(text, bytes) else str(text)


def _loaded(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"its {name} can't be read as JSON ({error}): {text!r:.80}") from error


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} must be a non-empty string, not {value!r:.60}")
    return value


def _list(fields: Fields, name: str) -> Sequence[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, not {value!r:.60}")
    return value
