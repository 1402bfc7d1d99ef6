"""The message for each kind of problem: the exception, what is wrong, a line each, what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import _compat, errors
from ..core.problems import Diagnostics, Problem, install
from ..specs.fitting import describe, describe_both, suggestion
from ..specs.state_sharding import filter_remedy, filters_text
from . import message_lines as line_of
from .captured import captured_shards
from .differences import show
from .failures import explain


class Message(NamedTuple):
    """The message for one kind of problem."""

    head: str  # what is wrong, with details in braces; preceded by the name of the transform
    line: Callable[..., str]  # for one offender
    remedy: str = ""
    kind: Callable[[str], BaseException] | type[errors.ShardingWarning] = ValueError
    anchor: str = ""  # of the section in docs/errors.md


_BOTH_MODES = "graph=True and graph_updates=True"

MESSAGES: dict[Problem, Message] = {
    Problem.ARGUMENT_IS_NOT_ARRAY: Message(
        "these arguments are not arrays:",
        line_of.value,
        "Pass arrays or numbers, or make the argument static (static_argnums, static_argnames); in "
        "a module, a static attribute (nnx.static).",
        kind=TypeError,
        anchor="not-an-array",
    ),
    Problem.RESULT_IS_NOT_ARRAY: Message(
        "these results are not arrays:",
        line_of.value,
        "Return only arrays or numbers.",
        kind=TypeError,
        anchor="not-an-array",
    ),
    Problem.STATIC_NOT_HASHABLE: Message(
        "static arguments must be hashable:",
        lambda name, value, error: f"argument {name!r} of type {type(value).__name__} ({error})",
        "They are part of the key of the compiled function: pass a hashable value, such as a "
        "tuple instead of a list.",
        anchor="static-argument-that-is-not-hashable",
    ),
    Problem.STATIC_HOLDS_ARRAYS: Message(
        "static arguments must not hold arrays, which would become constants of the program:",
        lambda name, value: f"argument {name!r}: {type(value).__name__} with arrays",
        "Pass it as an ordinary argument: its structure and static attributes are part of the key "
        "of the compiled function in any case.",
        anchor="static-argument-with-arrays",
    ),
    Problem.POSITION_OUT_OF_RANGE: Message(
        "these negative positions are out of range:",
        lambda option, positions, count: f"{option}={positions}, {count} positional arguments",
    ),
    Problem.INVALID_OPTION: Message(
        "these options have invalid values:",
        lambda option, value, choices: (
            f"{option}: expected one of {', '.join(map(repr, choices))}, got {value!r}"
        ),
    ),
    Problem.NOT_A_SPEC: Message(
        "expected a sharding spec, got:",
        lambda place, value, meant: f"{place}: {show(value)}{meant}",
        "Use a PartitionSpec such as P('data', None), a Sharding, a StateSharding, or None.",
        kind=TypeError,
        anchor="not-a-spec",
    ),
    Problem.NOT_A_PREFIX: Message(
        "these specs are not a tree prefix of the value (modules and Variables are leaves):",
        lambda place, mismatch: f"{place}: {mismatch}",
        anchor="not-a-tree-prefix",
    ),
    Problem.WRONG_NUMBER_OF_SPECS: Message(
        "the number of entries does not match the parameters:",
        line_of.parameters,
        anchor="number-of-specs",
    ),
    Problem.UNKNOWN_PARAMETER: Message(
        "these are not parameters of the function:",
        lambda name, names: (
            f"{name!r}{suggestion(name, names)} (parameters: {', '.join(map(repr, names))})"
        ),
        anchor="unknown-parameter",
    ),
    Problem.NO_FILTER_MATCHES: Message(
        "no filter of the {form} matches:",
        line_of.unmatched,
        "The filters are {filters}. {remedy}",
        anchor="no-filter-matches",
    ),
    Problem.CONFLICTING_SPECS: Message(
        "Inconsistent aliasing: one Variable or array has different {specs} under different paths:",
        line_of.conflict,
        "Give it the same {specs} everywhere.",
        anchor="two-shardings-for-one-variable",
    ),
    Problem.UNKNOWN_SPEC: Message(
        "nnx.prefix gives these new Variables what it gave none when it was called:",
        lambda path, spec: f"{path}: {spec!r}",
        "Give its filters as StateSharding, or in vmap and scan as StateAxes.",
    ),
    Problem.SPEC_DOES_NOT_FIT_MESH: Message(
        "these specs do not fit the mesh:",
        lambda spec, paths, why: f"{describe(spec)} for {line_of.several(paths)}: {'; '.join(why)}",
        "The mesh has the axes {axes}.",
    ),
    Problem.SPEC_DOES_NOT_FIT_SHAPE: Message(
        "the specs of these {arrays} do not fit their shapes:", line_of.misfit, "{remedy}"
    ),
    Problem.SPEC_CORRECTED: Message(
        "the specs of these {arrays} do not fit their shapes and were corrected:",
        line_of.misfit,
        kind=errors.CorrectedSpecWarning,
        anchor="when-a-spec-does-not-divide-a-shape",
    ),
    Problem.FILTER_UNUSED: Message(
        "these filters match nothing, or only what earlier filters match:",
        lambda name, arguments, near: f"{name}, for {line_of.several(arguments)}{near}",
        "Correct or remove them, or put them before the filter that matches the same.",
        kind=errors.UnusedFilterWarning,
        anchor="unused-filter",
    ),
    Problem.CANNOT_BE_TYPED: Message(
        "on these Explicit axes JAX cannot know how a module shards the result of an operation:",
        line_of.untyped,
        "Declare its output: jit(..., activation_shardings={entry}); within the module, the "
        "compiler then chooses. Patterns such as r'blocks/\\d+/up$' match several. Strategies "
        "such as fsdp or from_rules do so for all modules. Or give the operation an out_sharding, "
        "or use jit(..., auto_axes=True), with out_shardings.",
        kind=errors.ActivationError,
        anchor="output-that-jax-cannot-shard",
    ),
    Problem.ACTIVATION_UNUSED: Message(
        "these filters of activation_shardings match no called module:",
        line_of.unused,
        "Strings are regular expressions for the paths of modules within the argument, such as "
        "blocks/3/up. Correct the filters, or pass ActivationSharding(..., strict=False).",
        kind=errors.ActivationError,
        anchor="unused-filter-for-activations",
    ),
    Problem.ACTIVATION_DOES_NOT_FIT: Message(
        "these activation shardings do not fit:",
        str,
        "Correct the specs, or use on_indivisible for those that do not divide a shape.",
        kind=errors.ActivationError,
        anchor="activation-specs-that-do-not-fit",
    ),
    Problem.NO_MESH: Message(
        "a PartitionSpec needs a mesh, and none is in context. Pass mesh=..., call within `with "
        "jax.set_mesh(mesh):`, or pass NamedSharding(mesh, spec).",
        str,
        kind=errors.NoMeshError,
        anchor="no-mesh",
    ),
    Problem.NO_DEVICES: Message(
        "cannot run on an abstract mesh, which has no devices:",
        str,
        "Pass a jax.sharding.Mesh, or call within `with jax.set_mesh(mesh):`. Without devices, use "
        "eval_shape or trace(...).lower(lowering_platforms=...).",
        kind=errors.NoMeshError,
    ),
    Problem.CANNOT_PLACE: Message(
        "these arrays cannot be placed as declared:",
        lambda path, reason: f"{path}: {reason}",
    ),
    Problem.COMMITTED_ELSEWHERE: Message(
        "these arrays are committed to a sharding other than the declared one:",
        lambda path, shape, *both: "{}, shape {}: is {}, declared {}".format(
            path, shape, *describe_both(*both)
        ),
        "Declare the sharding that they have, place them as declared (models with "
        "nnx_sharding.place, arrays with jax.device_put), or let them be moved: "
        "on_committed='move'.",
        anchor="committed-to-another-sharding",
    ),
    Problem.CAPTURED_ARRAY: Message(
        "the function captures sharded arrays, which become constants of the program, copied to "
        "every device:",
        lambda name, array: f"{line_of.array(name, array)}, {describe(array.sharding)}",
        "Pass them as arguments.",
        kind=errors.CapturedArrayWarning,
        anchor="captured-array",
    ),
    Problem.WRONG_GRADIENT: Message(
        "by known faults of XLA, these gradients may be multiplied by the sizes of mesh axes:",
        lambda path, what, axes, remedy: (
            f"{path + ': ' if path else ''}{what}: {', '.join(map(repr, axes))}. {remedy}"
        ),
        "",
        kind=errors.WrongGradientWarning,
        anchor="wrong-gradient",
    ),
    Problem.TRACER_IN_STATIC: Message(
        "these static values hold traced arrays, which do not exist outside of the function:",
        line_of.object,
        "Keep them in a Variable or as an attribute of a module (nnx.data), or return them.",
        kind=jax.errors.UnexpectedTracerError,
    ),
    Problem.CAPTURED_OBJECT: Message(
        "these objects were captured from outside of the function, and cannot be returned or "
        "attached to its arguments:",
        line_of.object,
        "Pass them as arguments, or return a copy made by nnx.clone.",
    ),
    Problem.CLASS_CHANGED: Message(
        "the function assigned another __class__ to these objects:",
        line_of.object,
        "Make an object of the other class instead.",
    ),
    Problem.STATIC_CHANGED: Message(
        "without graph updates the function cannot change static objects, but it changed:",
        line_of.object,
        f"Use {_BOTH_MODES}, or make the change outside of the function.",
    ),
    Problem.UNDECLARED_ARGUMENT: Message(
        "no spec says how these arguments are sharded on the axes that become Explicit:",
        line_of.array,
        "Declare them in in_sharding; P() replicates.",
    ),
    Problem.UNDECLARED_RESULT: Message(
        "these results were computed on Auto axes, and no spec says how they are sharded on the "
        "Explicit axes outside:",
        line_of.array,
        "Declare them in {option}; P() replicates.",
    ),
    Problem.OUTPUT_IS_INPUT: Message(
        "Variable aliasing is not supported without graph updates: these outputs are Variables of "
        "the inputs, or were captured:",
        lambda path, known: f"{path}: {'captured' if known is None else f'the input {known}'}",
        f"Return a copy made by nnx.clone, or use {_BOTH_MODES}.",
    ),
    Problem.VARYING_OUTPUT: Message(
        "JAX cannot prove that these results of {fun_name} are replicated along the mesh axes that "
        "their specs leave out:",
        lambda path, array, spec, axes: (
            f"{line_of.array(path, array)}, {spec!r}: varies along {', '.join(map(repr, axes))}"
        ),
        "Reduce them in the function, as in jax.lax.pmean(x, {reduced}) or psum, pmax, all_gather; "
        "or name the axis in the spec. If they are equal for reasons that JAX cannot see, pass "
        "check_vma=False.",
        anchor="not-proven-replicated",
    ),
    Problem.DONATION_UNUSED: Message(
        "these arguments are donated, but {fun_name} has no result of their shape and dtype that "
        "could reuse their memory:",
        line_of.array,
        "Do not donate them (donate_argnums, donate_argnames).",
        kind=errors.StrictError,
        anchor="donation-that-is-not-used",
    ),
    Problem.FOREIGN_TRACE: Message(
        "the function changed objects that belong to another trace, where they cannot be updated:",
        str,
        "Pass them into the transformed function that is being traced, instead of capturing them.",
        kind=_compat.TraceContextError,
        anchor="changed-from-outside-its-trace",
    ),
}


class Messages(Diagnostics):
    """The diagnostics of this package."""

    def error(
        self, problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any
    ) -> Exception:
        """The exception for a problem, of the type that ``jax.jit`` raises for the same mistake."""
        kind: Any = MESSAGES[problem].kind
        text, anchor = _text(problem, offenders, **details), MESSAGES[problem].anchor
        if problem is Problem.SPEC_DOES_NOT_FIT_SHAPE:
            indivisible = all(fit.is_indivisible for _, fit, _ in offenders)
            anchor = "not-divisible" if indivisible else "spec-too-long"
            kind = _compat.IndivisibleError if indivisible and details["as_jax"] else kind
        if problem is Problem.SPEC_DOES_NOT_FIT_MESH:
            reason = offenders[0][-1][0]
            anchor = "axis-used-twice" if " is used " in reason else ""
            anchor = "unknown-axis" if "has no axis" in reason else anchor
        error: Exception = errors.see(kind(text), anchor)
        return error

    def warn(
        self,
        problem: Problem,
        offenders: Sequence[tuple[Any, ...]],
        *,
        strict: bool = False,
        **details: Any,
    ) -> None:
        """Warns with the user's line of code; with ``strict``, raises a ``StrictError``."""
        if problem is Problem.CAPTURED_ARRAY:
            offenders = captured_shards(details.pop("fun"), [array for (array,) in offenders])
        kind: Any = MESSAGES[problem].kind
        text, anchor = _text(problem, offenders, **details), MESSAGES[problem].anchor
        errors.report(kind, text, strict=strict, anchor=anchor)

    def failed(self, plan: Any, leaves: Sequence[Any], error: Exception) -> None:
        """Raises an error that explains one of JAX better, or adds a note to it."""
        explain(plan, leaves, error)


