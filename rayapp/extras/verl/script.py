"""Read the verl command of a launch script without running the script. Called by `importing.py`.

The parser knows a small part of bash: variables, arrays, quotes, `${NAME:-default}`, `$((1024 * 8))`, simple tests, and
the programs `date`, `pwd`, `echo`, `tr`, `basename`, `dirname` and `readlink`. Tests for files look at this machine's
files. An error names the values that can't be computed.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayapp.core.errors import ConfigError
from rayapp.core.syntax import expression

TRAINERS = ("main_ppo", "main_ppo_sync", "main_dapo", "main_entropy")
"""Last part of the names of modules that train with GRPO or a similar algorithm."""
_LABELS = ("experiment_name", "project_name", "default_local_dir", "rollout_data_dir", "validation_data_dir")
"""Keys of `trainer` that only name a run or its folders. Parts of these and of Hydra's keys that can't be computed are
left out."""
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Marks around the text of an expansion that can't be computed."""
_UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?])(\[[^\]]*\])?(.*)", re.DOTALL)
_SEPARATORS = ("&&", "||", ";;", ";", "&", "|", "\n", "(", ")")
_FALSE_HERE = ("python3 -c import torch_npu", "python -c import torch_npu", "command -v npu-smi", "npu-smi info")
"""Commands by which scripts detect NPUs; taken as failed, because rayapp doesn't use NPUs."""
_TESTS = ("[", "[[", "test", "true", "false", ":")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One command of a script that starts verl's training."""

    module: str
    """Module that `python -m` names."""
    arguments: tuple[str, ...]
    """Arguments of the module: Hydra's options and overrides."""


