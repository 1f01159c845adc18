"""Ten small task folders in Harbor's public layout, each on an image of a registry, and the Debian image below them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = "python3,python3-pytest,gcc,libc6-dev,make,git,gawk"
_PYTEST = """#!/bin/bash
python3 -m pytest -p no:cacheprovider -rA /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
_TOML = """version = "1.0"

[metadata]
author_name = "rayapp"
difficulty = "easy"
category = "software-engineering"
tags = ["{tag}"]

[verifier]
timeout_sec = 60.0
{verifier}
[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 256
{environment}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """Parts of a task folder."""

    instruction: str
    solve: str
    """Commands of solve.sh."""
    outputs: str = ""
    """Tests for pytest; empty if `test_sh` needs none."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The folder `environment`."""
    dockerfile: str = "WORKDIR /app\nCOPY . /app\n"
    """Lines after FROM; empty: task.toml names the image."""
    test_sh: str = _PYTEST
    verifier: str = ""
    """Further lines of task.toml's section `verifier`."""


TASKS = {
    "fix-median": HarborTask(
        instruction="`median` in stats.py is wrong for lists of even length. Mend it.",
        files={"stats.py": "def median(xs):\n    return sorted(xs)[len(xs) // 2]\n"},
        outputs="import sys\n\nsys.path.insert(0, '/app')\nfrom stats import median\n\n\n"
        "def test_even():\n    assert median([4, 1, 3, 2]) == 2.5\n\n\n"
        "def test_odd():\n    assert median([9, 2, 7]) == 7\n",
        solve="cat > stats.py <<'END'\nimport statistics\n\n\ndef median(xs):\n    return statistics.median(xs)\nEND",
    ),
    "log-summary": HarborTask(
        instruction="Count the requests of each status in access.log; write the counts to summary.json.",
        files={"access.log": "a GET / 200\nb GET /x 404\nc GET / 200\nd PUT /y 500\ne GET /z 404\nf GET / 200\n"},
        outputs="import json\n\n\ndef test_counts():\n    found = json.load(open('/app/summary.json'))\n"
        "    assert found == {'200': 3, '404': 2, '500': 1}\n",
        solve="python3 -c \"import collections, json; lines = open('access.log').read().split('\\n')[:-1];"
        " json.dump(collections.Counter(line.split()[-1] for line in lines), open('summary.json', 'w'))\"",
    ),
    "c-primes": HarborTask(
        instruction="Write /app/primes.c: a program that prints the primes up to its argument, one on each line.",
        outputs="import subprocess\n\n\ndef primes(number):\n"
        "    subprocess.run(['gcc', '-O1', '-o', '/tmp/primes', '/app/primes.c'], check=True)\n"
        "    ran = subprocess.run(['/tmp/primes', str(number)], capture_output=True, text=True, check=True)\n"
        "    return [int(word) for word in ran.stdout.split()]\n\n\n"
        "def test_few():\n    assert primes(20) == [2, 3, 5, 7, 11, 13, 17, 19]\n\n\n"
        "def test_many():\n    assert len(primes(10000)) == 1229\n",
        solve="cat > primes.c <<'END'\n#include <stdio.h>\n#include <stdlib.h>\nint main(int n, char **v) {\n"
        "  for (int p = 2; p <= atoi(v[1]); p++) {\n    int d = 2;\n    while (d * d <= p && p % d) d++;\n"
        '    if (d * d > p) printf("%d\\n", p);\n  }\n}\nEND',
    ),
    "mend-makefile": HarborTask(
        instruction="`make` in /srv/hello fails. Mend the Makefile, so that it builds `hello`.",
        files={
            "Makefile": "hello: hello.o greet.o\n\tcc -o hello hello.o\n",
            "hello.c": "void greet(void);\nint main(void) { greet(); return 0; }\n",
            "greet.c": '#include <stdio.h>\nvoid greet(void) { puts("hello, world"); }\n',
        },
        dockerfile="WORKDIR /srv/hello\nCOPY . .\n",
        outputs="import subprocess\n\n\ndef test_hello():\n"
        "    subprocess.run(['make', '-C', '/srv/hello', 'hello'], check=True)\n"
        "    assert subprocess.check_output(['/srv/hello/hello'], text=True) == 'hello, world\\n'\n",
        solve="sed -i 's/-o hello hello.o/-o hello hello.o greet.o/' Makefile",
    ),
    "sqlite-totals": HarborTask(
        instruction="Load orders.csv into SQLite and write the sum of each customer to totals.csv, largest first.",
        files={"orders.csv": "ann,3\nbob,5\nann,9\ncid,1\nbob,1\n"},
        outputs="def test_totals():\n    lines = open('/app/totals.csv').read().split()\n"
        "    assert lines == ['ann,12', 'bob,6', 'cid,1']\n",
        solve="python3 - <<'END'\nimport csv, sqlite3\nbase = sqlite3.connect('/tmp/orders.db')\n"
        "base.execute('create table orders (name, price integer)')\n"
        "base.executemany('insert into orders values (?, ?)', csv.reader(open('orders.csv')))\n"
        "asked = 'select name, sum(price) from orders group by name order by 2 desc'\n"
        "open('totals.csv', 'w').writelines(f'{name},{total}\\n' for name, total in base.execute(asked))\nEND",
    ),
    "word-count": HarborTask(
        instruction="Write an executable /app/count.sh that prints the number of different words of standard input.",
        dockerfile="ENV LC_ALL=C.UTF-8 LIMIT=2\nWORKDIR /app\n",
        outputs="import os, subprocess\n\n\ndef count(text):\n"
        "    ran = subprocess.run(['/app/count.sh'], input=text, capture_output=True, text=True, check=True)\n"
        "    return int(ran.stdout)\n\n\ndef test_words():\n    assert count('to be or not to be') == 4\n\n\n"
        "def test_nothing():\n    assert count('') == 0\n\n\n"
        "def test_environment():\n    assert (os.environ['LIMIT'], os.environ['GRADE']) == ('2', 'strict')\n",
        solve='printf \'#!/bin/bash\\ntr -s "[:space:]" "\\\\n" | grep . | sort -u | wc -l\\n\' > count.sh',
        verifier='env = { GRADE = "strict" }\n',
    ),
    "git-recover": HarborTask(
        instruction="notes.txt was deleted in an earlier commit of this repository. Bring it back.",
        dockerfile="WORKDIR /app\nCOPY . .\nRUN git init -q . && git config user.name a && git config user.email a@b"
        " && echo 'the key lies below the third stone' > notes.txt && git add -A && git commit -qm one"
        " && git rm -q notes.txt && git commit -qm two\n",
        files={"readme.txt": "notes\n"},
        test_sh="#!/bin/bash\nif echo 'the key lies below the third stone' | diff - notes.txt; then reward=1; "
        "else reward=0; fi\necho $reward > /logs/verifier/reward.txt\n",
        solve='git checkout "$(git log --diff-filter=D --format=%h -1 -- notes.txt)~1" -- notes.txt',
    ),
    "settings-share": HarborTask(
        instruction="In settings.ini set port to 8080 and debug to off.",
        files={"settings.ini": "[server]\nport = 80\ndebug = on\nname = me\n"},
        test_sh="#!/bin/sh\nexec python3 /tests/grade.py\n",
        outputs="",
        solve="sed -i -e 's/= 80$/= 8080/' -e 's/= on/= off/' settings.ini",
    ),
    "unittest-stack": HarborTask(
        instruction="Write /work/stack.py with a class Stack: push, pop (IndexError if it is empty) and len().",
        dockerfile="",
        test_sh="#!/bin/bash\nreward=0\n"
        "PYTHONPATH=/work python3 -m unittest discover -v -s /tests && reward=1\n"
        "echo $reward > /logs/verifier/reward.txt\n",
        solve="printf 'class Stack:\\n    def __init__(self):\\n        self._items = []\\n"
        "    def push(self, item):\\n        self._items.append(item)\\n"
        "    def pop(self):\\n        return self._items.pop()\\n"
        "    def __len__(self):\\n        return len(self._items)\\n' > stack.py",
    ),
    "awk-report": HarborTask(
        instruction="Write /app/report.awk that prints the mean of the second column with two decimals.",
        files={"data.txt": "a 1\nb 2\nc 4\n"},
        dockerfile='LABEL kind="awk"\nWORKDIR /app\nCOPY . .\nCMD ["sleep", "infinity"]\n',
        test_sh="#!/bin/bash\nset -o pipefail\nreward=0\n"
        '[ "$(gawk -f report.awk data.txt)" = 2.33 ] && [ "$(printf \'x 5\\n\' | gawk -f report.awk)" = 5.00 ] '
        "&& reward=1\necho $reward > /logs/verifier/reward.txt\n",
        solve="echo '{ sum += $2 } END { printf \"%.2f\\n\", sum / NR }' > report.awk",
    ),
}
_FURTHER = {
    "settings-share": {
        "grade.py": "import configparser, json\n\nread = configparser.ConfigParser()\nread.read('settings.ini')\n"
        "found = [read['server']['port'] == '8080' and read['server']['name'] == 'me', "
        "not read.getboolean('server', 'debug')]\n"
        "json.dump({'reward': sum(found) / 2}, open('/logs/verifier/reward.json', 'w'))\n",
    },
    "unittest-stack": {
        "test_stack.py": "import unittest\n\nfrom stack import Stack\n\n\nclass Tests(unittest.TestCase):\n"
        "    def test_order(self):\n        stack = Stack()\n        stack.push(1)\n        stack.push(2)\n"
        "        self.assertEqual((len(stack), stack.pop(), stack.pop()), (2, 2, 1))\n\n"
        "    def test_empty(self):\n        self.assertRaises(IndexError, Stack().pop)\n",
    },
}
"""Task -> further files of its folder `tests`."""


