"""Languages besides Python for whole programs: how an answer is extracted, compiled once, and run.

The compilers are those of the sandbox: this machine's /usr, or what a template or image holds. The text process imports
this module, so it may import only the standard library and modules that do the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rayapp.core.errors import InputError
from rayapp.tasks.extraction import marked_block

MISSING = 113  # status of the compile step if the sandbox lacks the compiler
_JVM = ("-XX:+UseSerialGC", "-XX:CompressedClassSpaceSize=64m", "-XX:ReservedCodeCacheSize=48m", "-XX:-UsePerfData")
# By default each thread of a JVM maps 64 MiB, which counts towards the limit of address space.
_ONE_ARENA = ("env", "MALLOC_ARENA_MAX=1")
# Java's comments and texts; and braces, types and main methods. A file's name may have 255 bytes.
_TEXTS = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|\"{3}.*?(?:\"{3}|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?""", re.DOTALL
)
_PARTS = re.compile(
    r"[{}]|(\bpublic\s+(?:(?:final|abstract|strictfp|sealed)\s+)*)?\b(?:class|record|enum|interface)\s+"
    r"([^\W\d]\w{0,49})|\bvoid\s+main\s*\("
)
_PACKAGE = re.compile(r"\s*package\s+([\w.]+)\s*;")
_MOST_JAVA_CHARS = 1 << 17
_COMPILE = """
command -v "$0" > /dev/null || exit 113
if "$@" > .compiled 2>&1; then exit 0; fi
head -c 2000 .compiled; exit 1
"""
_LIMITED = 'ulimit -v "$0"; exec "$@"'
_SPARE_MIB = 32  # address space of an empty program, added to a test's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A programming language and its commands."""

    name: str  # in prompts and messages
    key: str  # in a ground truth's field `language`
    fences: tuple[str, ...]  # info strings of fenced blocks, e.g. `cpp`; prompts ask for the first one
    file: str  # name of the source file; {} stands for the main class
    compile: tuple[str, ...]  # compiles the file, or checks its syntax; the first word must be in the sandbox
    run: tuple[str, ...]  # for one test; {} stands for the main class, {mib} for the memory limit
    nothing: str  # source of a program that does nothing
    compile_mib: int = 768  # of the sandbox, for the compiler
    extra_mib: int = 0  # of the runtime, in addition to the program
    has_limit: bool = True  # of address space; False if the command itself or the sandbox limits memory
    is_compiled: bool = True  # False if `compile` only checks the syntax
    disk_mib: int = 32
    max_processes: int = 16

    def main_class(self, code: str) -> str:
        """Return Java's public class, or else the one with the main method, with its package."""
        if "{}" not in self.file:
            return ""
        return _main_class(code[:_MOST_JAVA_CHARS])

    def compile_command(self, main_class: str) -> list[str]:
        """Return the compile step's command. It exits with 0, MISSING, or 1 and the first messages on stdout."""
        words = [word.replace("{}", main_class.rpartition(".")[2]) for word in self.compile]
        program = next(word for word in words if "=" not in word and word != "env")
        return ["sh", "-c", _COMPILE, program, *words]

    def run_command(self, main_class: str, memory_mib: int, *, is_test: bool = True) -> list[str]:
        """Return the command of one execution. Of a whole program (not `is_test`) the sandbox limits the memory."""
        words = [word.replace("{}", main_class).replace("{mib}", str(memory_mib)) for word in self.run]
        limit = str((memory_mib + _SPARE_MIB) << 10)
        return ["sh", "-c", _LIMITED, limit, *words] if self.has_limit and is_test else words


@functools.lru_cache(maxsize=8)
def _main_class(code: str) -> str:
    code = _TEXTS.sub(" ", code)
    package = _PACKAGE.match(code)
    return f"{package[1]}.{_type_of(code)}" if package else _type_of(code)


def _type_of(code: str) -> str:
    depth, outer, main = 0, "Main", ""
    for part in _PARTS.finditer(code):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if part[2] and depth <= 0:
            outer = part[2]
            if part[1]:
                return outer
        elif part[0].startswith("void"):
            main = main or outer
    return main or outer


