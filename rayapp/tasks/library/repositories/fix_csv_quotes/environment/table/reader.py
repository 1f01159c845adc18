def parse_line(line):
    """The fields of one line of CSV."""
    return [field.strip('"') for field in line.rstrip("\n").split(",")]


def parse(text):
    """A list of dicts: the first line names the fields."""
    names, *rows = [parse_line(line) for line in text.splitlines()]
    return [dict(zip(names, row)) for row in rows]
