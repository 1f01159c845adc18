from backoff import delays


def waits(tries):
    """Seconds between the tries of a request."""
    return delays(tries)