def write_harbor_tasks(folder: Path, image: str) -> None:
    """Write the ten task folders, each on this image."""
    for name, task in TASKS.items():
        toml = _TOML.format(
            tag=name,
            verifier=task.verifier,
            environment="" if task.dockerfile else f'docker_image = "{image}"\nworkdir = "/work"\n',
        )
        files = {
            "instruction.md": task.instruction,
            "task.toml": toml,
            "solution/solve.sh": f"#!/bin/bash\nset -e\n{task.solve}\n",
            "tests/test.sh": task.test_sh,
            **({"tests/test_outputs.py": task.outputs} if task.outputs else {}),
            **{f"tests/{path}": text for path, text in _FURTHER.get(name, {}).items()},
            **{f"environment/{path}": text for path, text in task.files.items()},
            **({"environment/Dockerfile": f"FROM {image}\n{task.dockerfile}"} if task.dockerfile else {}),
        }
        (folder / name / "environment").mkdir(parents=True)
        for path, text in files.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)


def debian_image(work: Path, host: str) -> str:
    """Make an image of Debian with debootstrap and buildah, and push it to a registry; return its name there."""
    root, name = work / "debian", f"{host}/debian:12"
    # Packages that this machine's apt has downloaded are not downloaded again.
    cache = ["--cache-dir=/var/cache/apt/archives"] if Path("/var/cache/apt/archives").is_dir() else []
    _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", *cache, "bookworm", str(root))
    container = _run("buildah", "from", "scratch")
    try:
        _run("buildah", "add", "-q", container, str(root), "/")
        _run("buildah", "config", "--workingdir", "/work", "--env", "PATH=/usr/bin:/bin", container)
        _run("buildah", "commit", "-q", container, f"oci:{work}/oci:one")
        _run("skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{work}/oci:one", f"docker://{name}")
    finally:
        _run("buildah", "rm", container)
        shutil.rmtree(root, ignore_errors=True)
    return name


def _run(*argv: str) -> str:
    """Run a command; return the text that it prints, without its last line break."""
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=1200)
    assert ran.returncode == 0, f"{argv}: {ran.stdout[-500:]} {ran.stderr[-1000:]}"
    return ran.stdout.strip()
