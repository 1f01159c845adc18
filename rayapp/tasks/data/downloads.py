"""Loads raw data sets with the package `datasets`, and maps a user's own examples to rows in verl's schema.

A source is a hub id, a folder from `save_to_disk`, a folder with train.* and test.* (parquet, JSONL, JSON or CSV), or a
single such file, which is one split.
"""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError, one_line
from rayapp.core.syntax import parse
from rayapp.tasks.answer_rules import CODE_SOURCES
from rayapp.tasks.code.formats import read_tests
from rayapp.tasks.data.data_row import parse_messages
from rayapp.tasks.data.pictures import COLUMNS as PICTURES
from rayapp.tasks.data.pictures import as_marks, as_stored, listed, with_parts

_log = logging.getLogger(__name__)
PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWER_NAMES = ("answer", "ground_truth", "solution", "label", "target", "output", "completion")
MAX_PROMPT_CHARS = 500_000  # a longer one is a fault of the file: few models read so many tokens
_TAKEN = frozenset({"split", "index", "tools_kwargs", "need_tools_kwargs", "interaction_kwargs"})


class AsJson(str):
    """JSON text of a value in a column of mixed types."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnColumns:
    """A mapper, like the functions of `rows.py`: `OwnColumns()({"prompt": "2 + 2?", "answer": 4}, 0, "train",
    "mine")`."""

    prompt: str = ""  # of a string or a list of messages; empty: the first of PROMPT_NAMES that exists
    answer: str = ""  # empty: the first of ANSWER_NAMES that exists
    has_answers: bool = True  # False if the reward needs no ground truth
    system: str = ""  # for prompts without a system message

    def __call__(self, given: Mapping[str, Any], index: int, split: str, data_source: str) -> dict[str, Any]:
        """Return one row. All other columns go to `extra_info`, for reward functions."""
        if {"data_source", "reward_model", "prompt"} <= given.keys():
            raise InputError("the row is in verl's schema already. Don't convert the file: name it in `tasks`")
        example = {name: json.loads(each) if isinstance(each, AsJson) else each for name, each in given.items()}
        prompt = self._name(example, self.prompt, PROMPT_NAMES, "--prompt-column")
        answer = self._name(example, self.answer, ANSWER_NAMES, "--answer-column") if self.has_answers else ""
        truth = _truth(example[answer]) if answer else ""
        if answer and data_source in CODE_SOURCES:
            truth = _tests(truth)
        others = {key: value for key, value in given.items() if key not in {prompt, answer, *_TAKEN, *PICTURES}}
        pictures = [as_stored(each) for each in listed(example)]
        return {
            "data_source": data_source,
            "prompt": self._messages(example[prompt], f"column {prompt}", len(pictures)),
            **({"images": pictures} if example.keys() & set(PICTURES) else {}),
            "ability": "own",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, **others},
        }

    def _name(self, example: Mapping[str, Any], given: str, usual: tuple[str, ...], option: str) -> str:
        wanted = (given,) if given else usual
        found = next((name for name in wanted if example.get(name) is not None), None)
        if found is None:
            raise InputError(
                f"no column {' or '.join(wanted)} has a value; the columns are {', '.join(example)}. Name one with "
                f"{option}" + (", or give --no-answers" if option == "--answer-column" else "")
            )
        return found

    def _messages(self, value: Any, where: str, num_pictures: int = 0) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else parse_messages(value, where)
        whole = as_marks(with_parts(messages, num_pictures))
        found = [{"role": str(one["role"]), "content": str(one["content"])} for one in whole]
        if not any(each.isprintable() and not each.isspace() for one in found for each in one["content"]):
            raise InputError(f"{where} is empty")
        if (size := sum(len(one["content"]) for one in found)) > MAX_PROMPT_CHARS:
            raise InputError(f"{where} has {size:,} characters, more than the maximum of {MAX_PROMPT_CHARS:,}")
        if self.system and found[0]["role"] != "system":
            return [{"role": "system", "content": self.system}, *found]
        return found


def _truth(value: Any) -> str:
    # In TRL an answer may be a list of messages; the last one counts.
    if isinstance(value, list) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        value = value[-1]["content"]
    is_empty = (isinstance(value, float) and not math.isfinite(value)) or not str(value).strip()
    if is_empty or not isinstance(value, str | int | float) or isinstance(value, bool):
        raise InputError(f"the answer must be a text or a number, not {value!r:.60}")
    return str(value)


def _tests(text: str) -> str:
    """Return the tests as JSON; `text` is already JSON, or consists of Python asserts."""
    tree = parse(text)
    written = tree.body if tree is not None else []
    asserts = [ast.unparse(one) for one in written if isinstance(one, ast.Assert)]
    if asserts:
        setup = "\n".join(ast.unparse(one) for one in written if not isinstance(one, ast.Assert))
        text = json.dumps({"test_list": asserts, "test_setup_code": setup})
    read_tests(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Raw examples of one split."""

    rows: Any  # sequence of mappings: a list, or a `datasets.Dataset`
    lines: Sequence[int] = ()  # of the file, for each row; empty if the source has no lines
    bad: tuple[tuple[int, str], ...] = ()  # (line, reason) of lines that hold no row

    def where(self, index: int) -> str:
        return f"line {self.lines[index]}" if self.lines else f"row {index}"

    def taken(self, indices: Sequence[int]) -> Examples:
        """Return the examples at these places, without the bad lines."""
        rows = [self.rows[i] for i in indices] if isinstance(self.rows, list) else self.rows.select(indices)
        return Examples(rows=rows, lines=[self.lines[i] for i in indices] if self.lines else ())


