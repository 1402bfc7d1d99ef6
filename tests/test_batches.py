"""``shard_batches`` and ``process_rows``, compared with the batches and with plain JAX."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import threading
import time
import traceback
import tracemalloc
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding
from nnx_sharding.errors import NoMeshError
from nnx_sharding.placement import process_rows, shard_batches
from zoo import fails, mesh_of

try:
    import grain
except ImportError:
    grain = None

MESH = mesh_of((4, 2), ("data", "model"))
padded = functools.partial(shard_batches, uneven="pad")


def rows(start, end):
    """A batch with different rows in every leaf."""
    numbers = np.arange(start, end)
    return {"id": numbers.astype(np.int32), "x": (numbers[:, None] * [1.0, 0.5]).astype(np.float32)}


def loader(total, size):
    return [rows(i, min(i + size, total)) for i in range(0, total, size)]


def ids(pairs):
    """The ids of all loaded rows according to the masks, in order."""
    return [int(i) for batch, mask in pairs for i in np.asarray(batch["id"])[np.asarray(mask)]]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("nnx_sharding-batches")]


def wait_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


class Counted:
    """A re-iterable that counts the batches taken from it."""

    def __init__(self, batches):
        self.batches, self.taken = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.taken += 1
            yield batch


class Stateful:
    """An iterator with a state, as those of Grain; the state is one mutable object."""

    def __init__(self, batches):
        self.batches, self.state = batches, {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["next"] >= len(self.batches):
            raise StopIteration
        self.state["next"] += 1
        return self.batches[self.state["next"] - 1]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = dict(state)


class Tensor:
    """A tensor of another library."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Bfloat16Tensor(Tensor):
    """NumPy lacks bfloat16, so PyTorch exports such tensors by DLPack only."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **kwargs):
        return jnp.asarray(self.array).__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return jnp.asarray(self.array).__dlpack_device__()


class TestCase(parameterized.TestCase):
    def tearDown(self):
        if threads():
            gc.collect()
            self.assertTrue(wait_for(lambda: not threads()), threads())
        super().tearDown()


class ShardedTest(TestCase):
    @parameterized.parameters(
        ({"id": P("data"), "x": P("data", "model")},),
        (StateSharding({nnx.PathContains("x"): P("data", "model"), ...: P("data")}),),
        ({"id": NamedSharding(MESH, P("data")), "x": NamedSharding(MESH, P("data", "model"))},),
    )
    def test_as_device_put(self, spec):
        specs = {"id": P("data"), "x": P("data", "model")}
        shardings = {name: NamedSharding(MESH, each) for name, each in specs.items()}
        found = list(padded(loader(16, 8), spec, MESH))
        self.assertLen(found, 2)
        for (batch, mask), plain in zip(found, loader(16, 8), strict=True):
            expected = jax.device_put(plain, shardings)
            self.assertEqual(jax.tree.structure(batch), jax.tree.structure(expected))
            for ours, theirs in zip(*map(jax.tree.leaves, (batch, expected)), strict=True):
                self.assertEqual((ours.sharding, ours.dtype), (theirs.sharding, theirs.dtype))
                np.testing.assert_array_equal(ours, theirs)
            self.assertEqual((mask.dtype, mask.shape), (np.bool_, (8,)))
            self.assertEqual(mask.sharding, NamedSharding(MESH, P("data")))
            self.assertTrue(mask.all())

    def test_one_spec_for_all(self):
        batch = {"x": np.ones((8, 3)), "deep": [np.ones((8, 2, 2), np.int64)], "scale": 2.5, "n": 3}
        [(found, _)] = padded([batch], P("data"), MESH)
        specs = [array.sharding.spec for array in jax.tree.leaves(found)]
        self.assertEqual(specs, [P("data"), P(), P(), P("data")])
        self.assertEqual(
            jax.tree.map(lambda x: x.dtype, found),
            jax.tree.map(lambda x: jnp.asarray(x).dtype, batch),
        )
        self.assertEqual((float(found["scale"]), int(found["n"])), (2.5, 3))

    def test_mesh_in_context(self):
        for kind in ("auto", "explicit"):
            mesh = mesh_of((4, 2), ("data", "model"), kind)
            with jax.set_mesh(mesh):
                batches = padded(loader(8, 8), P("data"))
            [(batch, _)] = batches
            self.assertEqual(batch["x"].sharding, NamedSharding(mesh, P("data")))

    def test_other_shardings(self):
        one = SingleDeviceSharding(jax.devices()[3])
        found = list(padded(loader(5, 3), one))
        self.assertEqual(ids(found), [0, 1, 2, 3, 4])
        self.assertEqual(found[0][1].sharding, one)
        host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
        [(batch, _)] = padded(loader(4, 4), host)
        self.assertEqual(batch["x"].sharding, host)

    def test_foreign_arrays(self):
        numbers = np.arange(8, dtype=np.float32)
        short = numbers.astype(ml_dtypes.bfloat16)
        batch = [Tensor(numbers), Bfloat16Tensor(short), jnp.asarray(numbers), numbers[::-1]]
        found = shard_batches([batch, list(batch)], P("data"), MESH, uneven="error")
        for ours in found:
            for array, expected in zip(ours, [numbers, short, numbers, numbers[::-1]], strict=True):
                np.testing.assert_array_equal(array, expected)
                self.assertEqual(array.dtype, expected.dtype)

    def test_foreign_arrays_are_padded(self):
        short = np.arange(3).astype(ml_dtypes.bfloat16)
        batch = [Tensor(np.arange(3)), jnp.arange(3), Bfloat16Tensor(short)]
        [(found, mask)] = padded([batch], P("data"), MESH, batch_size=4)
        for array in found:
            np.testing.assert_array_equal(array, [0, 1, 2, 2])
        np.testing.assert_array_equal(mask, [True, True, True, False])

    def test_none_passes_leaves_through(self):
        names = np.array(["a", "b", "c", "d"])
        thing = object()
        batch = {"x": np.ones(4), "names": names, "thing": thing, "empty": None, "time": 2**60}
        specs = {"x": P("data"), "names": None, "thing": None, "empty": None, "time": None}
        [(found, _)] = padded([batch], specs, MESH)
        self.assertEqual(found["time"], 2**60)
        self.assertIs(found["names"], names)
        self.assertIs(found["thing"], thing)
        self.assertIsNone(found["empty"])

    def test_keys(self):
        keys = jax.random.split(jax.random.key(0), 8)
        [_, (short, mask)] = padded([keys, keys[:5]], P("data"), MESH, copy=True)
        np.testing.assert_array_equal(mask, np.arange(8) < 5)
        expected = jax.random.key_data(keys[np.array([0, 1, 2, 3, 4, 4, 4, 4])])
        np.testing.assert_array_equal(jax.random.key_data(short), expected)

    def test_integers_that_JAX_would_shorten(self):
        ids = np.arange(8) + 2**31 - 4
        with self.assertRaisesRegex(ValueError, r"batch: int64\[rows\], 2147483644 to 2147483651"):
            list(padded([ids], P("data"), MESH))
        with jax.enable_x64(True):
            [(found, _)] = padded([ids], P("data"), MESH)
            np.testing.assert_array_equal(found, ids)
        steps = [{"x": np.ones(4), "step": step} for step in (1, 2**40, 2**70)]
        for refused in (steps[1:2], steps[:2]):
            with self.assertRaisesRegex(ValueError, r"32 bits.*\n  batch\['step'\].*1099511627776"):
                list(padded(refused, P("data"), MESH))
        with self.assertRaisesRegex(TypeError, r"batch\['step'\]: an array of dtype object"):
            list(padded(steps[2:], P("data"), MESH))

    def test_x64_of_the_users_thread(self):
        with jax.enable_x64(True):
            [(batch, _)] = padded([np.ones(4)], P("data"), MESH)
            self.assertEqual(batch.dtype, np.float64)

    def test_x64_of_the_iteration(self):
        """Its setting may change while it goes on; full batches are placed without more checks."""
        with jax.enable_x64(True):
            batches = iter(shard_batches([np.ones(4)] * 3, P("data"), MESH, prefetch=0))
            dtypes = [next(batches).dtype]
        dtypes += [next(batches).dtype]
        self.assertFalse(jax.config.jax_enable_x64)
        with jax.enable_x64(True):
            dtypes += [next(batches).dtype]
        self.assertEqual(dtypes, [np.float64] * 3)

    def test_masks_and_batches_can_be_donated(self):
        step = jax.jit(lambda x, mask: (x + 1, ~mask), donate_argnums=(0, 1))
        total = 0
        for batch, mask in padded([np.ones(8, np.float32)] * 5, P("data"), MESH):
            total += int(step(batch, mask)[0].sum())
        self.assertEqual(total, 80)


class UnevenTest(TestCase):
    @given(
        sizes=st.lists(st.integers(0, 8), max_size=6),
        prefetch=st.integers(0, 3),
        uneven=st.sampled_from(["pad", "drop"]),
    )
    def test_every_row_once_and_in_order(self, sizes, prefetch, uneven):
        ends = list(itertools.accumulate(sizes))
        source = [rows(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        batches = shard_batches(
            source, P("data"), MESH, batch_size=8, prefetch=prefetch, uneven=uneven
        )
        if uneven == "drop" and any(sizes) and 8 not in sizes:
            with self.assertRaisesRegex(ValueError, "'drop' left out every batch"):
                list(batches)
            return
        found = list(batches)
        if uneven == "pad":
            self.assertEqual(ids(found), list(range(sum(sizes))))
            self.assertEqual(
                [int(mask.sum()) for _, mask in found], [size for size in sizes if size]
            )
            self.assertTrue(all(batch["x"].shape == (8, 2) for batch, _ in found))
        else:
            full = [batch["id"] for batch, size in zip(source, sizes, strict=True) if size == 8]
            self.assertEqual([b["id"].tolist() for b in found], [b.tolist() for b in full])

    def test_padding_repeats_loaded_rows(self):
        *_, (batch, mask) = padded(loader(10, 8), P("data"), MESH)
        np.testing.assert_array_equal(batch["id"], [8, 9, 9, 9, 9, 9, 9, 9])
        np.testing.assert_array_equal(mask, [True] * 2 + [False] * 6)

    def test_drop_and_error(self):
        dropped = list(shard_batches(loader(20, 8), P("data"), MESH, uneven="drop"))
        self.assertEqual([b["id"][0].item() for b in dropped], [0, 8])
        batches = iter(shard_batches(loader(20, 8), P("data"), MESH, uneven="error"))
        self.assertEqual([int(next(batches)["id"][0]) for _ in range(2)], [0, 8])
        with self.assertRaisesRegex(ValueError, r"batch 2 \(from 0\) has 4 rows, fewer than 8"):
            next(batches)
        self.assertEqual(list(batches), [])
        with self.assertRaisesRegex(ValueError, r"batch 1 \(from 0\) has no rows"):
            list(shard_batches([rows(0, 8), rows(8, 8)], P("data"), MESH, uneven="error"))

    def test_the_mask_is_sharded_like_the_leaf_with_the_most_shards(self):
        spec = {"id": P(), "x": P(("data", "model"))}
        [(batch, mask)] = padded(loader(5, 5), spec, MESH, batch_size=8)
        self.assertEqual(mask.sharding, NamedSharding(MESH, P(("data", "model"))))
        self.assertEqual(batch["id"].sharding, NamedSharding(MESH, P()))

    def test_no_batches(self):
        for uneven in ("pad", "drop", "error"):
            self.assertEqual(list(shard_batches([], P("data"), MESH, uneven=uneven)), [])


class ErrorTest(TestCase):
    def check(self, error, parts, batches, spec=P("data"), mesh=MESH, **options):  # noqa: B008
        """Iterating raises an error with all of these parts, with a thread and without."""
        for prefetch in (0, 2):
            with fails(error, *parts):
                list(padded(batches, spec, mesh, prefetch=prefetch, **options))

    def test_leading_dimensions(self):
        batch = {"a": np.ones(8), "b": [np.ones((7, 2))], "c": np.ones((8, 1))}
        self.check(ValueError, ["batch['a']: 8 rows", "batch['b'][0]: 7 rows"], [batch])

    def test_indivisible(self):
        batch = {"a": np.ones(6), "b": np.ones((6, 2))}
        parts = ["batches of 6 rows", "batch['a'] by 'data' (4)", "batch['b']", "batch_size=8"]
        self.check(ValueError, parts, [batch])
        self.check(ValueError, ["batch_size=8"], [batch], batch_size=7)
        specs = {"a": P("data"), "b": P(("data", "model"))}
        self.check(ValueError, ["'data' (4) × 'model' (2)", "batch_size=8"], [batch], specs)

    def test_specs_that_do_not_fit(self):
        batch = {"a": np.ones((8, 3)), "b": np.ones(8)}
        specs = {"a": P("data", "model"), "b": P("data", "model")}
        parts = [
            "batch['a'], shape (8, 3)",
            "dimension 1 of size 3 is not divisible by 'model' (2)",
            "batch['b']",
            "2 entries, the array 1 dimension",
        ]
        self.check(ValueError, parts, [batch], specs)
        parts = ["batch['b']", "no axis 'dta'; did you mean 'data'?"]
        self.check(ValueError, parts, [batch], {"a": P(), "b": P("dta")})
        self.check(ValueError, ["UNCONSTRAINED"], [batch], P(P.UNCONSTRAINED))
        layout = Format(Layout((0,)), NamedSharding(MESH, P("data")))
        self.check(ValueError, ["without a memory layout"], [np.ones(8)], layout)

    def test_structure_changes(self):
        first = {"a": np.ones(4), "b": np.ones(4)}
        self.check(
            ValueError,
            ["batch['c']: new", "batch['b']: missing"],
            [first, {"a": np.ones(4), "c": np.ones(4)}],
        )
        self.check(ValueError, ["structure"], [(np.ones(4),), [np.ones(4)]])

    def test_shapes_and_dtypes_change(self):
        first = {"a": np.ones((4, 2), np.float32), "b": np.ones(4, np.int32), "c": 1}
        other = {"a": np.ones((4, 3), np.float32), "b": np.ones(4, np.uint8), "c": 1.5}
        parts = [
            "batch['a']: float32[rows, 2] became float32[rows, 3]",
            "batch['b']: int32[rows] became uint8[rows]",
            "batch['c']: int32[] became float32[]",
        ]
        self.check(ValueError, parts, [first, other])
        self.check(
            ValueError, ["float64[rows] became float64[rows, 1]"], [np.ones(4), np.ones((4, 1))]
        )

    @parameterized.named_parameters(
        ("structure", ValueError, "structure", lambda x, y: (x, y)),
        ("type", TypeError, "text", lambda x, y: ["text", y]),
        ("dtype", ValueError, "became int32", lambda x, y: [x.astype(np.int32), y]),
        ("row", ValueError, r"\[rows, 3\]", lambda x, y: [np.ones((8, 3), np.float32), y]),
        ("rank", ValueError, r"\[rows\]", lambda x, y: [x[:, 0], y]),
        ("rows", ValueError, "16 rows, more", lambda *pair: [np.repeat(x, 2, 0) for x in pair]),
        ("rows_of_one", ValueError, "4 rows", lambda x, y: [x[:4], y]),
        ("fewer_rows", None, "", lambda x, y: [x[:4], y[:4]]),
        ("number", ValueError, "became", lambda x, y: [np.float32(1), y]),
        ("subclass", None, "", lambda x, y: [x.view(np.memmap), y]),
        ("masked", TypeError, r"\[0\]: a masked", lambda x, y: [np.ma.masked_array(x, x > 2), y]),
        ("foreign", None, "", lambda x, y: [Tensor(x), y]),
        ("jax_array", None, "", lambda x, y: [jnp.asarray(x), y]),
        ("order_of_bytes", ValueError, "became", lambda x, y: [x.astype(">f4"), y]),
    )
    def test_a_batch_that_differs_from_full_ones(self, error, text, change):
        """After two full batches, which need few checks: an error, or what `device_put` makes."""
        arrays = [np.arange(16, dtype=np.float32).reshape(8, 2), np.ones((8, 1), np.float32)]
        batches = [arrays, arrays, change(*arrays), arrays]
        for prefetch in (0, 2):
            iterator = iter(shard_batches(batches, P("data"), MESH, prefetch=prefetch))
            next(iterator), next(iterator)
            if error is not None:
                with self.assertRaisesRegex(error, text):
                    next(iterator)
                continue
            for batch in iterator:  # that with fewer rows is dropped
                for array, host in zip(batch, arrays, strict=True):
                    np.testing.assert_array_equal(array, host)
                    self.assertEqual(array.sharding, NamedSharding(MESH, P("data")))

    def test_leaves_that_are_not_arrays(self):
        batch = {"a": np.ones(4), "b": "text", "c": np.array(["x"] * 4), "d": object()}
        batch["e"] = np.ma.masked_array([1, 2, 3, 4], [False, True, False, False])
        parts = [
            "batch['b']: 'text' of type str",
            "batch['c']: an array of dtype <U1",
            "batch['d']",
            "batch['e']: a masked array: yield its data and its mask",
        ]
        self.check(TypeError, [*parts, "spec None"], [batch])
        self.check(TypeError, ["batch['b']"], [{"b": np.ones(4)}, {"b": "text"}])
        broken = Tensor(None)
        broken.__class__ = type("Broken", (), {"__array__": lambda *a, **k: 1 / 0})
        self.check(TypeError, ["batch[0]: a Broken that gives no array: division"], [[broken]])

    def test_no_rows(self):
        for batch in (3, {"a": 1.0}, {}):
            self.check(ValueError, ["the batch has no array with rows"], [batch])

    def test_more_rows_than_the_first(self):
        self.check(
            ValueError, ["batch 1 (from 0) has 8 rows, more than 4"], loader(4, 4) + loader(8, 8)
        )

    def test_prefix(self):
        batch = {"a": np.ones(4), "b": np.ones(4)}
        self.check(ValueError, ["no spec for 'b'"], [batch], {"a": P()})
        rules = StateSharding({nnx.PathContains("a"): P("data")})
        self.check(ValueError, ["no filter", "batch['b']"], [batch], rules)

    def test_options(self):
        def refused(error, text, *args, **options):
            with self.assertRaisesRegex(error, text):
                padded(*args, **options)

        refused(NoMeshError, "needs a mesh", [], P("data"))
        refused(ValueError, "abstract", [], P("data"), AbstractMesh((4,), ("data",)))
        refused(TypeError, "mesh must be a Mesh", [], P("data"), "mesh")
        refused(TypeError, r"write P\('data'\)", [], "data", MESH)
        refused(TypeError, "iterable", 3, P("data"), MESH)
        refused(ValueError, "uneven: .*'pad', 'drop', 'error'", [], P(), MESH, uneven="skip")
        refused(ValueError, "prefetch must be at least 0", [], P(), MESH, prefetch=-1)
        refused(TypeError, "prefetch must be an integer", [], P(), MESH, prefetch=1.5)
        refused(TypeError, "batch_size must be an integer", [], P(), MESH, batch_size="8")
        refused(ValueError, "batch_size must be at least 1", [], P(), MESH, batch_size=0)


class LoaderFailureTest(TestCase):
    @parameterized.parameters(0, 1, 3)
    def test_errors_come_in_order_with_their_traceback(self, prefetch):
        def broken_loader():
            yield from loader(16, 8)
            raise OSError("disk")

        batches = iter(padded(broken_loader(), P("data"), MESH, prefetch=prefetch))
        self.assertEqual([int(next(batches)[0]["id"][0]) for _ in range(2)], [0, 8])
        frames = []
        try:
            next(batches)
        except OSError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        self.assertEqual(frames[-1:], ["broken_loader"])
        with self.assertRaises(StopIteration):
            next(batches)

    def test_interrupt_in_the_loader(self):
        def interrupted():
            yield rows(0, 8)
            raise KeyboardInterrupt

        batches = iter(padded(interrupted(), P("data"), MESH))
        next(batches)
        with self.assertRaises(KeyboardInterrupt):
            next(batches)


class ThreadTest(TestCase):
    @parameterized.parameters(0, 1, 2, 4)
    def test_depth_is_bounded(self, prefetch):
        source = Counted([rows(0, 8)] * 12)
        batches = iter(padded(source, P("data"), MESH, prefetch=prefetch))
        self.assertEqual(source.taken, 0)
        for used in range(1, 9):
            next(batches)
            self.assertTrue(wait_for(lambda: source.taken == used + prefetch))
            time.sleep(0.01)
            self.assertEqual(source.taken, used + prefetch)
        self.assertLen(threads(), 1 if prefetch else 0)
        batches.close()
        self.assertEqual(threads(), [])

    def test_ends_when_exhausted_closed_or_dropped(self):
        batches = padded(loader(80, 8), P("data"), MESH)
        list(batches)
        self.assertTrue(wait_for(lambda: not threads()))
        for _ in batches:
            break
        self.assertTrue(wait_for(lambda: not threads()))
        with batches:
            first, second = iter(batches), iter(batches)
            next(first), next(second)
            self.assertLen(threads(), 2)
        self.assertEqual(threads(), [])
        self.assertEqual(list(first), [])
        with iter(batches) as third:
            next(third)
        self.assertEqual(threads(), [])
        self.assertLen(list(batches), 10)

    def test_the_loader_is_released(self):
        source = Counted(loader(80, 8))
        alive = weakref.ref(source)
        batches = iter(padded(source, P("data"), MESH))
        next(batches)
        del source
        batches.close()
        del batches
        gc.collect()
        self.assertIsNone(alive())

    def test_close_while_waiting(self):
        go = threading.Event()

        def stuck():
            yield rows(0, 8)
            go.wait()

        batches = iter(padded(stuck(), P("data"), MESH))
        next(batches)
        rest = []
        waiting = threading.Thread(target=lambda: rest.extend(batches))
        waiting.start()
        closing = threading.Thread(target=batches.close)
        closing.start()
        waiting.join(5)
        self.assertFalse(waiting.is_alive())
        go.set()
        closing.join(5)
        self.assertEqual(rest, [])

    def test_no_thread_to_be_had(self):
        batches = iter(padded(loader(8, 8), P("data"), MESH))
        refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("none"))
        with refused, self.assertRaisesRegex(RuntimeError, "none"):
            next(batches)
        batches.close()
        self.assertEqual(list(batches), [])
        batches = iter(padded(loader(8, 8), P("data"), MESH))
        with refused, self.assertRaises(RuntimeError):
            next(batches)
        self.assertLen(list(batches), 1)

    def test_a_second_loop_continues_a_generator(self):
        batches = padded((b for b in loader(40, 8)), P("data"), MESH)
        first = [b for b, _ in zip(batches, range(2), strict=False)]
        # `zip` has taken one more.
        self.assertEqual(ids(first) + ids(batches), [*range(16), *range(24, 40)])

    def test_loading_overlaps_computing(self):
        def slow():
            for batch in loader(64, 8):
                time.sleep(0.02)
                yield batch

        def seconds(prefetch):
            batches = iter(padded(slow(), P("data"), MESH, prefetch=prefetch))
            next(batches)
            start = time.perf_counter()
            for _ in batches:
                time.sleep(0.02)  # like a step of a device
            return time.perf_counter() - start

        # 7 × (20 + 20) ms without overlap, 7 × 20 ms with it.
        self.assertGreaterEqual(seconds(0), 0.28)
        self.assertTrue(any(seconds(2) < 0.24 for _ in range(5)))


def grain_loaders():
    """Loaders of Grain over 44 rows, 8 at a time: iterators with a dict and with bytes as state."""
    numbers = grain.MapDataset.source(np.arange(44)).map(lambda i: rows(i, i + 1))
    numbers = numbers.map(lambda row: jax.tree.map(lambda x: x[0], row))
    even = numbers.seed(1).shuffle().to_iter_dataset().filter(lambda row: row["id"] % 2 == 0)
    sampler = grain.samplers.IndexSampler(44, shuffle=True, seed=1, num_epochs=2)

    class Row(grain.transforms.Map):
        def map(self, i):
            return jax.tree.map(lambda x: x[0], rows(i, i + 1))

    source = grain.sources.RangeDataSource(0, 44, 1)
    operations = [Row(), grain.transforms.Batch(8)]
    return {
        "MapDataset": numbers.seed(1).shuffle().repeat(2).batch(8),
        "IterDataset": even.batch(8),
        "mixed": grain.MapDataset.mix([numbers, numbers.shuffle(seed=2)], [1, 3]).batch(8),
        "DataLoader": grain.DataLoader(data_source=source, sampler=sampler, operations=operations),
    }


class StateTest(TestCase):
    @parameterized.parameters(0, 1, 3)
    def test_state_after_the_yielded_batches(self, prefetch):
        source = Stateful(loader(44, 8))
        batches = iter(padded(source, P("data"), MESH, prefetch=prefetch))
        start = batches.get_state()
        seen = [next(batches) for _ in range(2)]
        wait_for(lambda: source.state["next"] == 2 + prefetch)
        state = batches.get_state()
        self.assertEqual(json.loads(state), {"batch_size": 8, "loader": {"next": 2}})
        seen += list(batches)
        self.assertEqual(ids(seen), list(range(44)))

        batches.set_state(state)
        self.assertEqual(batches.get_state(), state)
        self.assertEqual(ids(batches), list(range(16, 44)))
        other = iter(padded(Stateful(loader(44, 8)), P("data"), MESH, prefetch=prefetch))
        next(other)
        other.set_state(start)  # while its thread runs
        self.assertEqual(ids(other), list(range(44)))

    @parameterized.parameters(0, 2)
    def test_state_after_a_batch_that_fails(self, prefetch):
        """It is that before the batch, also if the loader gives out or keeps one object."""
        source = Stateful([{"x": np.ones(3)}, *loader(16, 8)])
        source.set_state = lambda state: setattr(source, "state", state)
        batches = iter(shard_batches(source, P("data"), MESH, prefetch=prefetch, uneven="error"))
        start = batches.get_state()
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, "cannot be sharded evenly"):
                next(batches)
            self.assertEqual(batches.get_state(), start)
            batches.set_state(start)

    @parameterized.product(
        name=("MapDataset", "IterDataset", "mixed", "DataLoader"),
        uneven=("pad", "drop"),
        prefetch=(0, 3),
    )
    def test_grain(self, name, uneven, prefetch):
        """A new iterator yields what the dropped one would have: no row is lost or comes twice."""
        if grain is None:
            self.skipTest("grain is not installed")

        def begin():
            options = {"uneven": uneven, "prefetch": prefetch}
            return iter(shard_batches(grain_loaders()[name], P("data"), MESH, **options))

        uninterrupted = list(begin())
        for stop in {1, 2, len(uninterrupted) - 1, len(uninterrupted)}:
            killed = begin()
            for _ in range(stop):
                next(killed)
            time.sleep(0.01)  # while more is loaded ahead
            state = killed.get_state()
            killed.close()
            resumed = begin()
            resumed.set_state(state)
            for ours, theirs in zip(resumed, uninterrupted[stop:], strict=True):
                jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        if uneven == "pad":
            expected = {"IterDataset": list(range(0, 44, 2))}.get(name, sorted([*range(44)] * 2))
            if name != "mixed":
                self.assertEqual(sorted(ids(uninterrupted)), expected)

    def test_the_last_batch_alone_is_as_small_as_before(self):
        """What is full is known from the state, not from the first batch that comes."""
        for uneven, expected in (("drop", []), ("pad", [(8, 2)])):
            batches = iter(shard_batches(Stateful(loader(20, 8)), P("data"), MESH, uneven=uneven))
            next(batches), next(batches)
            other = iter(shard_batches(Stateful(loader(20, 8)), P("data"), MESH, uneven=uneven))
            other.set_state(batches.get_state())
            self.assertEqual([batch[0]["x"].shape for batch in other], expected)

    def test_errors(self):
        batches = iter(padded(loader(8, 8), P("data"), MESH))
        with self.assertRaisesRegex(TypeError, "list_iterator has no get_state"):
            batches.get_state()
        with self.assertRaisesRegex(TypeError, "no set_state"):
            batches.set_state(b"")
        batches = iter(padded(Stateful(loader(16, 8)), P("data"), MESH))
        next(batches)
        for state in (b"", b"[]", b"{}", b'{"batch_size": 8}', {"next": 0}, None):
            with self.assertRaisesRegex(ValueError, "expected a state from get_state, got"):
                batches.set_state(state)
        self.assertEqual(ids(batches), list(range(8, 16)))


class PaddingTest(TestCase):
    def test_batch_norm(self):
        """With the mask the statistics are those of the loaded rows; by default none are padded."""
        x = np.arange(9, dtype=np.float32)[:, None] * np.ones(4, np.float32)

        def statistics(norm, x, **options):
            out = norm(x, **options)
            return out, norm.mean[...], norm.var[...]

        def norm():
            return nnx.BatchNorm(4, momentum=0, rngs=nnx.Rngs(0))

        expected, mean, variance = statistics(norm(), x)
        np.testing.assert_allclose(mean, 4)
        [(batch, mask)] = padded([x], P("data"), MESH, batch_size=16)
        found, *masked = statistics(norm(), batch, mask=mask[:, None])
        np.testing.assert_allclose(masked[0], mean, rtol=1e-6)
        np.testing.assert_allclose(masked[1], variance, rtol=1e-6)
        np.testing.assert_allclose(found[:9], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(statistics(norm(), batch)[1], 5.75)
        with self.assertRaisesRegex(ValueError, "left out every batch: 1, all with fewer than 16"):
            list(shard_batches([x], P("data"), MESH, batch_size=16))


class CopiesTest(TestCase):
    def measured(self, batches, **options):
        """Bytes that Python and NumPy allocate at most, as a multiple of a full batch."""
        shard = functools.partial(shard_batches, sharding=P("data"), mesh=MESH, prefetch=0)
        list(shard(batches=batches, **options))
        tracemalloc.start()
        try:
            for _ in shard(batches=batches, **options):
                pass
            return tracemalloc.get_traced_memory()[1] / batches[0].nbytes
        finally:
            tracemalloc.stop()

    def test_only_uneven_batches_are_copied(self):
        full = np.ones((64, 1 << 14), np.float32)
        self.assertLess(self.measured([full] * 3), 0.05)
        self.assertLess(self.measured([full, full[:40]]), 1.05)
        self.assertGreater(self.measured([full] * 3, copy=True), 0.95)

    def test_a_loader_that_reuses_its_arrays(self):
        def reusing():
            memory = np.empty((8, 1 << 12), np.float32)
            for number in range(4):
                memory[:] = number
                yield memory

        found = list(padded(reusing(), P("data"), MESH, copy=True))
        self.assertEqual([float(batch.min()) for batch, _ in found], [0, 1, 2, 3])


class ProcessRowsTest(TestCase):
    def test_one_process_has_all_rows(self):
        for spec in (P("data"), P(), P(None, "data"), P(("model", "data"))):
            self.assertEqual(process_rows(spec, 16, mesh=MESH), slice(0, 16))
        self.assertEqual(process_rows(SingleDeviceSharding(jax.devices()[0]), 5), slice(0, 5))
        with jax.set_mesh(MESH):
            self.assertEqual(process_rows(P("data"), 16), slice(0, 16))

    @parameterized.parameters(
        (P("data"), 2, [range(0, 8), range(8, 16)]),
        (P("model"), 2, [range(16)] * 2),
        (P(("data", "model")), 4, [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]),
        (P(("model", "data")), 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        (P(None, "data"), 2, [range(16)] * 2),
    )
    def test_several_processes(self, spec, count, expected):
        each = [
            process_rows(spec, 16, p, mesh=MESH, process_of=lambda d: d.id * count // 8)
            for p in range(count)
        ]
        found = [np.arange(16)[rows].tolist() for rows in each]
        self.assertEqual(found, [list(rows) for rows in expected])
        # The rows of every device are among those of its process, according to JAX.
        for device, index in NamedSharding(MESH, spec).devices_indices_map((16, 16)).items():
            held = set(np.arange(16)[index[0]].tolist())
            self.assertLessEqual(held, set(found[device.id * count // 8]))

    def test_errors(self):
        def refused(error, text, *args, **options):
            with self.assertRaisesRegex(error, text):
                process_rows(*args, **options)

        refused(NoMeshError, "needs a mesh", P("data"), 8)
        refused(
            ValueError, r"6 rows .* 4 equal parts \('data' \(4\)\). Use 8", P("data"), 6, mesh=MESH
        )
        refused(ValueError, "Use 4 rows", P("data"), 0, mesh=MESH)
        refused(ValueError, "process 3 has none .* some are 0", P("data"), 8, 3, mesh=MESH)
        refused(ValueError, "did you mean 'data'", P("dat"), 8, mesh=MESH)
        refused(ValueError, "abstract", P("a"), 8, mesh=AbstractMesh((2,), ("a",)))
        refused(TypeError, "batch_size must be an integer", P("data"), 8.0, mesh=MESH)
        refused(TypeError, "write P\\('data'\\)", "data", 8, mesh=MESH)
        refused(TypeError, "a PartitionSpec or a Sharding, got None", None, 8, mesh=MESH)
