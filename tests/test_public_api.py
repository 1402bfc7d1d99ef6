"""The public names and their signatures, as they are recorded in ``tests/public_api.txt``.

To record them again: ``PYTHONPATH=. python tests/test_public_api.py``
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnx_sharding
from nnx_sharding.activations.intercept import original_of

RECORDED = Path(__file__).parent / "public_api.txt"
MOST_NAMES = 136  # besides those of other libraries in `compat`


def public() -> dict[str, tuple[types.ModuleType, list[str]]]:
    """Public modules and their names: those in ``__all__``, else their classes."""
    walked = pkgutil.walk_packages(nnx_sharding.__path__, "nnx_sharding.")
    parts = (m.name for m in walked if not re.search(r"\._|__main__|\.demo$", m.name))
    found = {name: importlib.import_module(name) for name in parts}
    found = {name: module for name, module in found.items() if hasattr(module, "__all__")}
    found["nnx_sharding"] = nnx_sharding
    for name in nnx_sharding.__all__:
        if isinstance(module := getattr(nnx_sharding, name), types.ModuleType):
            found[f"nnx_sharding.{name}"] = found.pop(module.__name__, module)
    return {name: (module, names(module)) for name, module in sorted(found.items(), reverse=True)}


def names(module: types.ModuleType) -> list[str]:
    classes = (name for name, x in vars(module).items() if inspect.isclass(x))
    own = (name for name in classes if vars(module)[name].__module__ == module.__name__)
    listed = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return sorted(n for n in listed if not isinstance(getattr(module, n), types.ModuleType))


def signature(x: Any) -> str:
    """The parameters without annotations, which other releases write in another way."""
    is_class = isinstance(x, type) and issubclass(x, BaseException | enum.Enum)
    if isinstance(x, property) or not callable(x) or is_class:
        return ""
    try:
        found = inspect.signature(x)
    except ValueError:
        return ""
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=found.empty))
    return re.sub(r"<(?:function|class|object) ?'?([\w.]+)[^>]*>", r"\1", text)


def lines() -> Iterator[str]:
    """Each public name with its signature, and the public methods of classes."""
    seen: dict[int, str] = {}
    for place, (module, own) in public().items():
        for name in own:
            x, path = getattr(module, name), f"{place}.{name}"
            first = seen.setdefault(id(x), path)
            if first != path:
                yield f"{path} = {first}"
                continue
            yield f"{path}{signature(x)}"
            if inspect.isclass(x):
                yield from (f"{path}.{method}" for method in methods(x))


def methods(kind: type) -> list[str]:
    bases = [base for base in kind.__mro__ if base.__module__.startswith("nnx_sharding")]
    # Methods of modules that a trace has called are replaced by descriptors.
    found = {n: original_of(x) for base in reversed(bases) for n, x in vars(base).items()}
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return sorted(
        f"{name}{signature(getattr(kind, name))}"
        for name, x in found.items()
        if isinstance(x, kinds) and not name.startswith("_")
    )


def test_public_names():
    recorded, found = RECORDED.read_text().splitlines(), sorted(lines())
    changes = [x for x in difflib.unified_diff(recorded, found, n=0, lineterm="") if x[0] in "+-"]
    assert not changes[2:], (
        "The public API differs from tests/public_api.txt. A change is a decision: if it is meant, "
        "write it into CHANGELOG.md, and record it as the docstring of this file says.\n"
        + "\n".join(changes[2:])
    )


def public_functions() -> Iterator[tuple[str, Any]]:
    """All public functions, and the public methods that public classes define."""
    for place, (module, own) in public().items():
        for name in own:
            x = getattr(module, name)
            if isinstance(x, types.FunctionType):
                yield f"{place}.{name}", x
            elif inspect.isclass(x) and x.__module__.startswith("nnx_sharding"):
                for method, found in vars(x).items():
                    found = getattr(original_of(found), "__func__", original_of(found))
                    if isinstance(found, types.FunctionType) and not method.startswith("_"):
                        yield f"{place}.{name}.{method}", found


def test_docstrings_have_all_arguments():
    """Those of private functions have only the arguments whose name and type do not say all."""
    missing, count = [], 0
    for name, function in public_functions():
        doc = inspect.getdoc(function) or ""
        if "Args:\n" not in doc:
            continue
        arguments = re.findall(r"^  \*{0,2}(\w+(?:, \*{0,2}\w+)*):", doc, re.MULTILINE)
        described = {*re.findall(r"\w+", " ".join(arguments))}
        own = {x for x in inspect.signature(function).parameters if x not in ("self", "cls")}
        missing += [f"{name}: {x}" for x in sorted(own - described) if not x.startswith("_")]
        count += 1
    assert not missing, "\n".join(missing)
    assert count > 150, count


def test_number_of_names():
    found = {n for place, (_, own) in public().items() if "compat" not in place for n in own}
    found.discard("__version__")
    assert len(found) <= MOST_NAMES, f"{len(found)} public names; at most {MOST_NAMES}"


if __name__ == "__main__":
    RECORDED.write_text("\n".join(sorted(lines())) + "\n")
