"""The tokenizer of the run's model, read from tokenizer.json and the chat template, without transformers.

Its import would cost every driver and rollout worker seconds and hundreds of MB. It is used only for models without a
tokenizer.json, tokenizers with their own code, and vLLM's tool parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rayapp.config.sections import ModelSection
from rayapp.core.protocols import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

# Special tokens that every chat template may use.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(model: ModelSection, variables: Mapping[str, Any] = MappingProxyType({})) -> Tokenizer:
    """Return the model's own tokenizer. Its chat template gets `variables` in every rendering."""
    folder, trust_remote_code = Path(model.path), model.trust_remote_code
    if (folder / "tokenizer.json").is_file() and "auto_map" not in _settings(folder):
        tokenizer = ModelTokenizer(folder, trust_remote_code=trust_remote_code, variables=variables)
        if not tokenizer.is_cleaned_up:
            return tokenizer
    loaded = _of_transformers(str(folder), trust_remote_code=trust_remote_code)
    loaded.apply_chat_template = partial(loaded.apply_chat_template, **variables)
    ready: Tokenizer = loaded
    return ready


class ModelTokenizer:
    """The part of a Hugging Face tokenizer that rollouts and tasks use, under the same names."""

    def __init__(
        self, folder: Path, *, trust_remote_code: bool = False, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.name_or_path = str(folder)
        self._variables = variables
        self._trust_remote_code = trust_remote_code
        settings = _settings(folder)
        self.special_tokens_map = _named(settings)
        more = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or ()
        unnamed = () if isinstance(more, dict) else map(_text, more)
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *unnamed]))
        self._fast = _fast(folder, settings, self.all_special_tokens)
        is_bpe = type(self._fast.model).__name__ == "BPE"
        # True if transformers would remove blanks from decoded text.
        self.is_cleaned_up = bool(settings.get("clean_up_tokenization_spaces")) and not is_bpe
        self.chat_template: str | dict[str, str] | None = _chat_template(folder, settings)

    @cached_property
    def of_transformers(self) -> Any:
        """Tokenizer of the same model as an object of transformers, for libraries that need one."""
        return _of_transformers(self.name_or_path, trust_remote_code=self._trust_remote_code)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        return dict(self._fast.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self._fast.get_added_tokens_decoder())

    @property
    def all_special_ids(self) -> list[int]:
        return [self._fast.token_to_id(token) for token in self.all_special_tokens]

    @property
    def eos_token_id(self) -> int | None:
        eos = self.special_tokens_map.get("eos_token")
        return None if eos is None else self._fast.token_to_id(eos)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """Render messages as text with the chat template, or `chat_template` (Jinja). Token ids are refused
        (`tokenize`); `options` are variables. Templates are programs and may raise any error."""
        if tokenize or not conversation:
            if not conversation:
                raise ValueError("apply_chat_template: there are no messages")
            raise ValueError("apply_chat_template: tokenize is True, but only text is returned. Encode the text "
                             "with add_special_tokens=False")  # fmt: skip
        variables = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables |= {**self._variables, **options}
        template = _compiled(
            chat_template if chat_template is not None else self._template(with_tools=tools is not None)
        )
        return template.render(messages=conversation, **{**self.special_tokens_map, **variables})

    def _template(self, *, with_tools: bool) -> str:
        own = self.chat_template
        if isinstance(own, dict):
            own = own.get("tool_use" if with_tools and "tool_use" in own else "default")
        if own is None:
            raise ValueError(f"{self.name_or_path} has no chat template")
        return own


def _of_transformers(path: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings, merged with special_tokens_map.json, which models from before 2024 have."""
    settings: dict[str, Any] = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    return settings | _json(folder / "special_tokens_map.json")


def _json(file: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content
    return {}


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens, with names of the model's own, such as image_token."""
    own = {key: token for key, token in settings.items() if key.endswith("_token") and isinstance(token, str)}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        own |= settings[key] if isinstance(settings.get(key), dict) else {}
    named = {key: settings[key] for key in _NAMED if settings.get(key) is not None}
    return {key: _text(token) for key, token in (named | own).items()}


def _fast(folder: Path, settings: Mapping[str, Any], special: Sequence[str]) -> Any:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    added = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0]))
    there = fast.get_vocab(with_added_tokens=True)
    tokens = [AddedToken(**token) for _, token in added if token["content"] not in there]
    named = {token.content for token in tokens}
    fast.add_tokens(tokens + [AddedToken(each, special=True) for each in special if each not in named.union(there)])
    return fast


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    own = settings.get("chat_template")
    found = {entry["name"]: entry["template"] for entry in own} if isinstance(own, list) else {}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    read = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if read:  # template files override the template in tokenizer_config.json
        return read["default"] if list(read) == ["default"] else read
    return found or own or _json(folder / "chat_template.json").get("chat_template")


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    """Compile a template in the Jinja environment that transformers 5.10 uses."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Jinja's tag `{% generation %}`, which marks the assistant's text. Its content is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 - as the base class declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own filter `tojson` would escape HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - local time
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