def read_script(path: Path, environment: Mapping[str, str] | None = None, overridden: Collection[str] = ()) -> Launch:
    """Return the one command of a script that starts a trainer of verl.

    Args:
        path: the shell script.
        environment: environment variables of the script; None takes those of this process.
        overridden: keys whose values in the script don't matter.
    Raises:
        ConfigError: the script can't be read, has no such command or several, or the command uses values that can't
            be computed (all of them are named).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"verl script {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    shell = _Shell(path=path, variables=dict(os.environ if environment is None else environment))
    try:
        shell.run(list(_commands(text)))
    except (IndexError, RecursionError, re.error) as error:
        raise ConfigError(f"verl script {path} can't be read as a shell script: {error}") from error
    launches = list(dict.fromkeys(map(_launch, shell.launches)))
    launches = [launch for launch in launches if _trains(launch)] or launches
    if len(launches) != 1:
        found = f"{len(launches)} commands start a trainer" if launches else "it has no `python -m verl...` command"
        raise ConfigError(
            f"verl script {path}: {found}. Give the overrides of one command without the script: --verl KEY=VALUE ..."
        )
    _check_known(path, launches[0], overridden)
    return launches[0]


def _launch(words: tuple[str, ...]) -> Launch:
    at = words.index("-m")
    return Launch(module=words[at + 1], arguments=tuple(map(_labelled, words[at + 2 :])))


def _labelled(argument: str) -> str:
    key = argument.partition("=")[0].lstrip("+")
    is_label = key.startswith("hydra.") or key in {f"trainer.{label}" for label in _LABELS}
    return _UNKNOWN.sub("", argument) if is_label else argument


def _trains(launch: Launch) -> bool:
    return launch.module.rpartition(".")[2] in TRAINERS


def _check_known(path: Path, launch: Launch, overridden: Collection[str]) -> None:
    if not _trains(launch):
        raise ConfigError(
            f"verl script {path} runs {launch.module}, which is not one of {', '.join(TRAINERS)}. Use `rayapp sft` for "
            "supervised training, `rayapp eval` for generation, and rayapp.train.max_staleness=1 for an asynchronous "
            "run."
        )
    keys = [(word.partition("=")[0].lstrip("+"), word) for word in launch.arguments]
    unknown = [
        what if _OPEN in key else f"{key}: {what}"
        for key, word in keys
        if key not in overridden
        for what in _UNKNOWN.findall(word)
    ]
    if unknown:
        raise ConfigError(
            f"verl script {path} uses values that can't be computed without running it. Export the "
            "variables, or give these keys as overrides after the script:\n  " + "\n  ".join(dict.fromkeys(unknown))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    words: tuple[str, ...]
    """Words as written, with their quotes."""
    after: str
    """Separator before the command."""


def _commands(text: str) -> Iterator[_Command]:
    words: list[str] = []
    at, after, waiting, dropped = 0, "\n", "", False
    while at < len(text):
        if separator := next((mark for mark in _SEPARATORS if text.startswith(mark, at)), None):
            if separator == "&" and text[at + 1 : at + 2] == ">":
                at, dropped = at + 2, True
                continue
            if words or separator in ("(", ")", ";;"):
                yield _Command(words=tuple(words), after=after)
                words = []
            if separator in ("(", ")", ";;"):
                yield _Command(words=(separator,), after=";")
            after, at = separator, at + len(separator)
            if separator == "\n" and waiting:
                last = re.compile(rf"^\t*{re.escape(waiting)}$", re.MULTILINE).search(text, at)
                at, waiting = (last.end() if last else len(text)), ""
        elif here := re.compile(r"<<-?\s*[\"']?(\w+)[\"']?").match(text, at):
            at, waiting = here.end(), here[1]
        elif redirect := re.compile(r"\d?[<>]+&?").match(text, at):
            at, dropped = redirect.end(), True
        elif text[at] == "#" and not (words and text[at - 1] not in " \t\n"):
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif text[at] in " \t\r" or text.startswith("\\\n", at):
            at += 2 if text[at] == "\\" else 1
        else:
            end = _end_of_word(text, at)
            words += [] if dropped else [text[at:end]]
            at, dropped = end, False
    if words:
        yield _Command(words=tuple(words), after=after)


def _end_of_word(text: str, at: int) -> int:
    start = at
    while at < len(text) and text[at] not in " \t\r\n;&|<>)":
        if text[at] == "(":
            if not re.fullmatch(r"\w+\+?=", text[start:at]):
                break
            at = _end_of_array(text, at + 1)
        elif text.startswith("\\\n", at):
            break
        else:
            at = _after(text, at)
    return max(at, start + 1)


def _end_of_array(text: str, at: int) -> int:
    while at < len(text) and text[at] != ")":
        if text[at] == "#" and text[at - 1] in " \t\n(":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        else:
            at = _after(text, at)
    return at + 1


def _after(text: str, at: int) -> int:
    """Return the index after the character, quoted text or expansion at an index."""
    if text[at] == "\\":
        return at + 2
    if text[at] in "'`":
        return _closed(text, text.find(text[at], at + 1)) + 1
    for opening, closing in (('"', '"'), ("$((", "))"), ("$(", ")"), ("${", "}")):
        if text.startswith(opening, at):
            inner = at + len(opening)
            while inner < len(text) and not text.startswith(closing, inner):
                nested = text[inner] in "\\$`" or (text[inner] in "'\"" and opening != '"' and closing != "))")
                parenthesis = text[inner] == "(" and opening in ("$(", "$((")
                inner = _closing(text, inner) if parenthesis else _after(text, inner) if nested else inner + 1
            return _closed(text, inner if inner < len(text) else -1) + len(closing)
    return at + 1


def _closing(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != ")":
        at = _closing(text, at) if text[at] == "(" else _after(text, at)
    return at + 1


def _closed(text: str, found: int) -> int:
    if found < 0:
        raise ConfigError("verl script: a quote or bracket is opened and never closed. Check it with `bash -n`.")
    return found


@dataclass(slots=True)
class _Block:
    """An `if`, loop, `case` or function that is open."""

    kind: str
    runs: bool | None
    """True: its commands run. False: they don't. None: unknown."""
    was_true: bool | None = False
    """True if an earlier branch ran; None if this is unknown."""
    subject: str = ""
    is_pattern: bool = False


