def waits(tries):
    """Seconds between the tries of a request."""
    return [5.0] * (tries - 1)
