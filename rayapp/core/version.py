"""The version of this program: pyproject.toml and `rayapp --version` read it here."""

__version__ = "0.1.0"
