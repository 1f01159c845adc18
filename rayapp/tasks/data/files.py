"""Opens data files in verl's schema, checks them, and reads one row group at a time.

Files in object storage are copied and verified by checksum, those on the hub are downloaded to its cache. A JSON file
is converted to a parquet file once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rayapp.core.aio import side_by_side
from rayapp.core.errors import InputError, StorageNotFoundError, first_line
from rayapp.core.files import Location, aside, json_lines
from rayapp.storage.opening import open_storage
from rayapp.tasks.data.pictures import COLUMNS as PICTURES
from rayapp.tasks.data.pictures import as_marks, as_stored, listed, with_parts

COLUMNS = ("prompt", "data_source", "reward_model")  # that every file must have
_OPTIONAL = ("extra_info", "agent_name", *PICTURES)
_HUB = "hf://datasets/"
_NAME = "rayapp.file"  # key of a converted file's metadata: the name of the original


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """One row group of a parquet file, always read as a whole."""

    path: Path
    name: str  # the user's file, for messages
    index: int  # within its file
    first_row: int  # within the file
    num_rows: int
    has_pictures: bool = False  # rows of the file may have pictures

    def where(self, index: int) -> str:
        return f"{self.name}, row {self.first_row + index}"


async def fetch_files(uris: Sequence[str], cache: Path) -> list[Path]:
    """Return local paths of all files (local, s3://bucket/key, hf://datasets/OWNER/NAME[@REVISION]/FILE)."""
    if not uris:
        raise InputError("no data files: name at least one")
    slots = asyncio.Semaphore(4)

    async def fetched(uri: str) -> Path:
        async with slots:
            return await _fetch(uri, cache)

    return await side_by_side(map(fetched, uris))


def is_remote(uri: str) -> bool:
    return uri.startswith(_HUB) or Location.parse(uri).is_remote


def as_parquet(path: Path, cache: Path) -> Path:
    """Convert a .jsonl or .json file to a parquet file in `cache`, once; return any other path unchanged."""
    if path.suffix not in (".jsonl", ".json"):
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(path):
        content = path.read_bytes()
    key = hashlib.sha256(content + str(path.parent.resolve()).encode()).hexdigest()[:16]
    written = cache / f"{path.stem}-{key}.parquet"
    if written.exists():
        return written
    found = enumerate(json_rows(content, path, columns=COLUMNS))
    rows = [_for_columns(row, path.parent, f"{path}, row {number}") for number, row in found]
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in names}, metadata={_NAME: str(path)})
        cache.mkdir(parents=True, exist_ok=True)
        with aside(written) as pending:
            pq.write_table(table, pending, row_group_size=1000)
    except pa.ArrowException as error:
        raise InputError(f"{path}: all values of a column must have the same type: {error}") from None
    return written


