"""The version, in the one place from which pyproject.toml and the documentation read it."""

__version__ = "0.3.0"
