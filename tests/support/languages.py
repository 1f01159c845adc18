"""Programs that add two numbers, by language."""

from __future__ import annotations

import shutil

import pytest

from rayapp.tasks.code.languages import Language, language_of

SUM = {
    "cpp": "#include <concepts>\n#include <iostream>\nint main() { long long a, b; std::cin >> a >> b; "
    "std::integral auto sum = a + b; std::cout << sum << '\\n'; }",
    "c": '#include <stdio.h>\nint main(void) { long long a, b; scanf("%lld%lld", &a, &b); printf("%lld\\n", a + b); }',
    "java": "package of.mine;\nimport java.util.*;\npublic class Sum { public static void main(String[] given) { "
    "Scanner in = new Scanner(System.in); System.out.println(in.nextLong() + in.nextLong()); } }",
    "go": 'package main\nimport "fmt"\nfunc main() { var a, b int64; fmt.Scan(&a, &b); fmt.Println(a + b) }',
    "rust": "use std::io::*;\nfn main() { let mut text = String::new(); stdin().read_to_string(&mut text).unwrap();\n"
    "let all: Vec<i64> = text.split_whitespace().map(|word| word.parse().unwrap()).collect();\n"
    'println!("{}", all[0] + all[1]); }',
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(/\\s+/).map(Number); console.log(a + b)",
    "bash": "read a b; echo $((a + b))",
    "perl": "my ($a, $b) = split / /, <STDIN>; print $a + $b, qq(\\n);",
}


def installed(key: str) -> Language:
    """Return a language; skip the test where its compiler or interpreter is missing."""
    language = language_of(key)
    assert language is not None
    program = language.compile_command("")[3]
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"no {program} in /usr/bin")
    return language