@dataclass(slots=True, kw_only=True)
class _Shell:
    """A small interpreter of bash: the variables of a script, and the trainer commands that it reaches."""

    path: Path
    variables: dict[str, Any]
    blocks: list[_Block] = field(default_factory=list)
    launches: list[tuple[str, ...]] = field(default_factory=list)
    status: bool | None = True

    def run(self, commands: list[_Command]) -> None:
        """Interpret all commands in order."""
        for number, command in enumerate(commands):
            words = list(command.words)
            if self._in_case(words):
                continue
            if commands[number + 1 : number + 2] and commands[number + 1].words == ("(",) and len(words) == 1:
                self.blocks.append(_Block("function", False))
                continue
            runs = self._follows(command.after)
            while words and self._control(words, runs):
                words.pop(0)
            self._simple(words, runs and self._runs() if runs is not None else self._runs() and None)

    def _follows(self, after: str) -> bool | None:
        if after not in ("&&", "||") or self.status is None:
            return None if after in ("&&", "||") else True
        return self.status if after == "&&" else not self.status

    def _runs(self) -> bool | None:
        states = [block.runs for block in self.blocks]
        return False if False in states else None if None in states else True

    def _in_case(self, words: list[str]) -> bool:
        block = self.blocks[-1] if self.blocks and self.blocks[-1].kind == "case" else None
        if block is None or words[:1] == ["esac"]:
            return False
        if words == [";;"]:
            block.is_pattern, block.runs = True, False
            return True
        if not block.is_pattern:
            return False
        if words == [")"]:
            block.is_pattern = False
        elif words != ["("] and words:
            matches = _matches(block.subject, self.text(words[0]))
            free = matches if not block.was_true else False
            block.runs = free if block.runs is not True else True
            block.was_true = True if matches else block.was_true if matches is False else None
        return True

    def _control(self, words: list[str], runs: bool | None) -> bool:
        """Open or close a block; return True if a command may follow the word."""
        word = words[0]
        if word in ("if", "while", "until", "for", "select", "case", "function"):
            self._open(word, words)
            return False
        block = self.blocks[-1] if self.blocks else None
        if word in ("then", "do", "else", "elif") and block is not None:
            if word == "then":
                block.runs = self.status if not block.was_true else False
                block.was_true = True if block.runs else None if block.runs is None else block.was_true
            elif word == "else":
                block.runs = None if block.was_true is None else not block.was_true
            elif word == "elif":
                block.runs = not block.was_true
                self._condition(words[1:])
                words.clear()
                return False
            return True
        if word in ("fi", "done", "esac", "}") and block is not None:
            self.blocks.pop()
        return word == "!"

    def _open(self, word: str, words: list[str]) -> None:
        if word == "if":
            self._condition(words[1:])
            self.blocks.append(_Block("if", True))
        elif word == "while":
            self._condition(words[1:])
            self.blocks.append(_Block(word, False if self.status is False else None))
        elif word == "case":
            subject = self.text(words[1])
            self.blocks.append(_Block("case", False, subject=subject, is_pattern=True))
            if len(words) > 3:
                self._in_case(words[3:4])
        else:
            self.blocks.append(_Block(word, False if word == "function" else None))
        words.clear()

    def _condition(self, words: list[str]) -> None:
        """Evaluate the condition of a branch; if it is a program, the result is unknown."""
        runs, program = self._runs(), words[1:] if words[:1] == ["!"] else words
        self._simple(words[len(words) - len(program) :], runs)
        if program and program[0] not in _TESTS:
            self.status = False if " ".join(map(self.text, program)) in _FALSE_HERE else None
        if self.status is not None and program != words:
            self.status = not self.status

    def _simple(self, words: list[str], runs: bool | None) -> None:
        if not words or runs is False:
            return
        if words[0] in _TESTS:
            self.status = self._test(words) if runs else None
            return
        self.status = True
        while words and (words[0] in _DECLARING or words[0].startswith("-")):
            words = words[1:]
        assigned = 0
        while assigned < len(words) and (found := _ASSIGNMENT.fullmatch(words[assigned])):
            self._assign(found, runs)
            assigned += 1
        self._command([part for word in words[assigned:] for part in self.fields(word)])

    def _assign(self, found: re.Match[str], runs: bool | None) -> None:
        name, appended, raw = found.groups()
        value: Any
        if raw.startswith("("):
            value = [part for command in _commands(raw[1:-1]) for word in command.words for part in self.fields(word)]
        else:
            value = self.text(raw)
        if appended:
            before = self.variables.get(name, [] if isinstance(value, list) else "")
            value = [*_listed(before), *_listed(value)] if isinstance(before, list) else f"{before}{value}"
        if runs is None and value != self.variables.get(name):
            value = f"{_OPEN}{name} is set under a condition that can't be computed{_CLOSE}"
        self.variables[name] = value

    def _command(self, words: list[str]) -> None:
        for at, word in enumerate(words[:-1]):
            before = [Path(_UNKNOWN.sub("", earlier)).name for earlier in words[:at]]
            if word == "-m" and any(name.startswith(("python", "torchrun")) for name in before):
                self.launches.append(tuple(words[at:]))
                return

    def _test(self, words: list[str]) -> bool | None:
        if words[0] not in ("[", "[[", "test"):
            return words[0] != "false"
        parts = [self.text(word) for word in words[1:] if word not in ("]", "]]")]
        negated = bool(parts) and parts[0] == "!"
        parts = parts[1:] if negated else parts
        if any(_OPEN in part for part in parts):
            return None
        found = _tested(parts)
        return found if found is None else found != negated

    def text(self, raw: str) -> str:
        """Return an expanded word as one string."""
        return " ".join(self.fields(f'"{raw}"' if raw.startswith("$") else raw))

    def fields(self, raw: str) -> list[str]:
        """Return the fields of an expanded word: usually one, for arrays several, for an unquoted empty value none."""
        return _Expansion(self, raw).fields()


