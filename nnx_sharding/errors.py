"""The errors and warnings of the library, next to those of JAX and Flax.

Each error is also of the type that ``jax.jit`` raises for the same mistake, so code may catch
either type.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


class NoMeshError(RuntimeError, ValueError):
    """A ``PartitionSpec`` has no mesh; a ``RuntimeError`` as from ``jax.jit``."""


class StrictError(ValueError):
    """Raised with ``strict=True`` in place of a :class:`ShardingWarning`."""


class ActivationError(ValueError):
    """Activations cannot be sharded as declared or, on Explicit axes, JAX cannot infer how."""


class DonatedError(RuntimeError, ValueError):
    """An array was already donated, or is donated and passed twice; JAX raises either type."""


class RetraceError(RuntimeError):
    """A function would be traced more often than ``max_traces`` or ``limit_traces`` allows."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model, which is left unchanged."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist; a ``FileNotFoundError`` as from Orbax."""


class ExportError(ValueError):
    """A file has no program, is damaged, or does not fit this machine, release or function."""


class ShardingWarning(UserWarning):
    """Valid, but probably unintended. With ``strict=True`` it is a :class:`StrictError`."""


class UnusedFilterWarning(ShardingWarning):
    """A filter of a ``StateSharding`` applies to no Variable."""


class CapturedArrayWarning(ShardingWarning):
    """A function captures a sharded array, which loses its sharding."""


class WrongGradientWarning(ShardingWarning):
    """XLA may compute a gradient in a program wrong, by a known fault."""


class CorrectedSpecWarning(ShardingWarning):
    """Specs were corrected to fit shapes, for ``on_indivisible="replicate"`` or ``"drop"``."""


class UnshardedWarning(ShardingWarning):
    """A strategy has no effect: on small arrays, attention, other methods of pipelines, outputs."""


def see(error: E, anchor: str) -> E:
    """Returns the error, with a note on how to read its section of ``docs/errors.md``."""
    if anchor:
        error.anchor = anchor  # type: ignore[attr-defined]
        error.add_note(f"Run `nnx-sharding explain {anchor}` for causes and remedies.")
    return error


def warn_or_raise(
    category: type[ShardingWarning], message: str, *, strict: bool, anchor: str = ""
) -> None:
    """Warns, pointing at the user code that led here; with ``strict``, raises a StrictError."""
    if strict:
        raise see(StrictError(message), anchor)
    collected = _COLLECTED.get()
    definition = _DEFINITION.get()
    if collected is not None:
        collected.append((category, message))
    elif definition is not None and _is_called_by_command():
        warnings.warn_explicit(message, category, *definition)
    else:
        warnings.warn(message, category, stacklevel=_users_level())


# The file and line of the user's function for which a command runs; None outside of commands.
_DEFINITION: ContextVar[tuple[str, int] | None] = ContextVar("_DEFINITION", default=None)


@contextlib.contextmanager
def command_for(function: Any) -> Iterator[None]:
    """Lets warnings of the block point at a function, if no line of the user led to them.

    A command of ``nnx_sharding.cli`` compiles what the function has returned, so the user's code
    has returned when a warning is given.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    token = _DEFINITION.set(code and (code.co_filename, code.co_firstlineno))
    try:
        yield
    finally:
        _DEFINITION.reset(token)


def _is_called_by_command() -> bool:
    """Whether a command called this code, and no code of the user was called in between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_COMMANDS):
            return True
        frame = frame.f_back
    return False


# The list that gets the warnings of the current thread. Filters of `warnings` are not used, because
# all threads share them before Python 3.14.
_COLLECTED: ContextVar[list[tuple[type[ShardingWarning], str]] | None]
_COLLECTED = ContextVar("_COLLECTED", default=None)


@contextlib.contextmanager
def warnings_collected() -> Iterator[list[tuple[type[ShardingWarning], str]]]:
    """Yields a list that gets this thread's warnings of this library instead of the user."""
    collected: list[tuple[type[ShardingWarning], str]] = []
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


