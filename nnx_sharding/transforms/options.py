"""Checks of options that the transforms share, when a function is decorated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..lifting.prefixes import Specs


def check_options(name: str, **options: tuple[Any, Sequence[Any]]) -> None:
    """Every option is one of its values.

    Args:
      name: the name of the transform.
      options: for each option its value, and those that it can have.

    Raises:
      ValueError: one is not.
    """
    for option, (value, values) in options.items():
        if value not in values:
            choice = ", ".join(map(repr, values))
            raise ValueError(f"{name}: {option} is one of {choice}, not {value!r}.")


def check_specs(name: str, **options: Specs) -> None:
    """Everything in a prefix of specs is a spec.

    Args:
      name: the name of the transform.
      options: for each option its value.

    Raises:
      TypeError: something is not.
    """
    wrong = [f"  {option}{where}" for option, specs in options.items() for where in specs.invalid]
    if wrong:
        raise TypeError(
            f"{name}: what stands here is no spec:\n"
            + "\n".join(wrong)
            + "\nUse a PartitionSpec such as P('data', None), a Sharding, a StateSharding, or None."
        )
