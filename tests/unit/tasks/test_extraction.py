"""The part of a completion that is taken as code."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.core.syntax import answer_of, parse, parted, spoken
from rayapp.tasks.extraction import cut_after_function, extract_code, extract_module, extract_program, marked_block
from support.timing import takes_at_most_s

PREFILL = "```python\ndef f(xs):"


@pytest.mark.parametrize(
    ("completion", "body"),
    [
        ("\n    return 1\n\nThis returns one.\nprint(f(2))\n", "return 1\n"),
        # Definitions are kept because the function may call them.
        (
            "\n    return g(xs)\n\nprint(f(1))\n\n@cached\ndef g(x):\n    return x\n\nf(2)\n",
            "return g(xs)\n\n\n@cached\ndef g(x):\n    return x\n",
        ),
        ("\n    for x in xs:\n        total = (x +", "for x in xs:\n        total = (x +\n"),
        ("\r\n    return 1\r\n```", "return 1\n"),
        # 3000 lines, each a place where a cut could be made, none of which parses.
        ("\n    return (\n" + "x = = 1\n" * 3000, "return (\n"),
    ],
    ids=["prose", "definitions", "cut off by the token limit", "carriage returns", "hostile length"],
)
def test_a_prefilled_answer_is_the_signature_and_the_function_without_what_follows(completion: str, body: str) -> None:
    for prefill in (PREFILL, f"Here it is:\n{PREFILL}"):
        assert extract_code(completion, "f", prefill=prefill) == f"def f(xs):\n    {body}"


@pytest.mark.parametrize(
    "completion",
    [
        (
            "First:\n```python\ndef f(x):\n    return 2\n```\nBetter:\n```py\ndef f(x):\n    return 1\n```\n"
            "Run it:\n```bash\npython f.py\n```\nand\n```python\nprint(f(3))\n```\n"
        ),
        "1. So:\n\n   ```python\n   def f(x):\n       return 1\n   ```\n",
        "```python\ndef f(x):\n    return 1",
        "from the list we go\ndef f(x):\n    return 1\n",
        "def f(x):\n    return 1\n```\nDone.",
    ],
    ids=["last of several blocks", "in a list item", "unclosed", "after prose like code", "only closed"],
)
def test_the_function_is_found(completion: str) -> None:
    assert extract_code(completion, "f") == "def f(x):\n    return 1\n"


def test_code_without_a_fence_is_found_between_prose() -> None:
    completion = "Of course! def is a keyword.\nimport math\n\ndef f(x):\n    return math.pi\n\nHope this helps!"

    assert extract_code(completion, "f") == "import math\n\ndef f(x):\n    return math.pi\n"


@pytest.mark.parametrize(
    "completion",
    ["", "I can't do that.", "```python\ndef g(x): pass\n```", "define f(x)", "```javascript\ndef f(x): pass\n```"],
)
def test_completion_without_the_function_has_no_code(completion: str) -> None:
    assert extract_code(completion, "f") is None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("def fx():\n `~#'\"[]{}\\return1"), max_size=120))
def test_any_text_gives_code_with_the_function_or_nothing(text: str) -> None:
    for prefill in ("", PREFILL):
        code = extract_code(text, "f", prefill=prefill)
        assert code is None or "def" in code


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_honest_function_survives_whatever_follows_its_fence(tail: str) -> None:
    code = extract_code(f"\n    return xs\n```\n{tail}", "f", prefill=PREFILL)

    assert code == "def f(xs):\n    return xs\n"
    assert isinstance(ast.parse(code).body[0], ast.FunctionDef)


@pytest.mark.parametrize(
    "text",
    [
        "~~~" + " " * 100_000 + "`",
        "```" + " " * 100_000 + "`",
        "```\n" * 30_000,
        "~~~~\n" + "~~~\n" * 30_000,
        "async" + "\n" * 100_000,
        "def \n" * 30_000,
        '```python\n"""\n```\n' * 10_000,
        '```python\n"""\n' + "~~~\n" * 30_000,
        " " * 100_000 + "x",
    ],
    ids=["tildes", "ticks", "fences", "closings", "async", "defs", "strings", "string", "spaces"],
)
def test_a_long_text_without_code_is_read_in_linear_time(text: str) -> None:
    with takes_at_most_s(2):  # quadratic: minutes
        assert extract_code(text, "f") is None


@pytest.mark.parametrize(
    "piece", ["<think>", '"<think>', '"</a', "</think>", "<", '"0": 0, ', "```json\n", "<thinking></think>", "<|", "< "]
)
def test_thoughts_are_found_in_linear_time(piece: str) -> None:
    with takes_at_most_s(0.5):  # quadratic: minutes
        answer_of(piece * (500_000 // len(piece)))


def test_many_definitions_on_one_line_are_kept_once() -> None:
    line = "import a; import b; import c"

    assert cut_after_function(f"def f(x):\n    return 1\n{line}", "f") == f"def f(x):\n    return 1\n\n\n{line}\n"


@pytest.mark.parametrize("fence", ["```", "````", "~~~", "~~~~"])
def test_a_block_is_closed_by_marks_at_least_as_long(fence: str) -> None:
    assert (
        extract_code(f"{fence} python x\ndef f(x): pass\n  {fence}{fence[0]} \ndef f(x): 1", "f") == "def f(x): pass\n"
    )


DOCSTRING = 'def f(x):\n    """Return x.\n\n    {}\n    f(1)\n    {}\n    """\n    return x\n'


@pytest.mark.parametrize("fence", ["```", "```python", "~~~"])
def test_a_fence_in_a_docstring_belongs_to_the_code(fence: str) -> None:
    source = DOCSTRING.format(fence, fence[:3])

    assert extract_code(f"So:\n```python\n{source}```\nDone.", "f") == source
    assert extract_module(f"So:\n```python\n{source}```\nDone.", "f") == source
    assert extract_program(f"So:\n```python\n{source}print(f(1))\n```\n") == f"{source}print(f(1))\n"
    assert extract_code(f"{source[9:]}```\nDone.", "f", prefill="```python\ndef f(x):") == source
    assert extract_code(source, "f") == source


IN_STRINGS = [
    'def f(x):\n  """Return x.\n  ```\n  f(1)\n  ```\n  """\n  return x\n',
    'def f(x):\n   """Return x.\n   ```python\n   f(1)\n   ```\n   """\n   return x\n',
    "def f(x):\n    s = '''\n```\ncode\n```\n'''\n    return s\n",
    'def f(x):\n    return """\n```\n"""\n',
    'def f(x):\n    """\n~~~\n"""\n    a = """\n```\n```\n"""\n    return a\n',
    "def f(x):\n    # As in ```\n    return x\n",
    'def f(x):\n    """Return x, e.g. ```python\n    f(1)\n    ```"""\n    return x\n',
]