@contextlib.contextmanager
def each_warning_once() -> Iterator[None]:
    """Gives each warning of the block once, at its end, because some work traces a step many times.

    Warnings are given even if the block raises an error, because a warning may say why.
    """
    collected: list[tuple[type[ShardingWarning], str]] = []
    try:
        with warnings_collected() as collected:
            yield
    finally:
        for category, text in dict.fromkeys(collected):
            warn_or_raise(category, text, strict=False)


def shortened(items: Iterable[str], indent: str = "") -> list[str]:
    """Returns the first ten of some texts; if there are more, the last line says how many."""
    texts = [*items]
    if len(texts) <= 10:
        return texts
    return [*texts[:10], f"{indent}… {len(texts) - 10} more"]


MAX_LINES = 24  # the lines of a message, below which a note may follow
MAX_LISTED = 16  # the lines of a list in a message
MAX_WIDTH = 200  # the characters of a line, unless a path is longer


def message(head: str, items: Iterable[str], remedy: str = "") -> str:
    """Returns the text of an error: what is wrong, a line for each place, and what to do."""
    above, below = _sentences(head), _sentences(remedy)
    most = min(MAX_LISTED, max(1, MAX_LINES - len(above) - len(below)))
    return "\n".join([*above, *listed(items, most), *below])


def listed(items: Iterable[str], most: int = MAX_LISTED) -> list[str]:
    """Returns the lines of a list; too many are merged if they differ in numbers, then cut.

    Args:
      items: the texts, of one or more lines each.
      most: the greatest number of lines. Of twenty items of one line, the result has 15 and
        ``… and 5 more``.
    """
    texts = [*items]
    lines_by_item = [_wrapped(text) for text in texts]
    if sum(map(len, lines_by_item)) > most:
        lines_by_item = [_wrapped(text) for text in merged(texts)]
    lines = [*itertools.chain.from_iterable(lines_by_item)]
    if len(lines) <= most:
        return lines
    # Whole items are kept as long as they leave one line for "… more". If the first item alone is
    # too long, its first lines are kept.
    item_ends = itertools.accumulate(map(len, lines_by_item))  # the lines up to the end of an item
    fitting_ends = [end for end in item_ends if end < most]
    num_kept_lines = fitting_ends[-1] if fitting_ends else most - 1
    num_left_out = len(lines_by_item) - max(1, len(fitting_ends))
    indent = " " * (len(texts[0]) - len(texts[0].lstrip()))
    last_line = f"{indent}… and {num_left_out} more" if num_left_out else "…"
    return [*lines[:num_kept_lines], last_line]


