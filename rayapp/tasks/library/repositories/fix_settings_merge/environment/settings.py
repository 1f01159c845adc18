DEFAULTS = {"server": {"host": "localhost", "port": 80, "paths": ["/"]}, "debug": False}


def merged(base, changes):
    """Settings with some of them overridden."""
    base.update(changes)
    return base


def load(changes):
    return merged(DEFAULTS, changes)
