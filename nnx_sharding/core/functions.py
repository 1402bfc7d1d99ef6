"""Facts about a function: its name, the names that it uses, and the values that it captures.

A function *captures* the values that it uses besides its arguments: the object that it is bound to,
the variables of enclosing functions, and globals. Captured arrays become constants of the program.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from .. import _compat
from ..errors import message, see
from ..specs.fitting import describe
from ..specs.paths import accessor
from .bounded import make_room
from .flatten import flatten
from .problems import array_line


class FunctionGroup:
    """The functions of one call of a transform that takes several, such as the branches of cond."""

    __slots__ = ("__weakref__", "functions")

    functions: tuple[Any, ...]


def name_as(pure: Callable[..., Any], fun: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Names a function of arrays like ``fun``, and its parameters by the paths of the arrays.

    JAX's messages and HLO then show the user's names. ``pure`` gets no reference to ``fun``:
    the caches that hold ``pure`` would keep alive what the user's function captures.

    Args:
      pure: the function of arrays, whose attributes are set.
      fun: the user's function.
      parameters: the expression for each array, such as ``model.kernel``.
    """
    fun = _behind_partial(fun)
    pure.__name__ = name_of(fun)
    pure.__qualname__ = getattr(fun, "__qualname__", pure.__name__)
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if code is not None:
        # JAX takes the file and line from ``__wrapped__``, and shows them in messages.
        pure.__wrapped__ = types.SimpleNamespace(  # type: ignore[attr-defined]
            __code__=code, __name__=pure.__name__
        )
    # JAX takes the names of arrays from the signature. The names have to be different there, but
    # need not be identifiers if they are those of a `_SlotParameter`.
    if len(set(parameters)) == len(parameters):
        pure.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [_SlotParameter(name) for name in parameters]
        )


def _behind_partial(fun: Callable[..., Any]) -> Any:
    """Returns the function of a ``functools.partial``; any other function unchanged."""
    return _behind_partial(fun.func) if isinstance(fun, functools.partial) else fun


def name_of(fun: Callable[..., Any]) -> str:
    """Returns the name of a function, or JAX's ``<unnamed function>`` if it has none."""
    return str(getattr(_behind_partial(fun), "__name__", "<unnamed function>"))


def qualified_name_of(fun: Callable[..., Any]) -> str:
    """Returns the name of a function with its class, but without the functions around it."""
    fun = _behind_partial(fun)
    return str(getattr(fun, "__qualname__", type(fun).__name__)).rpartition("<locals>.")[2]


def weak_function(fun: Callable[..., Any]) -> Callable[[], Any]:
    """Returns a function that returns ``fun``, or None once ``fun`` is collected."""
    try:
        return weakref.ref(fun)
    except TypeError:
        # Some NumPy callables have no weak references. They may be kept alive, because nothing is
        # kept for them beyond their wrappers.
        return lambda: fun


class _SlotParameter(inspect.Parameter):
    """A parameter whose name is the path of an array, so that JAX's messages and HLO show it."""

    def __init__(self, label: str):
        # The base's constructor is not called, because it accepts only identifiers. So the base's
        # attributes are set here, all four of them.
        self._name, self._kind = label, inspect.Parameter.POSITIONAL_ONLY
        self._default = self._annotation = inspect.Parameter.empty


class Names(NamedTuple):
    """The names that a code and the functions defined in it use."""

    globals: tuple[str, ...]  # the names of globals, in the order in which they are first used
    attributes: frozenset[str]  # the names of attributes
    imports: frozenset[str]  # the modules of `import` statements, such as ``.types`` in a package


# The key is the id of a code, because hashing a code would hash its instructions. The table keeps
# the code alive, so that no other code gets its id.
_MAX_CODES = 4096
_NAMES: dict[int, tuple[types.CodeType, Names]] = {}


def names_of(code: types.CodeType) -> Names:
    """Returns the names that a code uses."""
    entry = _NAMES.get(id(code))
    if entry is None:
        entry = _NAMES[id(code)] = code, _read_names(code)
        make_room(_NAMES, _MAX_CODES)
    _, names = entry
    return names


def _read_names(code: types.CodeType) -> Names:
    """Returns the names in the instructions of a code object, by what is done with them."""
    global_names: dict[str, None] = {}  # in the order in which they are first used
    attributes, imports = set[str](), set[str]()
    operands: list[Any] = []  # the operands of all earlier instructions, except EXTENDED_ARG
    for instruction in _instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            global_names[name] = None
        elif operation in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(name)
        elif operation == "IMPORT_NAME":
            # The two instructions before this one have put the number of leading dots, and the
            # imported names, on the stack. The dots count, because `.types` of a user's package is
            # not Python's `types`.
            level, _ = operands[-2:]
            imports.add("." * level + name)
        if operation != "EXTENDED_ARG":
            operands.append(name)
    return Names(tuple(global_names), frozenset(attributes), frozenset(imports))


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yields the instructions of a code and of the functions defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def captured_shards(
    fun: Callable[..., Any], constants: Iterable[Any] | None = None
) -> list[NamedValue]:
    """Returns the sharded arrays that a function captures, with the names that it has for them.

    Args:
      fun: the user's function.
      constants: the arrays that a trace of the function has captured. If this is None, all arrays
        that the function may capture are returned.
    """
    arrays: list[NamedValue] = []  # all arrays, also those that are not sharded
    for name, value in captured_values(fun):
        arrays += _named_arrays(name, value)
    if constants is not None:
        name_of_id: dict[int, str] = {}
        for name, array in arrays:
            name_of_id.setdefault(id(array), name)  # the first name of an array counts
        # An array that is deep in a container, or made by the function, has no name.
        arrays = [NamedValue(name_of_id.get(id(x), "an array"), x) for x in constants]
    return [
        named for named in arrays if _is_array(named.value) and not named.value.is_fully_replicated
    ]


