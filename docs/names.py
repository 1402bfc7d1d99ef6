"""The public names that the pages of the reference document, for their index and for tests."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re

_DIRECTIVE = re.compile(
    r"^\.\. (?:py:)?(currentmodule|automodule|auto\w+|function|data):: ([\w.]+).*\n((?: +:.*\n)*)",
    re.MULTILINE,
)


_NAMES = re.compile(r"^```\{names\} ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def expanded(page: str) -> str:
    """The text of a page with directives of autodoc in the place of lists of names."""
    return _NAMES.sub(lambda block: _directives(block[1], block[2].split()), page)


def _directives(module: str, names: list[str]) -> str:
    """What documents functions and classes of a module, with the members of classes."""
    lines = ["```{eval-rst}", f".. currentmodule:: {module}", ""]
    for name in names:
        plain = name.removesuffix("()")  # which hides the arguments of a class
        path = plain if plain.startswith("nnx_sharding") else f"{module}.{plain}"
        owner, _, attribute = path.rpartition(".")
        if inspect.isclass(getattr(importlib.import_module(owner), attribute)):
            lines += [f".. autoclass:: {name}", "   :members:", ""]
        else:
            lines += [f".. autofunction:: {name}", ""]
    return "\n".join([*lines, "```"])


def documented(page: str) -> list[str]:
    """The full names that the text of a page documents, in its order."""
    names, current = [], ""
    for kind, name, options in _DIRECTIVE.findall(expanded(page)):
        if kind == "currentmodule":
            current = name
        elif kind == "automodule":
            excluded = re.search(r":exclude-members: (.*)", options)
            left_out = excluded[1].split(", ") if excluded else []
            own = members(name) if ":members:" in options else []
            names += [f"{name}.{each}" for each in own if each not in left_out]
        else:
            names.append(name if name.startswith("nnx_sharding") else f"{current}.{name}")
    return names


def members(module: str) -> list[str]:
    """What autodoc lists of a module: its ``__all__``, else its own classes and functions."""
    found = importlib.import_module(module)
    own = (
        name
        for name, value in vars(found).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module
    )
    return getattr(found, "__all__", [name for name in own if not name.startswith("_")])


def index(page: str) -> str:
    """The tables of these names, one for each module."""
    tables = []
    for module, group in itertools.groupby(documented(page), lambda name: name.rpartition(".")[0]):
        names = [name.rpartition(".")[2] for name in group]
        lines = [f"   {name}" for name in names if not name.isupper()]
        head = [f".. currentmodule:: {module}", "", ".. autosummary::", "   :nosignatures:", ""]
        tables += [f"In `{module}`:", "", "```{eval-rst}", *head, *lines, "```", ""]
        tables += [f"Data: {{py:data}}`~{module}.{name}`.\n" for name in names if name.isupper()]
    return "\n".join(tables)