@pytest.mark.parametrize("source", IN_STRINGS)
@pytest.mark.parametrize(
    "text", ["```python\n{}```", "So:\n```python\n{}```\nDone.", "```\n{}```\n", "~~~python\n{}~~~\n", "{}"]
)
def test_a_fence_in_a_string_closes_no_block(source: str, text: str) -> None:
    assert extract_code(text.format(source), "f") == source
    assert extract_module(text.format(source), "f") == source
    assert (extract_program(text.format(source)) or "").strip() == source.strip()


@pytest.mark.parametrize("text", ["```python\n{}", "{}```\n", "{}```\nThat is it.", "~~~\n{}"])
@pytest.mark.parametrize("source", IN_STRINGS)
def test_a_fence_in_a_string_closes_no_block_that_lacks_a_fence(source: str, text: str) -> None:
    assert extract_code(text.format(source), "f") == source
    assert (extract_module(text.format(source), "f") or "").strip() == source.strip()
    assert (extract_program(text.format(source)) or "").strip() == source.strip()


@pytest.mark.parametrize(
    "text",
    ["````markdown\n```python\n{}```\n````\n", "````\n~~~py\n{}~~~\n````", "```md\n# Code\n~~~python\n{}~~~\n```\n",
     "Answer:\n\n    {}", "Answer:\n\n\t{}", "Answer:\n\n    ```python\n    {}    ```\nDone.",
     "Answer:\n\n        ~~~python\n        {}        ~~~\n"],
)  # fmt: skip
def test_code_is_found_in_nested_and_in_indented_blocks(text: str) -> None:
    source, indent = "import math\n\ndef f(x):\n    return 1\n", text[: text.index("{}")].rpartition("\n")[2]
    text = text.format(source.replace("\n", f"\n{indent}").removesuffix(indent))

    assert (extract_code(text, "f") or "").endswith("def f(x):\n    return 1\n")
    assert (extract_module(text, "f") or "").endswith("def f(x):\n    return 1\n")
    assert (extract_program(text) or "").strip() == source.strip()


