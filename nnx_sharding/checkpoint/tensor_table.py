"""Rules as text, to read, save, edit and load, and a table of what they do.

The text is a dict of Python, with the calls of ``Tensor`` and ``slice`` that are known here. It is
parsed, never run.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..analysis.json_codec import file_path
from ..analysis.tables import Pictured, table
from ..core.publishing import write_file
from ..errors import CheckpointError
from .tensor_rules import Rule, Tensor, read_rules


class Match(NamedTuple):
    """Where the tensors of one template go: a row of the table."""

    tensor: str  # a name with {} for each number
    path: str  # of arrays, where {0} is the first number; empty for tensors to ignore
    shape: tuple[int, ...]
    array_shape: tuple[int, ...]
    note: str


class MatchTable(tuple[Match, ...], Pictured):
    """What goes where, which ``print`` and notebooks show as a table."""

    def _pictures(self, width: int) -> Iterable[Any]:
        rows = [
            (x.tensor, str(x.shape), x.path or "ignored", str(x.array_shape or ""), x.note)
            for x in self
        ]
        yield table(("tensor", "shape", "array", "shape", "how"), rows)


class TensorRules(dict[str, Rule]):
    """Rules that :func:`match_tensors` inferred: a dict to use, change, print, save and load.

    Attributes:
      table: a row for each kind of tensor, with ``tensor``, ``path``, ``shape``, ``array_shape``
        and a ``note`` on how one becomes the other. It is empty for rules from a file.
    """

    table: MatchTable

    def __init__(self, rules: Mapping[str, Rule], matches: Iterable[Match] = ()):
        super().__init__(rules)
        self.table = MatchTable(matches)

    def __repr__(self) -> str:
        notes: dict[str, str] = {}
        for match in self.table:
            if match.note:
                before = f"{notes[match.tensor]}; " if match.tensor in notes else ""
                notes[match.tensor] = before + match.note
        lines = ["{"]
        last = ""
        for pattern, rule in self.items():
            # The templates of rules for some of the layers only differ in their groups.
            note = notes.get(re.sub(r"\\(.)", r"\1", re.sub(r"\([^()]*\)", "{}", pattern)), "")
            if note and note != last:
                lines.append(f"    # {note}")
            last = note
            lines.append(f"    {_raw(pattern)}: {_text(rule)},")
        return "\n".join([*lines, "}"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rules to a file, as ``print`` shows them.

        Args:
          path: the file, which is replaced.
        """
        write_file(file_path(path), f"{self!r}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TensorRules:
        """Reads rules that were saved, and maybe edited. Nothing in the file is run.

        Args:
          path: the file.

        Raises:
          FileNotFoundError: there is no such file.
          CheckpointError: it has something else than rules; the message has the line.
        """
        text = file_path(path).read_text(encoding="utf-8")
        try:
            rules = _value(ast.parse(text, mode="eval").body)
        except (SyntaxError, TypeError, ValueError) as error:
            raise CheckpointError(f"TensorRules.load: {path} has no rules: {error}") from error
        if not isinstance(rules, dict):
            raise CheckpointError(f"TensorRules.load: {path} has no rules, but {rules!r}")
        read_rules("TensorRules.load", rules)  # raises an error for all that cannot be understood
        return cls(rules)


def loaded_rules(rules: Mapping[str, Rule] | str | os.PathLike[str]) -> Mapping[str, Rule]:
    """Returns rules, from a file if they are the path of one."""
    return TensorRules.load(rules) if isinstance(rules, str | os.PathLike) else rules


def _text(rule: Rule) -> str:
    """Returns the text of a rule, in double quotes."""
    if rule is None:
        return "None"
    if isinstance(rule, str):
        return _quoted(rule)
    if not isinstance(rule, Tensor):
        return f"[{', '.join(map(_text, rule))}]"
    words = [_quoted(rule.path)]
    if rule.dimensions is not None:
        words.append(_quoted(rule.dimensions))
    for name, parts in (("take", rule.take), ("put", rule.put)):
        inner = (f"{_quoted(axis)}: {_part(part)}" for axis, part in parts.items())
        words += [f"{name}={{{', '.join(inner)}}}"] if parts else []
    words += [f"{axis}={size}" for axis, size in rule.sizes.items()]
    return f"Tensor({', '.join(words)})"


def _part(part: slice | int) -> str:
    return f"slice({part.start}, {part.stop})" if isinstance(part, slice) else str(part)


def _quoted(text: str) -> str:
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & {*text} else repr(text)


def _raw(pattern: str) -> str:
    """Returns a pattern as raw text, if it has no quotes."""
    return f'r"{pattern}"' if pattern.isprintable() and '"' not in pattern else repr(pattern)


_CALLS = {"Tensor": Tensor, "slice": slice}


def _value(node: ast.expr) -> Any:
    """Returns what an expression of constants, lists, dicts and the known calls is."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k}
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _CALLS:
            named = {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg}
            return _CALLS[name](*map(_value, args), **named)
    raise ValueError(f"line {node.lineno}: {ast.unparse(node)}")