def _for_columns(row: dict[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Return the row with its pictures in the column `images`, as whole paths or addresses, and with `<image>` in place
    of messages' parts: a column has one type."""
    try:
        paths = [as_stored(each)["path"] for each in listed(row)]
        if _has_parts(row.get("prompt")):
            row = row | {"prompt": as_marks(with_parts(row["prompt"], len(paths)))}
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if not paths:
        return row
    whole = [name if ":" in name.partition("/")[0] else str((folder / name).resolve()) for name in paths]
    others = {key: value for key, value in row.items() if key not in PICTURES}
    return others | {"images": [{"bytes": None, "path": path} for path in whole]}


def _has_parts(prompt: Any) -> bool:
    messages = prompt if isinstance(prompt, list) else []
    kinds = {type(each.get("content")) if isinstance(each, dict) else None for each in messages}
    return list in kinds <= {str, list}


def json_rows(content: bytes, path: Path, *, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl or .json file; every one must have `columns`."""
    try:
        text = content.decode("utf-8-sig")
        is_lines = path.suffix == ".jsonl"
        rows: Any = [row for _, row in json_lines(text.split("\n"), str(path))] if is_lines else json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        wanted = f" with {', '.join(columns)}" if columns else ""
        raise InputError(f"{path} must contain a list of rows, each an object{wanted}")
    return rows


def open_files(paths: Sequence[Path]) -> list[RowGroup]:
    """Check the schema of each file. Return all row groups of all files, in order."""
    groups: list[RowGroup] = []
    for path in paths:
        with _reading(path):
            groups += _open_one(path)
    if not any(group.num_rows for group in groups):
        raise InputError(f"the data files have no rows: {', '.join(map(str, paths))}")
    return groups


def read_group(group: RowGroup, columns: Sequence[str] = (*COLUMNS, *_OPTIONAL)) -> Any:
    """Return a row group as a pyarrow Table, without columns that the file lacks."""
    return next(table for _, table in read_groups([group], columns))


def read_groups(groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[tuple[RowGroup, Any]]:
    """Yield each row group with its pyarrow Table; `a.b` is the field b of the structs in column a."""
    import pyarrow.parquet as pq

    for path, of_file in groupby(groups, lambda group: group.path):
        with _reading(path), pq.ParquetFile(path) as file:
            present = [name for name in columns if name.partition(".")[0] in file.schema_arrow.names]
            for group in of_file:
                yield group, file.read_row_group(group.index, columns=present)


def _open_one(path: Path) -> Iterator[RowGroup]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        name = (file.schema_arrow.metadata or {}).get(_NAME.encode(), str(path).encode()).decode()
        _check_schema(name, file.schema_arrow)
        if _has_values(file.metadata, ("videos",)):
            raise InputError(f"{name}: its rows have videos, which rayapp doesn't read. Drop the column or these rows.")
        has_pictures, first_row = _has_values(file.metadata, PICTURES), 0
        for index in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(index).num_rows
            yield RowGroup(
                path=path, name=name, index=index, first_row=first_row, num_rows=num_rows, has_pictures=has_pictures
            )
            first_row += num_rows


def _check_schema(path: str, schema: Any) -> None:
    from pyarrow import types

    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise InputError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(schema.names)}. "
            "Convert it with `rayapp data rows`, or write verl's row schema (docs/data.md)."
        )
    kinds: Mapping[str, tuple[Any, str]] = {
        "prompt": (_is_list_of_structs, "a list of structs with role and content"),
        "data_source": (is_text, "text"),
        "agent_name": (lambda kind: is_text(kind) or types.is_null(kind), "text"),
        "reward_model": (_has_truth, "a struct with ground_truth"),
        "extra_info": (lambda kind: types.is_struct(kind) or types.is_null(kind), "a struct"),
    }
    for name, (is_right, wanted) in kinds.items():
        if name in schema.names and not is_right(plain(schema.field(name).type)):
            raise InputError(f"{path}: column {name} must be {wanted}; it is {schema.field(name).type}")
    extra = schema.field("extra_info").type if "extra_info" in schema.names else None
    if extra is not None and types.is_struct(extra) and (index := extra.get_field_index("tools_kwargs")) >= 0:
        kind = extra.field(index).type
        if not (types.is_struct(kind) or types.is_null(kind)):
            raise InputError(f"{path}: column extra_info.tools_kwargs must be a struct; it is {kind}")


def _has_values(metadata: Any, columns: Sequence[str]) -> bool:
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    chunks = [group.column(column) for group in groups for column in range(group.num_columns)]
    found = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    # Parquet's statistics count an empty list as one null.
    return any(each.statistics is None or each.statistics.null_count < each.num_values for each in found)


def is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_list_of_structs(kind: Any) -> bool:
    from pyarrow import types

    if not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    item = kind.value_type
    return types.is_struct(item) and {"role", "content"} <= {item.field(i).name for i in range(item.num_fields)}


def _has_truth(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(kind)) and kind.get_field_index("ground_truth") >= 0


def plain(kind: Any) -> Any:
    from pyarrow import types

    return kind.value_type if types.is_dictionary(kind) else kind


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file") from error
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{path} can't be read as a parquet file: {why}. Write or copy the file again.") from error


def _cached(location: Location, cache: Path) -> Path:
    # Add a hash of the location to the path: two buckets may have files with the same name.
    folder = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    return cache / folder / Path(location.key).name


async def _fetch(uri: str, cache: Path) -> Path:
    if uri.startswith(_HUB):
        return await asyncio.to_thread(_from_hub, uri)
    location = Location.parse(uri)
    if not location.is_remote:
        return Path(location.key)
    path = _cached(location, cache)
    folder, _, name = location.key.rpartition("/")
    async with open_storage(f"s3://{location.bucket}/{folder}") as storage:
        try:
            await storage.get_file(name, path)
        except StorageNotFoundError as error:
            raise InputError(f"{location}: there is no such file") from error
    return path


def _from_hub(uri: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    parts = uri.removeprefix(_HUB).split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise InputError(f"{uri} names no file: write {_HUB}OWNER/NAME/FILE, or {_HUB}OWNER/NAME@REVISION/FILE")
    name, _, revision = parts[1].partition("@")
    try:
        found = hf_hub_download(f"{parts[0]}/{name}", parts[2], repo_type="dataset", revision=revision or None)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(f"{uri} can't be downloaded from the hub: {first_line(error)}") from None
    return Path(found)