@pytest.mark.parametrize(
    ("info", "is_python"),
    [("python", True), ("Python3", True), ("{.python}", True), ("python:main.py", True), ('py title="x"', True),
     ("python, runnable", True), ("{.cpp}", False), ("pythonic", False), ("c++", False), ("py3", True),
     ("python-3", True), ("pypy3", True), ("main.py", True), ("file: src/main.py", True), ("main.cpp", False),
     ("language-python", True), ("{code-cell} python", True), ("text", True), ("code", True)],
)  # fmt: skip
def test_the_language_of_a_block_is_read_in_many_forms(info: str, is_python: bool) -> None:
    assert (extract_code(f"```{info}\ndef f(x): 1\n```", "f") is not None) == is_python


@pytest.mark.parametrize("text", ["{}    ```\nThat's it.", "{}  ```", "<answer>\n```python\n{}```\n</answer>",
                                  "> ```python\n> def f(x):\n>     return 1\n> ```",
                                  "<answer>\nHere it is:\n{}\nIt adds.\n</answer>"])  # fmt: skip
def test_a_function_is_found_in_blocks_of_many_forms(text: str) -> None:
    source = "def f(x):\n    return 1\n"
    text = text.format(source) if text[0] in "<>" else f"```python\n{text.format(source)}"

    assert extract_code(text, "f") == extract_module(text, "f") == source


@pytest.mark.parametrize(
    "text",
    ["```python\n{}```", "Here: ```python\n{}\n```", "<answer>```python\n{}\n```</answer>", "\ufeff```\n{}\n```",
     "<answer>\n{}\n</answer>", "So:\n<pre><code class='language-python'>{}\n</code></pre>\nDone.",
     "[PYTHON]\n{}\n[/PYTHON]", "```python\n```python\n{}\n```\n```", "```\n{}\n```\nOutput:\n```\n42, a\n```",
     "Here it is.\n\n{}\n\nThis prints 42.", "<pre>\n{}\n</pre>", "So:\n```\nPython\n{}\n```\nDone."],
)  # fmt: skip
def test_a_program_is_found_where_no_fence_of_commonmark_is(text: str) -> None:
    source = "def f(x):\n    return x &lt; 7" if "<code" in text else "def f(x):\n    return x < 7"
    text, source = text.format(f"{source}\nprint(f(6))"), "def f(x):\n    return x < 7\n"

    assert (extract_program(text) or "").strip() == f"{source}print(f(6))"
    assert extract_code(text, "f") == source or "Output" in text
    assert (extract_module(text, "f") or "").startswith(source)


def test_a_session_has_the_code_of_its_prompts() -> None:
    assert (
        extract_code("```\n>>> def f(x):\n...     return 1\n...\n>>> f(2)\n1\n```", "f") == "def f(x):\n    return 1\n"
    )


