import copy

DEFAULTS = {"server": {"host": "localhost", "port": 80, "paths": ["/"]}, "debug": False}


def merged(base, changes):
    """Settings with some of them overridden."""
    both = copy.deepcopy(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return both


def load(changes):
    return merged(DEFAULTS, changes)
