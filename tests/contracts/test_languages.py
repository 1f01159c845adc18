"""Programs in other languages than Python: compiled once for each answer and run for each test, as by hand."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as any_of

from rayapp.config.agent import CodeSection
from rayapp.core.errors import InputError, SandboxConfigError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.tasks.code import scoring
from rayapp.tasks.code.formats import read_tests
from rayapp.tasks.code.languages import LANGUAGES, Language, language_of
from rayapp.tasks.code.scoring import CodeProblem, check_languages
from support.languages import SUM, installed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("namespaces")]


def problem(language: Language, *pairs: tuple[str, str], **rules: object) -> CodeProblem:
    fields = {"inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}
    return CodeProblem(
        ground_truth=json.dumps(fields | {"language": language.key}), rules=CodeSection.model_validate(rules)
    )


async def score(problem: CodeProblem, code: str, sandboxes: SandboxSource) -> Reward:
    return await problem.score(f"I add them.\n{await problem.fenced(code)}That is all.", sandboxes, seed=0)


@pytest.mark.parametrize("key", SUM)
async def test_a_program_is_compiled_and_runs_on_every_test(sandboxes: SandboxSource, key: str) -> None:
    language = installed(key)
    adds = problem(language, ("1 2", "3"), ("-5 70000000000", "69999999995"))

    right, silent, broken = [await score(adds, code, sandboxes) for code in (SUM[key], language.nothing, "}{ ((( 'x")]
    assert (right.valid, right.value, right.terms["solved"], right.detail) == (True, 1.0, 1.0, "")
    assert (silent.value, silent.status) == (0.0, "scored")
    assert silent.detail.startswith("wrong output: input '1 2': got '', expected '3'")
    assert (broken.value, broken.status, broken.terms["format"]) == (0.0, "compile_error", 0.0)
    assert broken.detail.startswith(f"{language.name}: ")


@pytest.mark.parametrize(
    ("code", "rules", "why"),
    [
        ("int main() { for (;;); }", {"test_timeout_s": 0.5}, "stopped for timeout"),
        ("#include <vector>\nint main() { std::vector<char> all(1u << 30, 1); }", {}, "ended by SIG"),
        ("#include <cstdlib>\nint main() { abort(); }", {}, "ended by SIG"),
        ("int main() { return 3; }", {}, "exit status 3"),
        ('#include <cstdio>\nint main() { for (;;) puts("x"); }', {}, "stopped for output"),
        ("template <int n> int f() { return f<n + 1>(); }\nint main() { return f<0>(); }", {}, "C++: "),
        ('#include "/etc/shadow"\nint main() {}', {}, "C++: "),
    ],
)  # fmt: skip
async def test_limits_and_verdicts_are_those_of_python(
    sandboxes: SandboxSource, code: str, rules: dict[str, object], why: str
) -> None:
    reward = await score(problem(installed("cpp"), ("", "1"), **rules), code, sandboxes)

    assert (reward.valid, reward.value) == (True, 0.0)
    assert why in reward.detail, reward.detail


async def test_a_compiler_that_takes_too_long_is_stopped(
    sandboxes: SandboxSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "COMPILE_TIMEOUT_S", 0.01)
    slow = "#include <bits/stdc++.h>\nint main() {}"
    reward = await score(problem(installed("cpp"), ("", "1")), slow, sandboxes)

    assert (reward.value, reward.status) == (0.0, "compile_error")
    assert "stopped for timeout" in reward.detail


PROGRAMS = {
    "cpp": """#include <bits/stdc++.h>
