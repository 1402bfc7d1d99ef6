"""A step whose modules' inputs, outputs and gradients are recorded on each device.

Callbacks in the program keep what a module takes and returns. Gradients are kept by the transpose
of a primitive for the tangents (`_tangent_p`), which a ``custom_jvp`` binds. `comparison` compares
the records of one device with the records of a mesh. Each array that a call takes or returns is a
*site*, and values are kept by the number of their site. On Manual axes, as in a ``shard_map``, each
device has a value of its own. Otherwise a site has one value for the whole array. A dropout on
Manual axes has one more site, of its draws: the random key, and the input that it is used for.

A *handler* finds the calls of modules: within `with_handler`, a call of a method goes to the
handler instead. `jit` has a handler of its own. It constrains activations, and sets ``FRAME`` to
the call that runs, with the expression for the module in ``tag.accessor``.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh

from .. import _compat
from ..activations.axis_types import arrays_in
from ..activations.calls import FRAME, RECORD, Calls
from ..activations.intercept import current_handler, with_handler
from ..activations.variables import is_parameter, own_variables
from ..analysis.parameters import spec_text
from ..core.constrain import type_spec
from ..specs.fitting import axes_of_type
from ..specs.paths import accessor, path_string
from ..transforms.jit import jit
from .arrays import arrays_of, raw
from .rounding import Rounding, is_inexact, rounded

# This primitive is the identity on tangents. Its transpose passes the gradient through a function.
# A `custom_vjp` would be enough for gradients, but it refuses `jax.jvp`.
_tangent_p = Primitive("recorded_tangent")
_tangent_p.def_impl(lambda x, transpose: x)
_tangent_p.def_abstract_eval(lambda x, transpose: x)
ad.deflinear2(_tangent_p, lambda gradient, _, transpose: [transpose(gradient)])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, lambda context, x, transpose: [x])

RESULT = "the result"  # the name of what a step returns, next to the names of its arguments

# The values of a site on each device, in the order of the calls. Keys are the number of the site
# and whether it is the gradient; a device is named by its indices along the site's Manual axes.
Values: TypeAlias = "dict[tuple[int, bool], dict[tuple[int, ...], list[np.ndarray[Any, Any]]]]"
# The draws of a dropout on each device, by the number of their site, and by device as in `Values`.
Draws: TypeAlias = "dict[int, dict[tuple[int, ...], list[Draw]]]"
# What the callbacks of each site got: an array or a `Draw`, and the indices of its device.
Kept: TypeAlias = "dict[tuple[int, bool], list[tuple[Any, tuple[jax.Array, ...]]]]"


class Draw(NamedTuple):
    """What decides which elements a call of a dropout drops, and the array that it drops them of.

    Both are in one record, because callbacks of the elements of a `vmap` have no order.
    """

    source: Any  # the words of the key, or the mask where the key is unknown
    input: Any


class Site(NamedTuple):
    """An array that a call of a module takes or returns."""

    module: str  # an expression and the class: ``model.blocks[0].up (Linear)``
    # "input" or "output"; "key" or "mask" for the draws of a dropout, by their source.
    side: str
    axes: tuple[Any, ...]  # the Manual axes, along which each device has its own value
    start: int  # the number of the first site of the same call, which identifies the call
    # What the call gets, for an error: ``kernel: f32[8,16] P('data')``. All sites of a call share
    # one list, because specs are added to it when the program is compiled.
    inputs: list[str]
    # Expressions for the module's Variables that are no parameters, such as ``model.norm.mean``.
    # Only these Variables change in a call, so a wrong one is the module's fault. Parameters change
    # in an update.
    states: list[str]


class Outcome(NamedTuple):
    """What one call of a step computed."""

    arrays: dict[str, Any]  # the returned arrays and the arguments' arrays, by expression
    sites: list[Site]
    values: Values
    draws: Draws


class RecordedStep:
    """A step compiled for one mesh, with records of what its modules take and return.

    A *site* is one array that one call of a module takes or returns. Sites are numbered while the
    step is traced, so a number means the same on all meshes.

    Attributes:
      _fun: the step, jitted for the mesh, with records of the calls of its modules.
      _signature: the signature of the step, which names the arguments.
      _mesh: the mesh.
      _is_dropping: whether dropouts drop elements on Manual axes too.
      _rounding: the rounding errors of the current run; None for none. The compiled program reads
        this attribute in each run, and only on one device.
      _calls: a record that only makes `jit` set ``FRAME`` for every module.
      _sites: all sites by number. The first call fills the list, because it traces the step.
      _kept: what the callbacks of the current call got, by site. Each call starts a new dict.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        options: dict[str, Any],
        is_dropping: bool = False,
    ):
        """Jits the step for a mesh; nothing is traced yet.

        Args:
          step: the step.
          mesh: the mesh.
          options: those of `jit`.
          is_dropping: whether dropouts drop elements also where devices draw masks of their own;
            else they return their input there, as on one device.
        """

        @functools.wraps(step)
        def recorded_step(*args: Any) -> Any:
            handler_of_jit: Any = current_handler()
            handler = functools.partial(self._record_call, handler_of_jit)
            private_methods = ()  # none of them is recorded
            return with_handler(handler, private_methods, step, *args)

        self._signature, self._mesh = inspect.signature(step), mesh
        self._is_dropping = is_dropping
        self._rounding: Rounding | None = None
        # Nothing is donated: arguments are compared after the call, and passed to the next one.
        kept = {name: x for name, x in options.items() if not name.startswith("donate_")}
        self._fun = jit(recorded_step, mesh=mesh, **kept)
        self._calls = Calls()  # `jit` sets `FRAME` for all modules only where calls are recorded
        self._sites: list[Site] = []
        self._kept: Kept = {}

    def __call__(self, args: Any, rounding: Rounding | None = None) -> Outcome:
        """Runs the step, and returns what it computed.

        Args:
          args: the arguments of the step.
          rounding: the rounding errors by which each record is changed; None to change nothing.
        """
        self._rounding = rounding
        self._kept = defaultdict(list)
        with RECORD(self._calls):
            out = self._fun(*args)
        # Modules and optimizers in the arguments have changed, so their arrays count as well.
        arrays = self.arrays(args, {RESULT: out})
        # The barrier is needed as well, because a callback may run after the arrays are ready.
        jax.block_until_ready(arrays)
        jax.effects_barrier()
        values: Values = defaultdict(lambda: defaultdict(list))  # by site, by device
        draws: Draws = defaultdict(lambda: defaultdict(list))  # by site, by device
        for (number, is_gradient), records in self._kept.items():
            for x, indices in records:
                device = tuple(map(int, indices))
                if isinstance(x, Draw):
                    draws[number][device].append(Draw(*map(np.asarray, x)))
                else:
                    values[number, is_gradient][device].append(np.asarray(x))
        return Outcome(arrays, self._sites, values, draws)

    def arrays(
        self, args: tuple[Any, ...], more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns all arrays in the arguments, and in ``more``, by expressions for them."""
        return arrays_of({**(more or {}), **self._signature.bind(*args).arguments})

    def _record_call(
        self,
        outer: Callable[..., Any],
        module: Any,
        method: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Handles the call of a method in the trace: passes it on to `jit`, with records around it.

        Args:
          outer: the handler of `jit`, which constrains activations, and calls the method.
          module: the module; or an optimizer, whose calls are not recorded.

        Returns:
          What the method returns.
        """
        if not isinstance(module, nnx.Module):
            return outer(module, method, call, args, kwargs)

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            site = self._input_site(module, method, args, kwargs)
            # From here on the call uses the recorded arrays, because their gradients would not be
            # recorded otherwise.
            args, kwargs = self._record_arrays(site, (args, kwargs))
            key = _dropout_key(module, kwargs)  # read first, because the call changes the count
            out = call(*args, **kwargs)
            if isinstance(module, nnx.Dropout) and site.axes:
                # On Manual axes each device draws its own mask, so the result cannot be that of one
                # device. The draw is recorded, and the input returned instead.
                [x] = arrays_in(args[:1] or kwargs["inputs"])  # the only array that it takes
                is_deterministic = out is x
                if not is_deterministic:
                    self._record_draw(site, module, key, x, out)
                    out = out if self._is_dropping else x
            return self._record_arrays(site._replace(side="output"), out)

        return outer(module, method, recorded_call, args, kwargs)

    def _input_site(
        self, module: nnx.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Site:
        """Describes the inputs of a call, within the handler of `jit`: arguments and Variables."""
        manual = axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)
        axes = tuple(axis for axis in self._mesh.axis_names if axis in manual)
        frame: Any = FRAME.get()  # `jit` has set it for this call
        path_of_module = frame.tag.accessor
        name = path_of_module if method == "__call__" else f"{path_of_module}.{method}"
        site = Site(
            module=f"{name} ({type(module).__name__})",
            side="input",
            axes=axes,
            start=len(self._sites),
            inputs=[],
            states=[],
        )
        for x in arrays_in((args, kwargs)):
            _add_input(site, "", x)
        for path, variable in own_variables(module):
            _add_input(site, f"{path_string(path)}: ", _compat.get_value(variable))
            if not is_parameter(variable):
                site.states.append(accessor(path_of_module, path))
        return site

    def _record_draw(
        self, site: Site, module: nnx.Dropout, key: jax.Array | None, x: jax.Array, out: jax.Array
    ) -> None:
        """Records what decides which elements a call of a dropout drops, as a site of its own.

        Args:
          key: the words of its key; None if they are unknown, so that the mask is recorded.
        """
        if module.rate == 1:  # It drops all elements, and draws nothing.
            return
        source = key
        if source is None:
            kept = out != 0  # a zero in the input counts as dropped
            # Elements along these dimensions are dropped together, so they count once.
            source = kept.any(tuple(module.broadcast_dims), keepdims=True)
        number = len(self._sites)
        self._sites.append(site._replace(side="mask" if key is None else "key"))
        self._record(Draw(source, x), site.axes, number, is_gradient=False)

    def _record_arrays(self, site: Site, tree: Any) -> Any:
        """Returns the same tree, whose arrays and their gradients the program records.

        Each array becomes a site of its own. The program records the gradients of the returned
        arrays, so the caller has to use these instead of the given ones. Random keys are no sites,
        and are returned as they are.

        Args:
          site: the description that all sites of the tree get.
        """

        def record_array(x: Any) -> Any:
            if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            number = len(self._sites)
            self._sites.append(site)

            # Rounding errors are added here, so that they reach all that is computed from the
            # array.
            def record(x: jax.Array, *, is_gradient: bool) -> jax.Array:
                x = self._rounded(x) if is_inexact(x) else x
                self._record(x, site.axes, number, is_gradient=is_gradient)
                return x

            record_value = functools.partial(record, is_gradient=False)
            record_gradient = functools.partial(record, is_gradient=True)
            if not is_inexact(x):  # such an array has no gradient
                return record_value(x)

            def record_both(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
                """The forward rule. The transpose of the tangent records the gradient."""
                [x], [tangent] = primals, tangents
                return record_value(x), _tangent_p.bind(tangent, transpose=record_gradient)

            recorded_identity = jax.custom_jvp(record_value)
            recorded_identity.defjvp(record_both)
            return recorded_identity(x)

        # Modules in the tree are leaves, and stay as they are.
        return jax.tree.map(record_array, tree, is_leaf=_compat.is_graph_object)

    def _record(
        self, x: jax.Array | Draw, axes: tuple[Any, ...], number: int, *, is_gradient: bool
    ) -> None:
        """Adds a callback to the program that keeps an array of each device in ``_kept``.

        Args:
          axes: the Manual axes, along which each device has an array of its own; along all other
            axes, the callback gets the whole array once.
          is_gradient: whether this is the gradient of the site.
        """

        def keep(x: Any, *indices: Any) -> None:
            # `x` and `indices` are kept as JAX arrays, because JAX may still be copying them. This
            # is a thread of the program, whose threads wait for each other, so a wait for the copy
            # here can block all of them for ever.
            # `self._kept` is read here, because each call of the step sets it to a new dict and the
            # compiled program serves all calls.
            self._kept[number, is_gradient].append((x, indices))

        jax.debug.callback(keep, x, *map(jax.lax.axis_index, axes))

    def _rounded(self, x: jax.Array) -> jax.Array:
        """Returns an array with the rounding error of this run.

        On a mesh of more than one device, the array is returned as it is.
        """
        if self._mesh.size > 1:
            return x

        def relative_error() -> np.ndarray[Any, Any]:
            error = 0.0 if self._rounding is None else self._rounding.relative(x.dtype)
            return np.asarray(error, np.float32)

        # The program asks for the error in each run, so one program serves for runs with errors and
        # without.
        error = jax.pure_callback(relative_error, jax.ShapeDtypeStruct((), jnp.float32))
        return rounded(x, error)


def _dropout_key(module: nnx.Module, kwargs: Mapping[str, Any]) -> jax.Array | None:
    """Returns words that tell the key of a dropout's call from others, before the call.

    Two calls draw the same key if these words are equal: those of the key that is passed, or of the
    stream's key and its count. The result is None for a module that is no dropout, without a key,
    and if a subclass has a ``__call__`` of its own, which may use any key.
    """
    owner = next((cls for cls in type(module).__mro__ if "__call__" in vars(cls)), None)
    if not isinstance(module, nnx.Dropout) or owner is not nnx.Dropout:
        return None
    rngs = kwargs.get("rngs")
    rngs = module.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs[module.rng_collection]
    if isinstance(rngs, nnx.RngStream):
        key, count = rngs.key[...], rngs.count[...]
        return jnp.append(raw(key), count)  # flat
    return raw(rngs) if isinstance(rngs, jax.Array) else None


def _add_input(site: Site, label: str, x: Any) -> None:
    """Adds the type of an array to ``site.inputs``, and its spec when the compiler has chosen it.

    Args:
      site: the site whose ``inputs`` change.
      label: the text before the type: empty, or the path of a Variable, as ``kernel: ``.
      x: the array; anything else is left out.
    """
    if not isinstance(x, jax.Array):
        return
    text = label + jax.typeof(x).str_short(short_dtypes=True)  # kernel: f32[8,16@data]
    index = len(site.inputs)
    site.inputs.append(text)

    def add_spec(sharding: Any) -> None:
        site.inputs[index] = f"{text} {spec_text(getattr(sharding, 'spec', None))}"

    # Specs over Explicit axes are in the type. On Auto axes the compiler chooses the spec, and then
    # calls `add_spec`. On Manual axes the compiler knows nothing of the sharding.
    if type_spec(x) is None and not site.axes:
        jax.debug.inspect_array_sharding(x, callback=add_spec)