SPLITS = ("train", "test")
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".gz": "json", ".csv": "csv",
            ".tsv": "csv"}  # fmt: skip
_SHARD = re.compile(r"-\d+-of-\d+\.parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_splits(
    source: str, *, hub_configuration: str | None, revision: str = "", file_split: str = "train", cache: Path
) -> Mapping[str, Examples]:
    """Return the splits of a path or hub id. Images stay encoded; unreadable lines of JSONL and CSV files are counted.
    A single file is the split `file_split`; `cache` holds files that `datasets` converts."""
    path = Path(source).expanduser()
    if not path.exists() and not _HUB_ID.fullmatch(source):
        raise InputError(f"source {source!r} is neither a path on this machine nor a hub id like owner/name")
    if path.exists() and revision:
        raise InputError(
            f"--revision {revision} is only for sources on the hub, but {source!r} is a path on this machine. Leave it "
            "out"
        )
    try:
        loaded = (
            _load_local(path, file_split, cache) if path.exists() else _load_hub(source, hub_configuration, revision)
        )
    except InputError:
        raise
    except Exception as error:  # boundary: `datasets` raises errors of any class
        advice = (
            "Check that the file is complete."
            if path.exists()
            else "Without a network, give a local folder (docs/data.md)."
        )
        raise InputError(
            f"source {source!r} can't be read: {type(error).__name__}: {_first(error)}. {advice}"
        ) from error
    return {
        name: split if isinstance(split, Examples) else Examples(rows=_without_decoding(split))
        for name, split in loaded.items()
    }


def _load_hub(source: str, configuration: str | None, revision: str) -> Mapping[str, Any]:
    from datasets import load_dataset

    loaded: Mapping[str, Any] = load_dataset(source, configuration, revision=revision or None)
    return _known(loaded)