int main() {
    std::vector<long long> all; long long one;
    while (std::cin >> one) all.push_back(one);
    std::sort(all.begin(), all.end());
    double mean = 0;
    for (auto each : all) { std::cout << each << ' '; mean += each; }
    std::cout << '\\n' << all.size() << '\\n' << std::fixed << std::setprecision(6) << mean / (all.size() + 1) << '\\n';
    if (all.size() % 5 == 4) return 1;
}""",
    "bash": "read -a all; for one in ${all[@]}; do echo $((one % 7)); done; (( ${#all[@]} % 5 != 4 ))",
}


@pytest.mark.parametrize("key", PROGRAMS)
async def test_verdicts_agree_with_the_real_compiler_run_directly(
    sandboxes: SandboxSource, tmp_path: Path, key: str
) -> None:
    language, rng = installed(key), random.Random(5)
    (tmp_path / language.file).write_text(PROGRAMS[key])
    subprocess.run(language.compile_command(""), cwd=tmp_path, check=True, timeout=240)
    inputs = [" ".join(str(rng.randint(-9999, 9999)) for _ in range(rng.randint(0, 12))) for _ in range(25)]
    pairs, passes = [], 0
    for given in inputs:
        ran = subprocess.run(language.run_command("", 512), cwd=tmp_path, input=given, text=True, capture_output=True,
                             timeout=240, check=False)  # fmt: skip
        is_wrong = rng.random() < 0.3
        pairs.append((given, ran.stdout + "17" if is_wrong else ran.stdout))
        passes += ran.returncode == 0 and not is_wrong

    reward = await score(problem(language, *pairs, score="share", max_tests=0), PROGRAMS[key], sandboxes)
    assert 0 < passes < 25
    assert reward.value == passes / 25


async def test_a_missing_compiler_is_one_line_before_a_run(sandboxes: SandboxSource) -> None:
    none = replace(installed("c"), name="Zig", compile=("zig", "build-exe", "main.c"))

    with pytest.raises(SandboxConfigError, match=r"^Zig: sandboxes of local have no zig, .*in /usr/bin$"):
        await check_languages([none], sandboxes)
    await check_languages([installed("bash"), installed("c")], sandboxes)


@pytest.mark.parametrize(
    ("name", "key"),
    [("C++", "cpp"), ("C++17", "cpp"), ("GNU C++17 (64)", "cpp"), ("c", "c"), ("Java 17", "java"), ("golang", "go"),
     ("JavaScript", "javascript"), ("node", "javascript"), ("Rust 2021", "rust"), ("sh", "bash")],
)  # fmt: skip
async def test_a_row_may_name_its_language_as_contests_do(name: str, key: str) -> None:
    language = language_of(name)
    assert language.key == key
    assert language_of("Python 3") is language_of(None) is None


async def test_rows_that_can_not_be_run_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown language 'cobol': known are python, cpp, c, java"):
        language_of("cobol")
    with pytest.raises(InputError, match=r"fn_name 'f' is only for Python: programs in C\+\+ read standard input"):
        read_tests(json.dumps({"inputs": [[1]], "outputs": [2], "fn_name": "f", "language": "c++"}))


@any_of(st.text(max_size=400), st.sampled_from(LANGUAGES))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_text_has_a_main_class_that_is_a_file_name(code: str, language: Language) -> None:
    assert language.main_class(code) == "" or language.main_class(f"class A {code}").isidentifier()


async def test_the_main_class_of_java_names_the_file() -> None:
    java = language_of("java")
    assert java.main_class("import x;\npublic final class Solver { }\nclass Other {}") == "Solver"
    assert java.main_class("class A { }\nclass B { public static void main(String[] a) {} }\nclass C {}") == "B"
    assert java.main_class("") == "Main"
    assert java.main_class("// Mine\npackage a.b; class C {}") == "a.b.C"
    assert len(java.main_class("class " + "A" * 300)) == 50  # a file can't have every name that a class can
    within = '/* class A { */ class Main { String s = "} class B {"; static class C {} // class D\n%s class E {} }'
    assert java.main_class(within % "static public void main(String... a) {}") == "Main"
    assert java.main_class("record P(int a) {}\n" + within % "public class F { void main(int a) {} }") == "Main"
