"""The lowest layer. pyproject.toml and `rayapp --version` read the version of this program here."""

__version__ = "0.1.0"
