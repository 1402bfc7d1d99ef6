"""Rules as text, to read, save, edit and load, and a table of their effects.

The text is a dict of Python, with calls of ``Tensor`` and ``slice``. The text is parsed, never run.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._publishing import write_file
from ..analysis.json_codec import file_path
from ..analysis.tables import Pictured, Table
from ..errors import CheckpointError
from ..specs.types import AnyArray
from .tensor_names import read_name
from .tensor_rules import Rule, Rules, Tensor, read_rules


class Match(NamedTuple):
    """A row of the table: the tensors of one template, and the arrays that they become."""

    tensor: str  # the names of the tensors, with {} for each number
    path: str  # the paths of the arrays, with {0} for the first number; empty: tensors are ignored
    shape: tuple[int, ...]  # the shape of the tensors
    array_shape: tuple[int, ...]
    note: str  # how a tensor becomes an array


GIVEN = "given"  # the note of rows for rules that the user gave


def matches_by_rules(
    rules: Rules,
    tensors: Mapping[str, AnyArray],
    arrays: Mapping[str, AnyArray],
    note: str,
) -> list[Match]:
    """Returns the rows for rules that are not inferred: one for each kind of tensor and its path.

    Args:
      rules: the rules; tensors without one get no row.
      tensors: the tensors, by name.
      arrays: all arrays of the model, by path.
      note: the note of the rows.
    """
    rows: dict[tuple[str, str, str | None], Match] = {}
    for name in sorted(tensors):
        template, shape = read_name(name)[0].text, tensors[name].shape
        targets = rules.targets(name)
        if targets == []:
            rows.setdefault((template, "", None), Match(template, "", shape, (), note))
        for target in targets or ():
            # Other groups than numbers have one text for all tensors of a template, such as "q".
            numbers = (f"{{{index}}}" for index in itertools.count())
            path = target.tensor.path.format(
                *(next(numbers) if text.isdecimal() else text for text in target.groups)
            )
            match = Match(template, path, shape, arrays[target.path].shape, note)
            rows.setdefault((template, path, target.tensor.dimensions), match)
    return [*rows.values()]


class MatchTable(tuple[Match, ...], Pictured):
    """All rows; ``print`` and notebooks show them as a table."""

    def _pictures(self, width: int) -> Iterable[Any]:
        rows = [
            (x.tensor, str(x.shape), x.path or "ignored", str(x.array_shape or ""), x.note)
            for x in self
        ]
        yield Table(("tensor", "shape", "array", "shape", "how"), rows)


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
        notes: dict[str, list[str]] = {}  # the notes of all rows, by the template of tensors
        for match in self.table:
            if match.note and match.note != GIVEN:
                notes.setdefault(match.tensor, []).append(match.note)
        lines = ["{"]
        last_note = ""
        for pattern, rule in self.items():
            note = "; ".join(notes.get(_template(pattern), []))
            if note and note != last_note:  # a note is written once for successive rules
                lines.append(f"    # {note}")
            last_note = note
            lines.append(f"    {rule_text(pattern, rule)},")
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
        read_rules("TensorRules.load", rules)  # raises an error unless all can be understood
        return cls(rules)


def loaded_rules(rules: Mapping[str, Rule] | str | os.PathLike[str]) -> Mapping[str, Rule]:
    """Returns the rules; if they are the path of a file, the rules in it."""
    return TensorRules.load(rules) if isinstance(rules, str | os.PathLike) else rules


def _template(pattern: str) -> str:
    r"""Returns the names that a pattern matches, with {} for each group.

    ``h\.(\d+)\.up`` and ``h\.3\.up``, the rule of one layer, both become ``h.{}.up``.
    """
    with_braces = re.sub(r"\([^()]*\)", "{}", pattern)  # h\.{}\.up
    template, _ = read_name(re.sub(r"\\(.)", r"\1", with_braces))  # backslashes are removed
    return template.text


def rule_text(pattern: str, rule: Rule) -> str:
    r"""Returns the text of a rule with its pattern, as in a dict: ``r"h\.up": "up/kernel"``."""
    return f"{_raw(pattern)}: {_text(rule)}"


def _text(rule: Rule) -> str:
    """Returns the text of a rule in Python: ``Tensor("up", "o i -> i o", take={"o": 3}, o=8)``."""
    if rule is None:
        return "None"
    if isinstance(rule, str):
        return _quoted(rule)
    if not isinstance(rule, Tensor):
        return f"[{', '.join(map(_text, rule))}]"
    arguments = [_quoted(rule.path)]
    if rule.dimensions is not None:
        arguments.append(_quoted(rule.dimensions))
    for name, part_of_axis in (("take", rule.take), ("put", rule.put)):
        if part_of_axis:  # an index or a slice for each axis
            items = [f"{_quoted(axis)}: {_part(part)}" for axis, part in part_of_axis.items()]
            arguments.append(name + "={" + ", ".join(items) + "}")
    for axis, size in rule.sizes.items():
        # An axis may have a name such as `in`, which is a keyword of Python, so it cannot be the
        # name of an argument.
        is_keyword = keyword.iskeyword(axis)
        arguments.append(f'**{{"{axis}": {size}}}' if is_keyword else f"{axis}={size}")
    return f"Tensor({', '.join(arguments)})"


def _part(part: slice | int) -> str:
    """Returns the text of an index or a slice. The step is left out, because it is always 1."""
    return f"slice({part.start}, {part.stop})" if isinstance(part, slice) else str(part)


def _quoted(text: str) -> str:
    """Returns a text as a literal, in double quotes if it needs no escapes in them."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & {*text} else repr(text)


def _raw(pattern: str) -> str:
    """Returns a pattern as a literal, a raw one in double quotes if it has no quotes."""
    return f'r"{pattern}"' if pattern.isprintable() and '"' not in pattern else repr(pattern)


_CALLS = {"Tensor": Tensor, "slice": slice}


def _value(node: ast.expr) -> Any:
    """Returns the value of an expression of constants, lists, dicts and calls in ``_CALLS``.

    Raises:
      ValueError: there is another expression. The text has the expression and its line.
      TypeError: a call has wrong arguments, such as ``Tensor()``.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:  # `{**x}` has the key None
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k}
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _CALLS:
            keyword_arguments: dict[str, Any] = {}
            for keyword_node in keywords:
                if keyword_node.arg is not None:
                    keyword_arguments[keyword_node.arg] = _value(keyword_node.value)
                elif isinstance(keyword_node.value, ast.Dict):  # `**{"in": 4}`
                    keyword_arguments |= _value(keyword_node.value)
                else:  # `**` of anything else
                    raise _not_a_value(node)
            return _CALLS[name](*map(_value, args), **keyword_arguments)
    raise _not_a_value(node)


def _not_a_value(node: ast.expr) -> ValueError:
    """Returns the error for an expression that has no place in a file of rules."""
    return ValueError(f"line {node.lineno}: {ast.unparse(node)}")
