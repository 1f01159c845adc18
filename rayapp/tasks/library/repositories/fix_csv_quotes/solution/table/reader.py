def parse_line(line):
    """The fields of one line of CSV."""
    fields, field, is_quoted, at = [], "", False, 0
    line = line.rstrip("\n")
    while at < len(line):
        letter = line[at]
        if is_quoted and line[at : at + 2] == '""':
            field += '"'
            at += 1
        elif letter == '"':
            is_quoted = not is_quoted
        elif letter == "," and not is_quoted:
            fields.append(field)
            field = ""
        else:
            field += letter
        at += 1
    return [*fields, field]


def parse(text):
    """A list of dicts: the first line names the fields."""
    names, *rows = [parse_line(line) for line in text.splitlines()]
    return [dict(zip(names, row)) for row in rows]