@pytest.mark.parametrize("text", ["print(6 * 7)\n```", "print(6 * 7)\n```\nDone.", "print(6 * 7)\n~~~\n\nIt prints.\n",
                                  "Solution\n```\nprint(6 * 7)", "Code:\n```\nprint(6 * 7)\n```",
                                  "Here it is:\nprint(6 * 7)\n```", "Sure. It's short.\n\nprint(6 * 7)\n~~~\nDone.",
                                  "print(6 * 7)\n```\nOutput:\n```\n42\n```"])  # fmt: skip
def test_a_program_may_lack_the_fence_that_opens_or_closes_it(text: str) -> None:
    assert (extract_program(text) or "").strip() == "print(6 * 7)"


@pytest.mark.parametrize("text", ["{}\n```", "{}\n```\nDone.", "Here:\n```\n{}", "```cpp\n{}\n```",
                                  "```cpp17\n{}```", "```src/main.cpp\n{}\n```", "```text\n{}\n```",
                                  "```\n{}\n```\nOutput:\n```\n42\n```"])  # fmt: skip
def test_a_program_of_another_language_is_found_in_many_forms(text: str) -> None:
    source = "int main() { return 0; }"

    assert marked_block(text.format(source), frozenset({"cpp"})).strip() == source


DRAFT = "```python\ndef f(x):\n    return 1\n```\n"


@pytest.mark.parametrize("text", [
    "<think>{}", "<think>\n{}I don't know.", "Well.\n<think>{}", "{}</think>I can't.", "<think>{}</think>\nI can't.",
    "<think>a</think><think>{}", "<think>{}`</think>` is a tag", "<thinking>{}</thinking>No.",
    "<think><think></think>{}</think>No.", "<thought>{}", "<reasoning>{}</reasoning>No.", "[THINK]{}",
    "[THINK]{}[/THINK]No.",
    "<seed:think>{}</seed:think>No.",
])  # fmt: skip
def test_a_draft_in_a_thought_is_no_answer(text: str) -> None:
    text = text.format(DRAFT)

    assert extract_code(text, "f") is None
    assert extract_module(text, "f") is None
    assert "def f" not in (extract_program(text) or "")
    assert "def f" not in marked_block(text, frozenset({"cpp"}))


TAGS = [
    "<THINK> </THINK>", "<thoughts> </thoughts>", "<scratchpad> </scratchpad>", "<reflection> </reflection>",
    "<analysis> </analysis>", "<antThinking> </antThinking>", "<longcat_think> </longcat_think>",
    "<mm:think> </mm:think>", "<ifm|think> </ifm|think>", "<think_fast> </think_fast>", "<think:v2> </think:v2>",
    "<|think|> <|/think|>", "<|begin_of_thought|> <|end_of_thought|>", "<|START_THINKING|> <|END_THINKING|>",
    "<think_start> <think_end>", "<start_working_out> <end_working_out>", "<|inner_prefix|> <|inner_suffix|>",
    "<unused94> <unused95>", "<|content_thinking|> <|content_text|>", "<|channel>thought <channel|>",
    "<|open|>think<|sep|> <|close|>think<|sep|>", "<|channel|>analysis<|message|> <|end|><|start|>assistant",
    "◁think▷ ◁/think▷", "[think] [/think]", "[THINKING] [/THINKING]",
]  # fmt: skip


