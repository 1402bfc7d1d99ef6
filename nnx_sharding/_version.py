"""The version, in the one place from which setup.py and the documentation read it."""

__version__ = "0.1.0.dev0"
