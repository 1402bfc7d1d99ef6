"""Private names of JAX and Flax are in one package, and exist in the releases that we test."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
from absl.testing import absltest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import _compat

PACKAGE = pathlib.Path(nnx_sharding.__file__).parent
COMPAT = sorted(PACKAGE.glob("_compat/*.py"))
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in COMPAT)
PRIVATE = re.compile(
    r"_src\b|^_pytree__|^_raw_value$|^_var_metadata$|^_trace_state$|^_can_update$|^GRAPH_"
    r"|UnspecifiedValue|TreeState|ShardMapTracer|DEADLINE_EXCEEDED|^/jax/"
)


def names_in(path: pathlib.Path) -> set[str]:
    """Every name, attribute, imported module and string of a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                found.add(name)
            case ast.ImportFrom(module=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


class OnePackageTest(absltest.TestCase):
    def test_no_private_names_elsewhere(self):
        self.assertGreater(len(FILES), 100)
        found = [(str(x), name) for x in FILES for name in names_in(x) if PRIVATE.search(name)]
        self.assertEqual(found, [])

    def test_no_private_names_in_c(self):
        for path in (PACKAGE / "core" / "guard").glob("*.[ch]"):
            text = path.read_text(encoding="utf-8")
            self.assertEqual(re.findall(r'"_[^_]\w*"', text), [], path)

    def test_the_search_finds_them_where_they_are(self):
        found = [n for path in COMPAT for n in names_in(path) if PRIVATE.search(n)]
        self.assertGreater(len(found), 5)


# All private names that we use, with what they are needed for. Whatever is added to this list will
# have to be fixed for some later release.
PRIVATE_NAMES = {
    "_cache_size": "how many programs were compiled, which trainers ask",
    "flax.core.spmd.get_logical_axis_rules": "the rules in context, by which Flax shards",
    "flax.nnx.graphlib.GRAPH_CONTEXT": "the cache of nnx.cached_partial is for nnx.jit only",
    "flax.nnx.pytreelib.PytreeState._initializing": "how far a module is set up",
    "flax.nnx.pytreelib.PytreeState._is_setup": "how far a module is set up",
    "flax.nnx.variablelib.HijaxVariable._leaves": "the values of a hijax Variable, without hooks",
    "flax.nnx.variablelib.HijaxVariable._treedef": "their structure",
    "flax.nnx.variablelib.Variable._raw_value": "the value of a Variable, without hooks",
    "flax.nnx.variablelib.Variable._trace_state": "the trace that it belongs to",
    "flax.nnx.tracers.TraceState": "the trace of new Variables, which may share it",
    "flax.nnx.variablelib.Variable._var_metadata": "its metadata, without a copy",
    "jax._src.array.ArrayImpl": "arrays are recognized by one comparison of types",
    "jax._src.lib.utils.absl_set_min_log_level": "XLA is quiet about copies that tests make",
    "jax._src.config.persistent_cache_min_compile_time_secs": "compiling without the cache, "
    "for the files of the compiler",
    "jax._src.config.trace_context": "what of JAX's configuration a trace depends on",
    "jax._src.config.trace_context_names": "the names for it",
    "jax._src.config.traceback_in_locations_limit": "exported programs without our source lines",
    "jax._src.core.ShardingTypeError": "the error for an operation that cannot be typed",
    "jax._src.core.get_axis_env": "the mesh axes over which a surrounding vmap is sharded",
    "jax._src.core.trace_ctx": "which arrays a trace has captured",
    "jax._src.core.trace_state_clean": "whether JAX is tracing",
    "jax._src.distributed.global_state": "by which processes agree on batches",
    "jax._src.interpreters.mlir.make_ir_context": "reading a lowered program in another process",
    "jax._src.lax.lax._convert_element_type": "an array with a weak type",
    "jax._src.lib._jax.CompileOnlyPyClient": "which clients compile but run nothing",
    "jax._src.lib.mlir.ir.Module": "reading a lowered program in another process",
    "jax._src.lib.xla_client": "the options and devices that it is compiled for",
    "jax._src.mesh.thread_resources": "the mesh of the older `with mesh:`",
    "jax._src.named_sharding.DuplicateSpecError": "the error for an axis that is used twice",
    "jax._src.shard_map.ShardMapTracer": "whether a shard_map runs uncompiled",
    "jax._src.sharding.IndivisibleError": "the error that we explain",
    "jax._src.source_info_util": "locations of operations without our frames",
    "jax._src.traceback_util": "tracebacks without our frames",
    "jaxlib.xla_client.make_cpu_client": "virtual devices to plan for",
    "_device_assignment": "the devices of a sharding in their order",
    "_jax_trace": "the trace of a Variable",
    "_logical_device_ids": "the same sharding on devices in another order",
    "_convert_element_type": "an array with a weak type",
    "_call": "the function in C of a compiled program",
    "_can_update": "whether a Variable may be changed here",
    "_lowering": "compiling in another process what JAX has lowered in this one",
    "_mapping": "the items of HashableMapping, whose iterator is slow",
    "_pytree__is_pytree": "whether JAX can flatten a module",
    "_pytree__nodes": "which attributes of a module are data",
    "_pytree__state": "the trace that a module belongs to",
    "_trace": "whether a value is batched by the innermost vmap",
    "_trace_ref": "whether two of Flax's traces are the same, without a comparison in Python",
    "_trace_state": "the trace of a module",
}


def private_names(path: pathlib.Path) -> set[str]:
    """The private names that a file mentions; those that it imports, with their modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="private_name"), args=args):
                found.add(".".join(ast.literal_eval(arg) for arg in args))
            case (
                ast.Attribute(attr=name)
                | ast.keyword(arg=str(name))
                | ast.Constant(value=str(name))
            ):
                if re.fullmatch(r"_[a-z]\w*", name):
                    found.add(name)
    return found - {"_fields"}  # of named tuples, where it is public


class PrivateNamesTest(absltest.TestCase):
    def test_list_is_complete(self):
        self.assertEqual(set().union(*map(private_names, COMPAT)), PRIVATE_NAMES.keys())

    def test_all_are_there(self):
        """A missing optional name raises nothing, so this test has to notice it."""
        optional = [
            ast.literal_eval(arg)
            for path in COMPAT
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and "optional" in [word.arg for word in node.keywords]
            for arg in [ast.Tuple(node.args, ast.Load())]
        ]
        self.assertNotEmpty(optional)
        for module, name in optional:
            self.assertIsNotNone(_compat.private_name(module, name), name)

    def test_missing_name(self):
        self.assertIsNone(_compat.private_name("jax._src.array", "Missing", optional=True))
        self.assertIsNone(_compat.private_name("jax._src.missing", "ArrayImpl", optional=True))
        for module, name in (("jax._src.array", "Missing"), ("jax._src.missing", "ArrayImpl")):
            with self.assertRaisesRegex(ImportError, f"{module}.{name}.*{jax.__version__}"):
                _compat.private_name(module, name)

    def test_traces(self):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        states = [model._pytree__state, _compat.get_trace_state(model.kernel)]
        self.assertTrue(_compat.are_current(states))
        jax.eval_shape(lambda: self.assertFalse(_compat.are_current(states)))

    def test_default_of_shardings(self):
        default = inspect.signature(jax.jit).parameters["out_shardings"].default
        self.assertTrue(_compat.is_unspecified(default))
        self.assertFalse(_compat.is_unspecified(jax.sharding.PartitionSpec()))

    def test_messages(self):
        """The texts by which errors are recognized are those of the installed releases."""
        x, mesh = jnp.ones(2), jax.make_mesh((2,), ("x",))
        with self.assertRaises((RuntimeError, ValueError)) as caught:
            donating = jax.jit(lambda x: x + 1, donate_argnums=0)
            donating(x), donating(x)
        self.assertTrue(_compat.is_deleted_error(caught.exception))
        self.assertFalse(_compat.is_mesh_error(caught.exception))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones(2))
        self.assertStartsWith(str(caught[0].message), _compat.UNUSED_DONATION)
        y = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, P("x")))
        with self.assertRaises(Exception) as caught:
            jax.shard_map(lambda x: x + y, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(y)
        self.assertTrue(_compat.is_mesh_error(caught.exception))

    def test_array_type(self):
        self.assertIs(type(jnp.ones(1)), _compat.ArrayImpl)

    def test_variable_slots(self):
        variable = nnx.Param(jnp.ones(2), tag="t")
        _compat.set_value(variable, 3)
        _compat.set_metadata(variable, {**_compat.get_metadata(variable), "tag": "u"})
        self.assertEqual((variable.get_raw_value(), variable.tag), (3, "u"))

    def test_attributes_are_those_of_flax(self):
        """The direct way to read a module gives what Flax's own gives."""
        for node in (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.List([1, jnp.ones(1)]), nnx.Rngs(0)):
            impl = nnx.graphlib.get_node_impl(node)
            expected = [
                (key, getattr(value, "value", value), isinstance(value, nnx.graphlib.DataElem))
                for key, value in impl.flatten(node)[0]
            ]
            items = _compat.node_items(node, {}, set())
            self.assertIs(items.form.metadata, type(node))
            columns = zip(items.form.keys, items.values, items.form.is_data, strict=True)
            for (key, value, is_data), other in zip(columns, expected, strict=True):
                self.assertEqual((key, is_data), (other[0], other[2]))
                if key == _compat.STATUSES:  # equal ones are shared, and so compared by identity
                    self.assertEqual(value, other[1])
                else:
                    self.assertIs(value, other[1])

    def test_forms_are_shared(self):
        """They have the names of attributes and what is data, but no values."""

        def module(**attributes):
            return nnx.Dict(kernel=nnx.Param(1.0), **attributes)

        same, other = module(rate=2), module(rate=jnp.ones(1))
        form = _compat.node_items(module(rate=1), {}, set()).form
        items = _compat.node_items(same, {}, set())
        self.assertIs(items.form, form)
        self.assertEqual(items.values[form.keys.index("rate")], 2)
        self.assertNotEqual(_compat.node_items(other, {}, set()).form, form)

    def test_trace(self):
        self.assertTrue(_compat.trace_is_clean())
        seen = []
        jax.jit(lambda: seen.append(_compat.trace_is_clean()))()
        self.assertEqual(seen, [False])
