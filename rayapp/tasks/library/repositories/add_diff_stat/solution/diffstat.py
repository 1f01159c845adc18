import re

HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def diffstat(text):
    stats, old_path, path, old, new = {}, "", "", 0, 0
    for line in text.splitlines():
        if old > 0 or new > 0:
            added, removed = stats[path]
            if line.startswith("+"):
                new -= 1
                stats[path] = added + 1, removed
            elif line.startswith("-"):
                old -= 1
                stats[path] = added, removed + 1
            elif not line.startswith("\\"):
                old, new = old - 1, new - 1
        elif line.startswith("--- "):
            old_path = line[4:].removeprefix("a/")
        elif line.startswith("+++ "):
            path = old_path if line[4:] == "/dev/null" else line[4:].removeprefix("b/")
            stats.setdefault(path, (0, 0))
        elif found := HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in found.groups())
    return stats
