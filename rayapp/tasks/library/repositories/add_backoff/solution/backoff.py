"""How long to wait between tries."""


def delays(tries, first=1.0, factor=2.0, longest=60.0):
    if tries < 1:
        raise ValueError(f"{tries} tries are none")
    return [min(longest, first * factor**number) for number in range(tries - 1)]