def by_kind(kinds: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns an item of a message for each kind of problem: the kind, then a line for each place.

    All items together have at most ``MAX_LISTED`` lines. A kind without places has no item.
    """
    present = {kind: places for kind, places in kinds.items() if places}
    most_places = MAX_LISTED // max(len(present), 1) - 1  # each item also has a line for its kind
    return [
        "\n".join([f"{kind}:", *listed(places, most_places)]) for kind, places in present.items()
    ]


def merged(texts: Iterable[str]) -> list[str]:
    """Returns texts, in which the first stands for all that differ only in numbers in their paths.

    ``blocks[0].up: not divisible``, and the same for ``blocks[1].up`` and ``blocks[2].up``, become
    ``blocks[0].up: not divisible (and 2 more, to blocks[2].up)``.
    """
    # Texts are alike if they are equal once each number in their paths is 0.
    groups: dict[str, list[str]] = {}
    for text in texts:
        path = _path_in(text)
        details = text.removeprefix(path)
        key = re.sub(r"\d+", "0", path) + details
        groups.setdefault(key, []).append(text)
    result = []
    for first, *others in groups.values():
        line, *further_lines = first.split("\n")
        if others:
            last_path = _path_in(others[-1]).strip()
            line = f"{line} (and {len(others)} more, to {last_path})"
        result.append("\n".join([line, *further_lines]))
    return result


def _path_in(text: str) -> str:
    """Returns the path with which an item begins: the text before the first colon or comma.

    For ``"  model.up, shape (6,), P('a'): not divisible"`` this is ``"  model.up"``.
    """
    return re.split("[:,]", text, maxsplit=1)[0]


def _wrapped(text: str) -> list[str]:
    """Returns the lines of a text; a line that is too long becomes up to three lines."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= MAX_WIDTH:
            lines.append(line)
        else:
            indent = " " * (len(line) - len(line.lstrip()) + 4)  # four more than the line's own
            lines += _wrap(line, subsequent_indent=indent)
    return lines


_wrap = functools.partial(
    textwrap.wrap,
    width=MAX_WIDTH,
    break_long_words=False,
    break_on_hyphens=False,
    max_lines=3,
    placeholder=" …",
)


def _sentences(text: str) -> list[str]:
    """Returns the lines of a text: one line for each sentence if the text is long."""
    if len(text) > MAX_WIDTH:
        # A sentence ends with a dot behind a word or parenthesis, before a space and a capital.
        text = re.sub(r"(?<=[\w)]\.) (?=[A-Z])", "\n", text)
    return _wrapped(text) if text else []


def raise_if_any(
    error: type[Exception], head: str, items: Sequence[str], remedy: str = "", anchor: str = ""
) -> None:
    """Raises an error with a line for each thing that is wrong, if there is any."""
    __tracebackhide__ = True  # in the assertions of nnx_sharding.testing
    if listing := listed_error(error, head, items, remedy, anchor):
        raise listing


def listed_error(
    error: type[Exception], head: str, items: Sequence[str], remedy: str = "", anchor: str = ""
) -> Exception | None:
    """Returns the error with a line for each thing that is wrong, if there is any."""
    return see(error(message(head, items, remedy)), anchor) if items else None


def _users_level() -> int:
    """Returns the stack level of the nearest frame of user code.

    The level is that of ``warnings.warn`` in the caller of this function: 1 is the caller itself.
    """
    # `warnings.warn` has `skip_file_prefixes` for this, but only from Python 3.12 on.
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def users_line() -> str:
    """Returns the file and line of user code that led here, such as ``serve.py:24``."""
    frame = sys._getframe(_users_level() - 1)  # `sys._getframe` counts this function as 0
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# A library calls its own code through these modules of the standard library, for example at the end
# of a block, or for a `cached_property`.
_HELPERS = frozenset({contextlib.__file__, functools.__file__})


def _is_between(filename: str) -> bool:
    """Whether code of a file may run between the user's line and a warning."""
    return is_library(filename) or filename in _HELPERS


# `find_spec` finds packages that are not imported yet: a command imports this module before JAX.
_SPECS = map(importlib.util.find_spec, (__package__, "jax", "jaxlib", "flax"))
# Each folder ends with a slash, because `jaxtyping` would belong to `jax` otherwise.
_LIBRARIES = tuple(f"{Path(x.origin).parent}{os.sep}" for x in _SPECS if x and x.origin)
_COMMANDS = f"{Path(__file__).parent / 'cli'}{os.sep}"


def is_library(filename: str) -> bool:
    """Whether a file belongs to this package, JAX or Flax."""
    return filename.startswith(_LIBRARIES)


def moved_name(module: str, name: str, moved: Mapping[str, str]) -> Any:
    """Returns the attribute of a module that has moved, with a DeprecationWarning.

    A ``__getattr__`` of the old module calls this, so that programs for the last release still run.

    Args:
      module: the old module.
      name: the attribute.
      moved: the new modules, by the names of the moved attributes.

    Raises:
      AttributeError: the name is not in ``moved``.
    """
    if name not in moved:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = f"{moved[name]}.{name}"
    text = f"{module}.{name} is {new} now; the old name will be removed in release 0.5."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(moved[name]), name)
