"""Where Flax and we differ: programs that run with either, and what each returns or raises.

``python tests/flax_differences.py`` writes ``docs/guides/flax_differences.md``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "flax_differences.md"
TREE = {"graph": False, "graph_updates": False}
Library = Any
PROGRAMS: dict[str, Callable[[Library], Any]] = {}


def difference(title: str) -> Any:
    def register(program: Callable[[Library], Any]) -> Any:
        PROGRAMS[title] = program
        return program

    return register


class Model(nnx.Module):
    """A parameter, a counter and an attribute."""

    def __init__(self, **options: Any) -> None:
        self.w = nnx.Param(jnp.float32(3), **options)
        self.n = nnx.BatchStat(jnp.float32(0), **options)
        self.mode = "new"

    def __call__(self, x: Any) -> Any:
        self.n[...] += 1
        return self.w[...] * x


def square(m: Model) -> Any:
    return m.w[...] ** 2


def by_filter(lib: Library, wrt: Any, **modes: bool) -> Any:
    options = {"wrt": wrt} if lib is nnx_sharding else {"argnums": nnx.DiffState(0, wrt)}
    return lib.grad(square, **options, **modes)(Model())


@difference("`grad(wrt=nnx.Param)` without graph updates (Flax: `DiffState`)")
def wrt_without_updates(lib: Library) -> Any:
    options = (
        {"wrt": nnx.Param} if lib is nnx_sharding else {"argnums": nnx.DiffState(0, nnx.Param)}
    )
    return type(lib.grad(square, graph=True, graph_updates=False, **options)(Model())).__name__


@difference("`grad` by a filter that matches nothing (Flax: `DiffState`)")
def no_match(lib: Library) -> Any:
    return by_filter(lib, nnx.LoRAParam)


@difference("`grad` of a Variable that is also in an argument that is not differentiated")
def differentiated_and_not(lib: Library) -> Any:
    w = nnx.Param(jnp.float32(3))
    return lib.grad(lambda a, b: a[...] * b[...])(w, w)[...]


@difference("a Variable that is also an argument in `nondiff_argnums` of `custom_vjp`")
def in_a_rule_and_not(lib: Library) -> Any:
    w = nnx.Param(jnp.float32(3))
    f = lib.custom_vjp(lambda a, b: a[...] * b[...], nondiff_argnums=(1,), graph_updates=False)
    f.defvjp(lambda a, b: (f(a, b), None), lambda b, _, g: (nnx.clone(b),))
    return f(w, w)


@difference("the gradient of a parameter that `custom_vjp` leaves alone, used again (6 in all)")
def unchanged_in_a_rule(lib: Library) -> Any:
    f = lib.custom_vjp(lambda m: m.w[...])

    def backward(m: Any, g: Any) -> Any:
        return (nnx.State({"w": g[1] * 0, "n": jnp.float32(0)}),)

    f.defvjp(lambda m: (m.w[...], m), backward)
    return lib.grad(lambda m: f(m) + square(m))(Model())["w"][...]


@difference("`vjp` with graph updates")
def vjp_with_updates(lib: Library) -> Any:
    return lib.vjp(square, Model(), graph=True, graph_updates=True)[0]


@difference("`make_jaxpr` with graph updates")
def jaxpr_with_updates(lib: Library) -> Any:
    return len(lib.make_jaxpr(Model.__call__, graph=True, graph_updates=True)(Model(), 2.0).eqns)


@difference("calls counted by a Variable with `hijax=True` in `remat`")
def hijax(lib: Library) -> Any:
    m = Model(hijax=True)
    lib.remat(Model.__call__)(m, 2.0)
    return m.n[...]


@difference("calls counted by a Variable with `ref=True` in `grad`")
def references(lib: Library) -> Any:
    m = Model()
    m.n = nnx.BatchStat(jnp.float32(0), ref=True)
    lib.grad(lambda m: m(2.0))(m)
    return m.n[...]


@difference("draws that differ of 3, and the count, of a stream that `scan` broadcasts")
def streams(lib: Library) -> Any:
    rngs = nnx.Rngs(noise=0)
    draw = lib.scan(lambda r, x: x + jax.random.normal(r.noise()), in_axes=(None, 0), out_axes=0)
    return len({*draw(rngs, jnp.zeros(3)).tolist()}), int(rngs.noise.count[...])


@difference("a condition of `while_loop` that counts its calls")
def counting_condition(lib: Library) -> Any:
    m = Model()
    lib.while_loop(lambda c: c[0](1.0) * c[1] < 9, lambda c: (c[0], c[1] + 1), (m, jnp.float32(0)))
    return m.n[...]


@difference("`StateAxes` in tree mode")
def axes_in_tree_mode(lib: Library) -> Any:
    axes = lib.StateAxes({...: None}), 0
    return lib.vmap(lambda m, x: m.w[...] * x, in_axes=axes, **TREE)(Model(), jnp.ones(2))


@difference("`StateSharding` in tree mode")
def sharding_in_tree_mode(lib: Library) -> Any:
    mesh = jax.make_mesh((1,), ("data",))
    shardings = lib.StateSharding({...: jax.NamedSharding(mesh, P())})
    return lib.jit(square, in_shardings=(shardings,), **TREE)(Model())


@difference("`shard_map` on the mesh in context")
def mesh_in_context(lib: Library) -> Any:
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        return lib.shard_map(square, in_specs=(P(),), out_specs=P())(Model())


@difference("the shape of what `nnx.capture` finds in a module that `vmap` broadcasts")
def captured(lib: Library) -> Any:
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.inner = Model()

        def __call__(self, x: Any) -> Any:
            def sow(m: Model, x: Any) -> None:
                m.sow(nnx.Intermediate, "x", x)

            lib.vmap(sow, in_axes=(None, 0))(self.inner, x)

    _, found = nnx.capture(Outer(), nnx.Intermediate)(jnp.ones(2))
    return [x.shape for x in jax.tree.leaves(found)]


@difference("a bound method in `jit`")
def bound(lib: Library) -> Any:
    m = Model()
    lib.jit(m.__call__)(2.0)
    return m.n[...]


@difference("`remat` of a function that gets a text")
def text_argument(lib: Library) -> Any:
    return lib.remat(lambda m, mode: m.w[...] if mode == "train" else None)(Model(), "train")


@difference("`remat` with a policy that there is not")
def unknown_policy(lib: Library) -> Any:
    return lib.remat(square, policy="dots")(Model())


@difference("what `jit` makes of a NumPy array in a Variable that it does not change")
def numpy_array(lib: Library) -> Any:
    m = Model()
    m.w.set_value(np.ones(2, np.float32))
    lib.jit(lambda m: m(2.0))(m)
    return type(m.w.get_value()).__name__


@difference("traces of `jit` if an attribute that was 1 becomes True")
def equal_attributes(lib: Library) -> Any:
    m, seen = Model(), []
    run = lib.jit(lambda m: seen.append(m.mode))
    for m.mode in (1, True):
        run(m)
    return seen


@difference("traces of two `jit` of one function")
def two_jits(lib: Library) -> Any:
    seen: list[int] = []

    def run(m: Model) -> None:
        seen.append(1)

    m = Model()
    lib.jit(run)(m), lib.jit(run)(m)
    return len(seen)


@difference("metadata that `jit` changes")
def metadata(lib: Library) -> Any:
    m = Model()
    lib.jit(lambda m: m.w.set_metadata(note="seen"))(m)
    return m.w.get_metadata().get("note")


@difference("a traced array that is kept in metadata")
def traced_metadata(lib: Library) -> Any:
    m = Model()
    lib.jit(lambda m, x: m.w.set_metadata(last=x))(m, 2.0)
    return type(m.w.get_metadata()["last"]).__name__


def outcome(program: Callable[[Library], Any], lib: Library) -> str:
    """What a program returns, or the type of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = program(lib)
        except Exception as error:
            return type(error).__name__
    if isinstance(result, nnx.State):
        return " ".join(repr(result).split())
    return str(jax.tree.map(lambda x: x.tolist() if isinstance(x, jax.Array) else x, result))


def row(title: str) -> str:
    cells = (outcome(PROGRAMS[title], lib) for lib in (nnx, nnx_sharding))
    shown = (f"`{re.sub(r'[|`]', '', cell)}`" for cell in cells)
    return f"| {title} | {' | '.join(shown)} |"


def main() -> None:
    """Writes the page."""
    head = "# Where Flax differs\n\n"
    head += (
        "Each row is a program that runs with either library, and what it returns or raises.\n\n"
    )
    head += "| | `flax.nnx` | `nnx_sharding` |\n| --- | --- | --- |\n"
    PAGE.write_text(head + "\n".join(map(row, PROGRAMS)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import conftest  # noqa: F401  eight virtual devices; under pytest it is there already

    main()