class _Expansion:
    """One word that is being expanded to its fields."""

    def __init__(self, shell: _Shell, raw: str) -> None:
        self._shell, self._raw = shell, raw
        self._fields: list[str] = []
        self._current: str | None = None

    def fields(self) -> list[str]:
        """Expand the word and return its fields."""
        self._walk(self._raw, is_quoted=False)
        return [*self._fields, *([] if self._current is None else [self._current])]

    def _walk(self, text: str, *, is_quoted: bool) -> None:
        at = 0
        if not is_quoted and (text == "~" or text.startswith("~/")):
            self._add(str(self._shell.variables.get("HOME", "~")))
            at = 1
        while at < len(text):
            end = _after(text, at) if not (is_quoted and text[at] in "'\"") else at + 1
            if text[at] == "\\":
                keeps = is_quoted and text[at + 1 : end] not in ('"', "\\", "$", "`", "\n")
                self._add(text[at:end] if keeps else text[at + 1 : end].replace("\n", ""))
            elif text[at] == "'" and not is_quoted:
                self._add(text[at + 1 : end - 1])
            elif text[at] == '"' and not is_quoted:
                self._add("" if text[at + 1 : end - 1] not in ("$@", "${@}", "$*") else None)
                self._walk(text[at + 1 : end - 1], is_quoted=True)
            elif text[at] == "$" or text[at] == "`":
                end = self._dollar(text, at, end, is_quoted=is_quoted)
            else:
                self._add(text[at:end])
            at = end

    def _add(self, text: str | None) -> None:
        if text is not None:
            self._current = (self._current or "") + text

    def _dollar(self, text: str, at: int, end: int, *, is_quoted: bool) -> int:
        name = re.compile(r"\$(\w+|[@*#?$!-])").match(text, at)
        if name and not text.startswith(("${", "$("), at):
            single = name[1][0] if name[1][0].isdigit() else name[1]
            self._spread(self._shell_parameter(single), is_quoted=is_quoted)
            return at + 1 + len(single)
        inner = text[at:end]
        if inner.startswith("$(("):
            self._add(_arithmetic(inner[3:-2], self._shell))
        elif inner.startswith("${"):
            self._spread(self._shell_parameter(inner[2:-1]), is_quoted=is_quoted)
        elif inner.startswith(("$(", "`")):
            self._add(_captured(inner[2:-1] if inner.startswith("$(") else inner[1:-1], self._shell))
        else:
            self._add(inner)
        return end

    def _shell_parameter(self, inside: str) -> Any:
        return _parameter(inside, self._shell)

    def _spread(self, value: Any, *, is_quoted: bool) -> None:
        parts = value if isinstance(value, list) else [value] if is_quoted or _OPEN in value else value.split()
        if isinstance(value, list) and not parts and self._current == "":
            self._current = None
        for number, part in enumerate(parts):
            if number:
                self._fields.append(self._current or "")
                self._current = None
            self._add(part)


def _parameter(inside: str, shell: _Shell) -> Any:
    found = _PARAMETER.fullmatch(inside)
    if found is None:
        return f"{_OPEN}${{{inside}}}{_CLOSE}"
    counts, name, index, rest = found.groups()
    if name in ("@", "*"):
        return []
    value = shell.variables.get(name)
    if name in ("0", "BASH_SOURCE"):
        value = str(shell.path)
    elif name == "#":
        value = "0"
    elif index:
        value = _indexed(value, index[1:-1], shell)
    elif isinstance(value, list):
        value = value[0] if value else ""
    if counts:
        return str(len(value or ""))
    operation = re.match(r":?[-=+?]", rest)
    if operation:
        return _defaulted(name, value, operation[0], rest[operation.end() :], shell)
    if value is None:
        return f"{_OPEN}${name} is not set{_CLOSE}"
    return _trimmed(value, rest, shell) if rest and isinstance(value, str) else value


def _indexed(value: Any, index: str, shell: _Shell) -> Any:
    values = _listed(value) if value is not None else []
    if index in ("@", "*"):
        return values
    number = _arithmetic(index, shell)
    return values[int(number)] if number.isdigit() and int(number) < len(values) else None