def _known(loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    if others := [name for name in loaded if name not in SPLITS]:
        _log.warning("splits that are left out, because only %s are read: %s", ", ".join(SPLITS), ", ".join(others))
    return {name: loaded[name] for name in SPLITS if name in loaded}


def _load_local(path: Path, file_split: str, cache: Path) -> Mapping[str, Any]:
    if path.is_file():
        return {file_split: _load_files([path], cache)}
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return _load_saved(path)
    files = {name: [each for each in sorted(path.glob(f"{name}*")) if each.suffix in _LOADERS] for name in SPLITS}
    if not any(files.values()):
        raise InputError(
            f"source folder {path} has no file train* or test* that ends in {', '.join(_LOADERS)}, and was not written "
            "by save_to_disk of the package datasets"
        )
    return {name: _load_files(found, cache) for name, found in files.items() if found}


def _load_saved(path: Path) -> Mapping[str, Any]:
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(str(path))
    if isinstance(loaded, Dataset):
        return {"train": loaded}
    return _known(loaded)


def _load_files(paths: Sequence[Path], cache: Path) -> Any:
    """Return the rows of one file, or of the shards of a parquet file."""
    from datasets import load_dataset

    path, *others = paths
    if others and not all(_SHARD.search(each.name) for each in paths):
        names = ", ".join(each.name for each in paths)
        raise InputError(f"source folder {path.parent} has several files for one split: {names}. Leave one there")
    if path.suffix not in _LOADERS:
        raise InputError(f"source {path}: the file's name must end in one of {', '.join(_LOADERS)}")
    if _LOADERS[path.suffix] == "parquet":
        return load_dataset("parquet", data_files=list(map(str, paths)), split="train", cache_dir=str(cache))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    # A byte that is not UTF-8 becomes half of a surrogate pair, which no row may have.
    text = data.decode("utf-16", "surrogatepass") if is_utf16 else data.decode("utf-8-sig", "surrogateescape")
    kind = _LOADERS.get(Path(path.name.removesuffix(".gz")).suffix)
    return _in_columns(*(_csv_rows(text) if kind == "csv" else _json_rows(text)))


_ITEM = re.compile(r"[^\s,\]]")
_LINE_OF_OBJECT = re.compile(r"\n\s*(?={)")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Line -> row, and (line, reason) of the lines that hold no row.
_Found = tuple[dict[int, dict[str, Any]], list[tuple[int, str]]]


def _json_rows(text: str) -> _Found:
    rows, bad = dict[int, dict[str, Any]](), list[tuple[int, str]]()
    for number, found in _listed(text) if text.lstrip()[:1] == "[" else _lines(text):
        if isinstance(found, ValueError | RecursionError):
            bad.append((number, f"it is not JSON in UTF-8: {found}"))
        elif not isinstance(found, dict):
            bad.append((number, f"it is {found!r:.40}, not an object"))
        elif wrong := _wrong_bytes(json.dumps(found, ensure_ascii=False)):
            bad.append((number, f"it is not JSON in UTF-8: {wrong}"))
        else:
            rows[number] = found
    return rows, bad


def _lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _value(json.loads, line)


def _listed(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the items of a JSON list, each with the line on which it begins; instead of a broken item its error, and
    then the items from the next line on that begins with an object."""
    place, counted, number = text.index("[") + 1, 0, 1
    while (found := _ITEM.search(text, place)) is not None:
        number, counted = number + text.count("\n", counted, found.start()), found.start()
        item = _value(json.JSONDecoder().raw_decode, text, found.start())
        is_broken = isinstance(item, ValueError | RecursionError)
        yield number, item if is_broken else item[0]
        following = _LINE_OF_OBJECT.search(text, found.start()) if is_broken else None
        if is_broken and following is None:
            break
        place = following.end() if following else item[1]


def _value(read: Callable[..., Any], *given: Any) -> Any:
    """Return what `read` returns, or its error as a value."""
    try:
        return read(*given)
    except (ValueError, RecursionError) as error:
        return error


def _wrong_bytes(text: str) -> str:
    """Return why a text can't be UTF-8; empty if it can."""
    if text.isascii() or (found := _SURROGATE.search(text)) is None:
        return ""
    code = ord(found[0]) - 0xDC00
    return f"can't decode byte {code:#x}" if 0x80 <= code <= 0xFF else "it has half of a surrogate pair"


def _csv_rows(text: str) -> _Found:
    lines = io.StringIO(text, newline="").readlines()
    form: Any = {"delimiter": max(",;\t", key="".join(lines[:1]).count), "skipinitialspace": True}
    csv.field_size_limit(1 << 30)
    rows, bad, names, place = dict[int, dict[str, Any]](), list[tuple[int, str]](), list[str](), 0
    reader = csv.reader(lines, **form)
    while (cells := next(reader, None)) is not None:
        number, place = place + 1, place + reader.line_num
        reader = csv.reader((lines[i] for i in range(place, len(lines))), **form)
        wrong = _wrong_bytes("".join(cells))
        if cells and len(cells) != len(names) > 0:
            wrong = f"it has {len(cells)} fields, and the first line has {len(names)}"
        if place - number > 0 and (wrong or _is_open(lines[number - 1 : place], form)):
            # A quote that nothing closes takes many lines: only its own is bad.
            place, wrong = number, wrong or "its quote is not closed"
            reader = csv.reader((lines[i] for i in range(place, len(lines))), **form)
        if wrong and names:
            bad.append((number, wrong))
        elif wrong:
            raise InputError(f"the first line has the columns' names, but {wrong}")
        elif not names:
            names = [cell.strip() for cell in cells]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise InputError(f"the first line names the columns {', '.join(twice)} twice: rename one of each")
        elif cells:
            rows[number] = {name: cell or None for name, cell in zip(names, cells, strict=True)}
    _with_numbers(rows, names)
    return rows, bad


def _is_open(lines: Sequence[str], form: Mapping[str, Any]) -> bool:
    """Return True if a record's quote is still open at its end."""
    try:
        return next(csv.reader(lines, strict=True, **form), None) is None
    except csv.Error as error:
        return "end of data" in str(error)


def _with_numbers(rows: Mapping[int, dict[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        column = [row[name] for row in rows.values() if row[name] is not None]
        for kind in (int, float):
            try:
                typed = dict(zip(column, map(kind, column), strict=True))
            except ValueError:
                continue
            if all(str(value) == text for text, value in typed.items()):
                for row in rows.values():
                    row[name] = None if row[name] is None else typed[row[name]]
                break


def _in_columns(rows: Mapping[int, Mapping[str, Any]], bad: Sequence[tuple[int, str]]) -> Examples:
    # A table needs the same keys and types; a column of mixed types becomes JSON text.
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows.values()]
        try:
            columns[name] = pa.array(values).to_pylist()
            if {type(each) for each in values} >= {int, float}:  # Arrow would write the answer 4 as 4.0
                raise OverflowError
        except (pa.ArrowException, OverflowError):
            columns[name] = [each if isinstance(each, str | None) else AsJson(json.dumps(each)) for each in values]
    found = [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]
    return Examples(rows=found, lines=list(rows), bad=tuple(bad))


def _without_decoding(split: Any) -> Any:
    # Decoding and encoding images again would cost time and change them.
    from datasets import Image
    from datasets import Sequence as Several

    for name, feature in split.features.items():
        if isinstance(feature, Image):
            split = split.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            split = split.cast_column(name, Several(Image(decode=False)))
    return split


def _first(error: Exception) -> str:
    # Take the inner error: `datasets` wraps the error of its reader, and only the reader's error describes the problem.
    return one_line(error.__cause__ or error)
