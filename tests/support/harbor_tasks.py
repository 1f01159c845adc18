"""Five task folders in Harbor's public layout, each on an image of a registry, and the Debian image below them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = "python3,python3-pytest,git"
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
    """Write the five task folders, each on this image."""
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
