"""What ``transfer`` between live models costs: ``python -m benchmarks.transfer [--megabytes 34]``.

Each row is a second call with new values, on 8 virtual devices, against two floors: ``device_put``,
which copies a tree like the target with the shardings of both, and, where values are computed, a
jitted function that computes all of them, and nothing else. That is the fair floor of a cast, which
reads other bytes than it writes, and of a transposition. All take turns, and the figures are minima
of milliseconds and, in brackets, of CPU time.

The process keeps the pages that it frees. Otherwise chance decides which call gets new ones, whose
page faults take as long as the copy: with 34 MB, calls of each way had between 0 and 3,000.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

DEVICES, LAYERS, SMALL = 8, 8, 1600
CASES = (
    "same",
    "replicated",
    "rows to columns",
    "(2, 4) to (4, 2)",
    "8 to 4 devices",
    "small rows to columns",
    "rows to replicated",
    "replicated to rows",
    "to bfloat16",
    "to float32",
    "columns, bfloat16",
    "stack",
    "unstack",
    "transposed",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[34, 134], metavar="N")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    keep_pages()
    for megabytes in options.megabytes:
        print(f"{megabytes} MB{'':14}  transfer           device_put          program   ratios")
        for case in options.cases:
            measure(case, megabytes, options.rounds)


def keep_pages() -> None:
    """Tells glibc not to return freed memory to the system; other C libraries stay as they are."""
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # numbers of <malloc.h>
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)  # the largest that glibc takes
        mallopt(arena_max, 1)  # those of other threads are returned whatever the threshold


def measure(case: str, megabytes: int, rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from nnx_sharding.checkpoint import Tensor
    from nnx_sharding.experimental import transfer

    auto = jax.sharding.AxisType.Auto
    mesh, half = (jax.make_mesh((n,), ("x",), (auto,)) for n in (DEVICES, DEVICES // 2))
    width = round((megabytes * 1e6 / LAYERS / 4) ** 0.5) // 64 * 64

    def put(arrays: Any, *spec: Any, mesh: Any = mesh) -> list[Any]:
        return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(*spec)))

    def layers(dtype: Any) -> list[Any]:
        return [jnp.full((width, width), i, dtype) for i in range(LAYERS)]

    rows, down, f32 = ("x",), jnp.bfloat16, jnp.float32
    kernels = put(layers(f32), *rows)
    stacked = put([jnp.stack(layers(f32))], None, "x")
    rules, reverse, compute = None, False, None
    unstacking = {r"(\d+)": Tensor("0", "in out -> {0} in out")}
    # Old arrays, new ones, and what `device_put` reads: like the new ones, placed as the old.
    if case in ("same", "to bfloat16", "to float32"):
        dtypes = {"to bfloat16": (f32, down), "to float32": (down, f32)}.get(case, (f32, f32))
        old, new = (put(layers(dtype), *rows) for dtype in dtypes)
        peer = put(layers(dtypes[1]), *rows)
        if dtypes[0] != dtypes[1]:
            compute = lambda xs: [x.astype(dtypes[1]) for x in xs]  # noqa: E731
    elif case == "columns, bfloat16":
        old, new, peer = kernels, put(layers(down), None, "x"), put(layers(down), *rows)
        compute = lambda xs: [x.astype(down) for x in xs]  # noqa: E731
    elif case == "(2, 4) to (4, 2)":
        meshes = [jax.make_mesh(shape, ("x", "y"), (auto,) * 2) for shape in ((2, 4), (4, 2))]
        old, new = (put(kernels, "x", "y", mesh=mesh) for mesh in meshes)
        peer = old
    elif case == "8 to 4 devices":
        old, new, peer = kernels, put(kernels, *rows, mesh=half), kernels
    elif case == "small rows to columns":
        small = [jnp.full((64, 64), i, f32) for i in range(SMALL)]
        old, new = put(small, *rows), put(small, None, "x")
        peer = old
    elif case == "stack":
        old, new, peer, rules = kernels, stacked, put(stacked, None, "x"), unstacking
        compute = lambda xs: [jnp.stack(xs)]  # noqa: E731
    elif case == "unstack":
        old, new, peer, rules, reverse = stacked, kernels, put(kernels, *rows), unstacking, True
        compute = lambda xs: [xs[0][i] for i in range(LAYERS)]  # noqa: E731
    elif case == "transposed":
        old, new, peer = kernels, put(kernels, *rows), put(kernels, None, "x")
        rules = {r"(\d+)": Tensor("{0}", "a b -> b a")}
        compute = lambda xs: [x.T for x in xs]  # noqa: E731
    else:
        specs: dict[str, tuple[Any, ...]] = {"rows": rows, "columns": (None, "x"), "replicated": ()}
        first, _, last = case.partition(" to ")
        old, new = put(kernels, *specs[first]), put(kernels, *specs[last or first])
        peer = old
    source = nnx.List([nnx.Param(x) for x in old])
    target = nnx.List([nnx.Param(jnp.copy(x)) for x in new])
    shardings = [x.sharding for x in new]
    program = jax.jit(compute, out_shardings=shardings) if compute else None
    add = jax.jit(lambda x: x + jnp.ones((), x.dtype))  # one program for many arrays takes minutes

    def renewed(arrays: Any) -> list[Any]:
        return [add(x) for x in arrays]

    held: list[Any] = []

    def keep(arrays: Any) -> None:
        held.clear()
        held.extend(arrays)
        jax.block_until_ready(held)

    ways: dict[str, Callable[[], Any]] = {
        "transfer": lambda: transfer(source, target, rules, reverse=reverse, cast=True),
        "device_put": lambda: keep(jax.device_put(peer, shardings, may_alias=False)),
    }
    if program is not None:
        ways["program"] = lambda: keep(program([x[...] for x in source]))
    best = {name: [float("inf")] * 2 for name in ways}
    for number in range(rounds + 2):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            # New values: JAX keeps the copy on the host that it made of an array. What is read is
            # made last: a part of what was written last is still in the processor's cache.
            for is_read in (False, True):
                if is_read == (name == "device_put"):
                    peer = jax.block_until_ready(renewed(peer))
                else:
                    values = jax.block_until_ready(renewed([x[...] for x in source]))
                    for variable, x in zip(source, values, strict=True):
                        variable[...] = x
            start, cpu = time.perf_counter(), time.process_time()
            ways[name]()
            jax.block_until_ready([x[...] for x in target])
            taken = time.perf_counter() - start, time.process_time() - cpu
            if number > 1:  # the first call compiles, the second one remembers the models
                best[name] = [*map(min, best[name], taken)]
    cells = [f"{best[n][0] * 1e3:7.2f} ({best[n][1] * 1e3:6.2f})" if n in best else f"{'':16}"
             for n in ("transfer", "device_put", "program")]  # fmt: skip
    ratios = [
        f"{name} {best['transfer'][0] / wall:.2f} ({best['transfer'][1] / cpu:.2f})"
        for name, (wall, cpu) in best.items()
        if name != "transfer"
    ]
    print(f"{case:20}", *cells, " ", ", ".join(ratios), flush=True)


if __name__ == "__main__":
    main()
