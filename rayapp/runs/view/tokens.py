"""Token ids back into the text each of them adds, so that tokens can be coloured. Pure but for loading a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rayapp.core.errors import InputError
from rayapp.runs.view.source import RunSource

# A character has at most four bytes, each a token of its own in the worst case; what is longer is no text at all.
_MAX_TOKENS_OF_A_CHARACTER = 12
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What is needed of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """(T,) the text that each token adds; joined it is the text of all.

    Example: a character of three byte tokens gives ["", "", "€"].
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=False)
        whole = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        is_torn = whole.endswith(_REPLACEMENT) and end < len(ids) and end - start < _MAX_TOKENS_OF_A_CHARACTER
        texts.append("" if is_torn else whole[len(before) :])
        if not is_torn:
            start, read = read, end
    return texts


def load_tokenizer(source: RunSource, model_path: str, chosen: Path | None) -> Any | None:
    """The tokenizer of a run: the one a person chose, the final model's, or the one of the model it began with.

    Returns:
        None when none of them is here: then texts are shown whole and tokens can't be coloured.
    Raises:
        InputError: the chosen one can't be read.
    """
    if chosen is not None:
        file = chosen / "tokenizer.json" if chosen.is_dir() else chosen
        try:
            return _parse(file.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"--tokenizer {chosen}: {error}. Give a Hugging Face folder with tokenizer.json") from None
    candidates = (source.read_bytes("final/tokenizer.json"), _local(Path(model_path) / "tokenizer.json"))
    return next((_parse(data) for data in candidates if data), None)


def _local(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _parse(data: bytes) -> Any:
    """Raises ValueError: it is no tokenizer."""
    from tokenizers import Tokenizer as Fast

    try:
        return Fast.from_str(data.decode())
    except Exception as error:  # boundary: the library raises bare Exception
        raise ValueError(f"it is no tokenizer.json: {error}") from None