def closure(fun: types.FunctionType) -> dict[str, Any]:
    """Returns the variables of enclosing functions that a function uses, by name."""
    variables: dict[str, Any] = {}
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet is left out
            variables[name] = cell.cell_contents
    return variables


class NamedValue(NamedTuple):
    """A value that a function captures, and the expression that names it in messages."""

    name: str
    value: Any


def captured_values(fun: Any) -> Iterator[NamedValue]:
    """Yields the bound, closed-over and global values that a function uses, with their names."""
    while type(fun) is functools.partial:
        for i, value in enumerate(fun.args):
            yield NamedValue(f"partial.args[{i}]", value)
        for key, value in fun.keywords.items():
            yield NamedValue(f"partial.keywords[{key!r}]", value)
        fun = fun.func
    if _compat.is_graph_object(fun):  # a module with a __call__
        yield NamedValue(f"the {type(fun).__name__}", fun)
    fun = inspect.unwrap(getattr(fun, "__func__", fun))  # ``__func__``: ``fun`` is a bound method
    code = getattr(fun, "__code__", None)
    if code is None:  # the function is not written in Python
        return
    for name, value in closure(fun).items():
        yield NamedValue(name, value)
    for name in names_of(code).globals:
        if name in fun.__globals__:
            yield NamedValue(name, fun.__globals__[name])


def _is_array(value: object) -> bool:
    return type(value) is _compat.ArrayImpl  # isinstance would load the target of a lazy proxy


def _named_arrays(name: str, value: Any) -> Iterator[NamedValue]:
    """Yields the arrays in a value with their names; ``name`` is the expression for the value.

    An array may be the value itself, in a module, or directly in a container, where it may also be
    in a module: ``[x, model]`` has ``name[0]`` and ``name[1].kernel``. Containers in containers are
    left out, because a global may be a large registry.
    """
    if _is_array(value):
        yield NamedValue(name, value)
    elif _compat.is_graph_object(value):
        flat = flatten(value, keeps_alive=False)
        for path, leaf in zip(flat.structure.paths(), flat.leaves, strict=True):
            if _is_array(leaf):
                yield NamedValue(accessor(name, path), leaf)
    elif type(value) in (tuple, list, dict):  # subclasses may run the user's code
        items = value.items() if type(value) is dict else enumerate(value)
        for key, part in items:
            if _is_array(part) or _compat.is_graph_object(part):
                yield from _named_arrays(accessor(name, (key,)), part)


def note_captured_arrays(fun: Callable[..., Any], fun_name: str, error: Exception) -> None:
    """Names the sharded arrays that a function captures in a note to an error, if there are any."""
    lines = [
        f"{array_line(name, array)}, {describe(array.sharding)}"
        for name, array in captured_shards(fun)
    ]
    if lines:
        head = f"{fun_name} captures these sharded arrays:"
        error.add_note(message(head, lines, "Pass them as arguments."))
        see(error, anchor="captured-array-on-explicit-axes")


def note_captured_object(fun: Callable[..., Any], fun_name: str, error: Exception) -> None:
    """Names the captured object that a function tried to change, in the text of the error.

    Args:
      fun: the user's function, or the group of them that a transform takes.
      fun_name: the name of the function, for the text.
      error: an error of Flax or ours. Its text is changed, and it gets a reference to the docs.
    """
    if isinstance(fun, FunctionGroup):
        for function in fun.functions:
            note_captured_object(function, name_of(function), error)
        return
    refused_ids = _refused_objects(error)
    if not refused_ids:
        return
    name = _name_of_captured(fun, refused_ids)
    if name is None:
        return
    text = (
        f"This is {name}, which {fun_name} captures. Pass what a function changes as one of its "
        "arguments."
    )
    if text not in str(error):  # an inner function may have named the object already
        error.args = (f"{error}\n{text}", *error.args[1:])
        see(error, anchor="changed-from-outside-its-trace")


def _name_of_captured(fun: Callable[..., Any], ids: Set[int]) -> str | None:
    """Returns the expression for the first object with one of the ids in a captured module.

    Returns None if the function captures no such object.
    """
    for captured in captured_values(fun):
        if not _compat.is_graph_object(captured.value):
            continue
        for path, part in _compat.iter_graph(captured.value):
            if id(part) in ids:
                return accessor(captured.name, path)
    return None


def _refused_objects(error: Exception) -> set[int]:
    """Returns the ids of the objects that a function could not change.

    Our own error has the objects as an attribute. Flax raises its error in a method of the object.
    So the object is ``self`` in the innermost frame in which ``self`` is a module or Variable.
    """
    objects = vars(error).get("objects")
    if objects is not None:
        return set(map(id, objects))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        obj = frame.f_locals.get("self")
        if _compat.is_graph_object(obj):
            return {id(obj)}
    return set()