def _text(
    problem: Problem,
    offenders: Sequence[tuple[Any, ...]],
    *,
    name: str = "",
    sizes: Mapping[Any, int] | None = None,
    outputs: bool = False,
    **details: Any,
) -> str:
    message = MESSAGES[problem]
    lines = [f"  {message.line(*offender)}" for offender in offenders]
    details["arrays"] = "results" if outputs else "arrays"
    details["axes"] = ", ".join(f"{axis!r} ({size})" for axis, size in (sizes or {}).items())
    if problem is Problem.SPEC_DOES_NOT_FIT_SHAPE:
        indivisible = any(fit.is_indivisible for _, fit, _ in offenders)
        details["remedy"] = _ON_INDIVISIBLE if indivisible else _ONE_ENTRY
    if problem is Problem.NO_FILTER_MATCHES:
        _, subjects, rules = zip(*offenders, strict=True)
        details["form"] = type(rules[0]).__name__
        details["filters"] = "; or ".join(dict.fromkeys(map(filters_text, rules)))
        remedy = filter_remedy(rules[0], subjects)
        details["remedy"] = _FOR_A_PYTREE if details["is_inside"] else remedy
    if problem is Problem.CANNOT_BE_TYPED:
        _, key, *_, entry = offenders[0]
        details["entry"] = f"{{{key!r}: {entry!r}}}"
    if problem is Problem.VARYING_OUTPUT:
        axes = tuple(dict.fromkeys(axis for *_, missing in offenders for axis in missing))
        details["reduced"] = repr(axes[0] if len(axes) == 1 else axes)
    head = f"{name}: {message.head}" if name else message.head
    return errors.message(head.format(**details), lines, message.remedy.format(**details))


_ON_INDIVISIBLE = (
    "Change the shape (pad it) or the spec; or let the spec be corrected: "
    "on_indivisible='replicate' or 'drop'."
)
_FOR_A_PYTREE = (
    "Their paths begin with another key, as in a tuple or dict of modules: pass that as one "
    "argument, or choose shardings for each; fsdp(model, optimizer=optimizer) covers both."
)
_ONE_ENTRY = "Give each a spec with at most one entry for each dimension."

install(Messages())