def _defaulted(name: str, value: Any, operation: str, word: str, shell: _Shell) -> Any:
    is_set = value is not None and (value not in ("", []) or ":" not in operation)
    if operation.endswith("+"):
        return " ".join(shell.fields(word)) if is_set else ""
    if is_set:
        return value
    if operation.endswith("?"):
        return f"{_OPEN}${name} is not set{_CLOSE}"
    text = _unquoted(word, shell)
    if operation.endswith("="):
        shell.variables[name] = text
    return text


def _unquoted(word: str, shell: _Shell) -> str:
    """Expand a default: keep spaces and remove quotes."""
    return " ".join(part for piece in _commands(word) for raw in piece.words for part in shell.fields(raw)) or ""


def _trimmed(value: str, rest: str, shell: _Shell) -> str:
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if rest.startswith("/"):
        pattern, _, new = rest.lstrip("/").partition("/")
        return value.replace(shell.text(pattern), shell.text(new), -1 if rest.startswith("//") else 1)
    if rest[0] in "#%":
        pattern, is_long = rest.lstrip(rest[0]), rest[:2] in ("##", "%%")
        cuts = range(len(value) + 1)
        if rest[0] == "#":
            order = reversed(cuts) if is_long else cuts
            return next((value[cut:] for cut in order if fnmatch.fnmatchcase(value[:cut], pattern)), value)
        order = cuts if is_long else reversed(cuts)
        return next((value[:cut] for cut in order if fnmatch.fnmatchcase(value[cut:], pattern)), value)
    return f"{_OPEN}${{...{rest}}}{_CLOSE}"


_CASES = {
    ("[:upper:]", "[:lower:]"): "lower", ("A-Z", "a-z"): "lower", ("[A-Z]", "[a-z]"): "lower",
    ("[:lower:]", "[:upper:]"): "upper", ("a-z", "A-Z"): "upper", ("[a-z]", "[A-Z]"): "upper",
}  # fmt: skip
"""Arguments of `tr` that change only the case -> the method of `str` that does the same."""


def _captured(text: str, shell: _Shell) -> str:
    """Return the output of `$(...)` for the few known programs without side effects."""
    folder, is_true, printed = Path.cwd(), True, []
    for command in _commands(text):
        words = [part for word in command.words for part in shell.fields(word) if part != "--"]
        if unknown := next((found[0] for found in map(_UNKNOWN.search, words) if found), None):
            return unknown
        if command.after == ("||" if is_true else "&&"):
            continue
        is_true = " ".join(words) not in _FALSE_HERE
        match words:
            case ["cd", target]:
                folder = folder / target
            case ["pwd"]:
                printed.append(str(folder.resolve()))
            case ["echo", *said]:
                printed.append(" ".join(said))
            case ["tr", old, new] if command.after == "|" and (old, new) in _CASES and printed:
                printed[-1] = getattr(printed[-1], _CASES[old, new])()
            case ["date", form] if form.startswith("+"):
                printed.append(time.strftime(form[1:]))
            case ["basename", name, *suffix] if len(suffix) < 2:
                printed.append(Path(name).name.removesuffix("".join(suffix)))
            case ["dirname", name]:
                printed.append(str(Path(name).parent))
            case ["readlink", "-f", name] | ["realpath", name]:
                printed.append(str((folder / name).resolve()))
            case _ if is_true:
                break
    else:
        return "\n".join(printed)
    return f"{_OPEN}$({' '.join(text.split())}) would run a program, and rayapp never runs a script{_CLOSE}"


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _arithmetic(text: str, shell: _Shell) -> str:
    expanded = " ".join(shell.fields(f'"{text}"'))
    unknown = _UNKNOWN.search(expanded)

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(str(shell.variables.get(node.id, 0)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](number(node.left), number(node.right))
        raise ValueError

    try:
        return str(number(expression(expanded)))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return unknown[0] if unknown else f"{_OPEN}$(({text})){_CLOSE}"


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip


def _tested(parts: list[str]) -> bool | None:
    match parts:
        case ["-z", value]:
            return not value
        case ["-n", value] | [value]:
            return bool(value)
        case ["-d", name]:
            return Path(name).is_dir()
        case ["-f", name]:
            return Path(name).is_file()
        case ["-e", name]:
            return Path(name).exists()
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, sign, right] if sign in _COMPARISONS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            return _COMPARISONS[sign](int(left), int(right))
    return None


def _matches(subject: str, pattern: str) -> bool | None:
    return None if _OPEN in subject or _OPEN in pattern else fnmatch.fnmatchcase(subject, pattern)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