@pytest.mark.parametrize("tags", TAGS)
def test_a_draft_in_a_thought_of_any_models_tag_is_no_answer(tags: str) -> None:
    begin, end = tags.split(" ")
    within = f"<reasoning>\n{begin}hm{end}\n{DRAFT}"  # the end of the inner thought does not end the outer one

    for text in (f"{begin}{DRAFT}", f"{begin}{DRAFT}{end}No.", f"Well.\n{begin}{DRAFT}", f"{DRAFT}{end}No.", within):
        assert extract_code(text, "f") is None
    assert answer_of(spoken(DRAFT, f"<|assistant|>\n{begin}\n")) == ""
    assert parted(f"{begin}\nhm\n{end}\n{DRAFT}")[0] == "hm"
    for text in (f"{begin}hm{end}\n{DRAFT}", f"{DRAFT}\n{begin}hm", spoken(f"hm{end}\n{DRAFT}", f"go{begin}")):
        assert extract_code(text, "f") == "def f(x):\n    return 1\n"


@pytest.mark.parametrize("code", [
    "std::vector<Thought> a; auto b = map<reason>(a);", "let a: Vec<Reasoning> = Vec::<Thought>::new();",
    "a[think] < b", "a = [[THOUGHTS, think]]", "if a < thinking > b: pass",
    "print('<analysis>', '</analysis>')", "d[THINKING] = 1",
])  # fmt: skip
def test_code_with_types_and_indices_of_such_names_has_no_thoughts(code: str) -> None:
    assert answer_of(code) == code


@pytest.mark.parametrize("text", [
    "{}", "{}</think", "{}</thinks>", "{}'</think>'", '{}(.*)</think>"', "<think>{}", "{}<think>", "{}</THINK>",
    "{}</think >",
])  # fmt: skip
@pytest.mark.parametrize("prompt", ["<|assistant|>\n<think>\n", "<thinking>"])
def test_a_draft_in_a_thought_that_the_prompt_opened_is_no_answer(text: str, prompt: str) -> None:
    assert answer_of(spoken(text.format(DRAFT), prompt)) == ""


def test_a_thought_that_the_prompt_closes_is_over() -> None:
    assert (
        answer_of(spoken(DRAFT, "<think>\n\n</think>\n\n"))
        == answer_of(spoken(f"hm</think>{DRAFT}", "<think>"))
        == DRAFT
    )


@pytest.mark.parametrize(
    "text",
    [
        "<think>hm</think>{}",
        "[THINK]hm[/THINK]{}",
        "hm</think>\n{}",
        "{}\n<think>Is it right?",
        "{}It has no `<think>`.",
    ],
)
def test_code_after_the_thoughts_is_the_answer(text: str) -> None:
    assert extract_code(text.format(DRAFT), "f") == "def f(x):\n    return 1\n"


def test_tags_in_strings_of_the_code_are_no_thoughts() -> None:
    source = "def f(x):\n    return re.sub(r'<think>(.*?)</think>', '', x.split(\"</think>\")[-1])\n"

    assert extract_code(f"```python\n{source}```", "f") == source


@pytest.fixture(name="many_switches")
def _many_switches() -> Iterator[None]:
    """Let threads switch within a parse, too: the collector runs often, and runs Python code each time."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()

    def on_collection(phase: str, info: dict[str, int]) -> None: ...

    gc.freeze()  # what is there already need not be looked at each time
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(on_collection)
    yield
    gc.callbacks.remove(on_collection)
    gc.set_threshold(*threshold)
    gc.unfreeze()
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_a_completion_is_read_while_another_thread_formats_errors() -> None:
    # Formatting an error parses the line that raised it, with `ast.parse` itself.
    is_over = threading.Event()

    def format_errors() -> int:
        num_formatted = 0
        while not is_over.is_set():
            try:
                _ = (1 + None) * 3  # type: ignore[operator]
            except TypeError:
                num_formatted += "^" in traceback.format_exc()
        return num_formatted

    source = "def f(x):\n" + "    y = [x, (x + 1) * (x - 1), {'a': [x]}]\n" * 400
    with ThreadPoolExecutor(1) as other:
        formatted = other.submit(format_errors)
        try:
            assert all(parse(source) is not None for _ in range(30))
        finally:
            is_over.set()
        assert formatted.result() > 0