_CPP = Language(
    name="C++", key="cpp", fences=("cpp", "c++", "cc", "cxx"), file="main.cpp", run=("./main",),
    compile=("g++", "-O2", "-std=gnu++20", "-w", "-o", "main", "main.cpp"), nothing="int main() {}",
)  # fmt: skip
_C = Language(
    name="C", key="c", fences=("c",), file="main.c", run=("./main",),
    compile=("gcc", "-O2", "-std=gnu11", "-w", "-o", "main", "main.c", "-lm"), nothing="int main(void) { return 0; }",
)  # fmt: skip
_JAVA = Language(
    name="Java", key="java", fences=("java",), file="{}.java",
    compile=(*_ONE_ARENA, "javac", *(f"-J{each}" for each in _JVM), "-J-Xmx384m", "-nowarn", "-d", ".", "{}.java"),
    run=(*_ONE_ARENA, "java", *_JVM, "-Xmx{mib}m", "-Xss16m", "-cp", ".", "{}"),
    nothing="public class Main { public static void main(String[] arguments) {} }",
    compile_mib=1536, extra_mib=1280, has_limit=False, max_processes=64,
)  # fmt: skip
_GO = Language(
    name="Go", key="go", fences=("go", "golang"), file="main.go", run=("./main",),
    compile=("env", "GO111MODULE=off", "GOCACHE=/tmp/.go", "HOME=/tmp", "CGO_ENABLED=0", "GOFLAGS=-p=1",
             "go", "build", "-o", "main", "main.go"),
    nothing="package main\n\nfunc main() {}", compile_mib=1024, extra_mib=256, has_limit=False, disk_mib=256,
    max_processes=64,
)  # fmt: skip
_RUST = Language(
    name="Rust", key="rust", fences=("rust", "rs"), file="main.rs", run=("./main",),
    compile=("rustc", "-O", "--edition", "2021", "-A", "warnings", "-o", "main", "main.rs"), nothing="fn main() {}",
    compile_mib=1536, disk_mib=64, max_processes=64,
)  # fmt: skip
_JAVASCRIPT = Language(
    name="JavaScript", key="javascript", fences=("javascript", "js", "node", "nodejs"), file="main.js",
    compile=("node", "--check", "main.js"), run=("node", "--max-old-space-size={mib}", "main.js"), nothing=";",
    extra_mib=640, has_limit=False, is_compiled=False, max_processes=64,
)  # fmt: skip
_BASH = Language(
    name="Bash", key="bash", fences=("bash", "sh", "shell"), file="main.sh", compile=("bash", "-n", "main.sh"),
    run=("bash", "main.sh"), nothing=":", is_compiled=False,
)  # fmt: skip
_PERL = Language(
    name="Perl", key="perl", fences=("perl", "pl"), file="main.pl", compile=("perl", "-c", "main.pl"),
    run=("perl", "main.pl"), nothing="1;", is_compiled=False,
)  # fmt: skip
LANGUAGES = (_CPP, _C, _JAVA, _GO, _RUST, _JAVASCRIPT, _BASH, _PERL)
_PYTHON = frozenset({"", "python", "python3", "py", "py3", "pypy3"})
_VERSION = re.compile(r"(?<=[a-z+])\s*[(\d].*")


def language_of(name: object) -> Language | None:
    """Return the language that a row or an option names, e.g. `cpp`, `C++`, `C++17` or `GNU C++`; None for Python."""
    given = str(name or "").strip().lower()
    short = _VERSION.sub("", given.removeprefix("gnu ")).strip()
    if given in _PYTHON or short in _PYTHON:
        return None
    for language in LANGUAGES:
        if short in (language.key, language.name.lower(), *language.fences):
            return language
    known = ", ".join(("python", *(language.key for language in LANGUAGES)))
    raise InputError(f"unknown language {name!r:.60}: known are {known}")


def screen_program(completion: str, fences: Iterable[str]) -> tuple[str, str, str]:
    """Return code, status (empty if there is code) and detail of an answer. Runs in the text process."""
    code = marked_block(completion, frozenset(fences))
    return (code, "", "") if code else ("", "no_code", f"the completion has no block of {next(iter(fences))}")
