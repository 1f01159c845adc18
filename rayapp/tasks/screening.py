"""Screens a completion before its code runs: where the code is, whether it parses, what it names.

Called by coding tasks through the text process, so it imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayapp.tasks.banned import find_banned
from rayapp.tasks.extraction import extract_code, extract_program, syntax_problem


def screen(completion: str, func_name: str, prefill: str, banned_patterns: Sequence[str]) -> tuple[str, str, str]:
    """Code, status and detail; the status is empty where the code may run, else it is the verdict's.

    Args:
        func_name: empty: the answer is a whole program.
    """
    code = extract_code(completion, func_name, prefill=prefill) if func_name else extract_program(completion)
    if code is None:
        return "", "no_code", f"no `def {func_name}` in the completion" if func_name else "the completion is empty"
    if problem := syntax_problem(code):
        return code, "syntax_error", f"the code does not parse: {problem}"
    banned = find_banned(code, banned_patterns)
    if banned is not None:
        return code, "banned", f"uses {banned.strip()}"
    return code, "", ""
