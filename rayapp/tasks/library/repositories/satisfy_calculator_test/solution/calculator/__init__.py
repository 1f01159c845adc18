import re

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/^()]))")


def evaluate(text):
    """The value of a term with + - * / ^ and parentheses."""
    tokens = _tokens(text)
    value = _sum(tokens)
    if tokens:
        raise ValueError(f"nothing may follow here: {tokens[0]}")
    return value


def _tokens(text):
    tokens, at, text = [], 0, text.rstrip()
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"unknown: {text[at:]!r}")
        number, sign = found.groups()
        tokens.append(sign or (float(number) if "." in number else int(number)))
        at = found.end()
    return tokens


def _sum(tokens):
    value = _product(tokens)
    while tokens and tokens[0] in ("+", "-"):
        value = value + _product(tokens) if tokens.pop(0) == "+" else value - _product(tokens)
    return value


def _product(tokens):
    value = _signed(tokens)
    while tokens and tokens[0] in ("*", "/"):
        value = value * _signed(tokens) if tokens.pop(0) == "*" else value / _signed(tokens)
    return value


def _signed(tokens):
    if tokens and tokens[0] in ("+", "-"):
        return _signed(tokens) if tokens.pop(0) == "+" else -_signed(tokens)
    return _power(tokens)


def _power(tokens):
    value = _atom(tokens)
    if tokens and tokens[0] == "^":
        tokens.pop(0)
        return value ** _signed(tokens)
    return value


def _atom(tokens):
    if not tokens:
        raise ValueError("something is missing at the end")
    token = tokens.pop(0)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
        return value
    if isinstance(token, str):
        raise ValueError(f"a number was expected, not {token}")
    return token
