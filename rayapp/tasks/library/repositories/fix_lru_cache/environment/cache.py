class Cache:
    """Keeps the values of the last `size` keys that were used."""

    def __init__(self, size):
        self.size = size
        self._values = {}

    def get(self, key, default=None):
        return self._values.get(key, default)

    def put(self, key, value):
        self._values[key] = value
        if len(self._values) > self.size:
            del self._values[next(iter(self._values))]

    def keys(self):
        """From the one used longest ago to the last."""
        return list(self._values)
