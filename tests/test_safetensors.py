"""Models in safetensors files, compared with what the ``safetensors`` library reads and writes."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, stack
from nnx_sharding.checkpoint import (
    Tensor,
    load_safetensors,
    save_safetensors,
    tensor_files,
    tensor_release,
)
from nnx_sharding.checkpoint.tensor_files import (
    Writer,
    create,
    open_tensors,
    read_box,
    read_header,
)
from nnx_sharding.checkpoint.tensor_files import _read_into as read_into
from nnx_sharding.cli.main import main
from nnx_sharding.errors import CheckpointError, NoCheckpointError
from nnx_sharding.partition import abstract_init
from zoo import mesh_of

safetensors = pytest.importorskip("safetensors.numpy")

MESH = mesh_of((2, 4), ("data", "model"))
EMBED, HEADS, KV, DIM, LAYERS = 16, 8, 4, 6, 3
FILES = "nnx_sharding.checkpoint.tensor_files"
WORKERS = Path(__file__).with_name("processes")
RNG = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def zeros(**shapes):
    """A model of arrays with these names and shapes."""
    return nnx.Dict({name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})


class ShortWrites(io.FileIO):
    """A file that writes less at once than it is asked to."""

    def write(self, data):
        return super().write(data[:100])


class Attention(nnx.Module):
    def __init__(self, rngs):
        options = {"use_bias": False, "rngs": rngs}
        self.q = nnx.LinearGeneral(EMBED, (HEADS, DIM), **options)
        self.kv = nnx.LinearGeneral(EMBED, (2, KV, DIM), **options)
        self.out = nnx.LinearGeneral((HEADS, DIM), EMBED, axis=(-2, -1), **options)
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, *, stacked):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, EMBED, rngs=rngs)
        one = (Attention, LAYERS)
        blocks = [Attention(rngs) for _ in range(LAYERS)]
        self.blocks = stack(*one, rngs=rngs) if stacked else nnx.List(blocks)


def rules(*, stacked):
    """Names as in Llama, with keys and values in one array."""

    def attention(name, dimensions, **options):
        if stacked:
            left, right = dimensions.split(" -> ")
            return Tensor(f"blocks/layers/{name}", f"{left} -> {{0}} {right}", **options)
        return Tensor(f"blocks/{{0}}/{name}", dimensions, **options)

    layer = r"model\.layers\.(\d+)\."
    return {
        r"model\.embed_tokens\.weight": "embed/embedding",
        layer + r"attn\.q\.weight": attention("q/kernel", "(h d) e -> e h d", h=HEADS),
        **{
            rf"{layer}attn\.{name}\.weight": attention(
                "kv/kernel", "(h d) e -> e two h d", put={"two": i}, h=KV
            )
            for i, name in enumerate("kv")
        },
        layer + r"attn\.out\.weight": attention("out/kernel", "e (h d) -> h d e", h=HEADS),
        layer + r"norm\.weight": attention("norm/scale", "e -> e"),
        r".*rotary.*": None,
    }


def llama(dtype=np.float32):
    found = {"model.embed_tokens.weight": numbers(32, EMBED, dtype=dtype)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, heads in ("q", HEADS), ("k", KV), ("v", KV):
            found[f"{layer}attn.{name}.weight"] = numbers(heads * DIM, EMBED, dtype=dtype)
        found[f"{layer}attn.out.weight"] = numbers(EMBED, HEADS * DIM, dtype=dtype)
        found[f"{layer}norm.weight"] = numbers(EMBED, dtype=dtype)
        found[f"{layer}rotary.inv_freq"] = numbers(3)
    return found


def arrays_of(tensors, i):
    """What the arrays of one layer have to be."""
    layer = f"model.layers.{i}."
    q, k, v, out = (tensors[f"{layer}attn.{name}.weight"] for name in ("q", "k", "v", "out"))
    return {
        "q": q.T.reshape(EMBED, HEADS, DIM),
        "kv": np.stack([k.T.reshape(EMBED, KV, DIM), v.T.reshape(EMBED, KV, DIM)], 1),
        "out": out.T.reshape(HEADS, DIM, EMBED),
        "norm": tensors[f"{layer}norm.weight"],
    }


def sharding(*, stacked):
    first = (None,) * stacked
    specs = {"q": P(*first, None, "model"), "out": P(*first, "model", None, "data")}
    specs |= {"kv": P(*first, "data", None, "model"), "embed": P("model")}
    return StateSharding({nnx.PathContains(name): s for name, s in specs.items()} | {...: P()})


def split_files(folder, tensors, count):
    """Several files with an index, as Hugging Face writes them."""
    names = sorted(tensors)
    located = {name: f"model-{i % count}.safetensors" for i, name in enumerate(names)}
    for file in set(located.values()):
        of_file = {name: tensors[name] for name in names if located[name] == file}
        safetensors.save_file(of_file, folder / file)
    index = {"metadata": {}, "weight_map": located}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class TestCase(parameterized.TestCase):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def write(self, tensors):
        path = self.folder / "model.safetensors"
        safetensors.save_file(tensors, path)
        return path


class LlamaTest(TestCase):
    @parameterized.product(stacked=(False, True), files=(1, 3))
    def test_load_and_save(self, stacked, files):
        tensors = llama()
        if files == 1:
            self.write(tensors)
        else:
            split_files(self.folder, tensors, files)
        model = abstract_init(Model, sharding(stacked=stacked), MESH, stacked=stacked)
        expected = jax.tree.map(lambda x: x.sharding, nnx.state(model, nnx.Param))
        assert load_safetensors(self.folder, model, rules(stacked=stacked)) is model
        found = nnx.state(model, nnx.Param)
        assert jax.tree.map(lambda x: x.sharding, found) == expected
        for i in range(LAYERS):
            for name, array in arrays_of(tensors, i).items():
                layers = model.blocks.layers if stacked else model.blocks[i]
                [ours] = jax.tree.leaves(nnx.state(getattr(layers, name), nnx.Param))
                np.testing.assert_array_equal(ours[i] if stacked else ours, array, name)
        np.testing.assert_array_equal(model.embed.embedding, tensors["model.embed_tokens.weight"])

        written = self.folder / "written"
        size = 5 * 10**9 if files == 1 else 9000
        save_safetensors(written, model, rules(stacked=stacked), max_shard_size=size)
        read = {}
        for file in written.glob("*.safetensors"):
            of_file = safetensors.load_file(file)
            assert files == 1 or sum(x.nbytes for x in of_file.values()) <= size
            read |= of_file
        kept = {name: x for name, x in tensors.items() if "rotary" not in name}
        assert read.keys() == kept.keys()
        for name, x in kept.items():
            np.testing.assert_array_equal(read[name], x, name)
        names = sorted(file.name for file in written.iterdir())
        if files == 1:
            assert names == ["model.safetensors"]
        else:
            index = json.loads((written / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(x.nbytes for x in kept.values())
            assert {*index["weight_map"].values(), "model.safetensors.index.json"} == {*names}
            again = Model(stacked=stacked)
            load_safetensors(written, again, rules(stacked=stacked))
            np.testing.assert_array_equal(again.embed.embedding, model.embed.embedding)


class DimensionsTest(TestCase):
    def both_ways(self, tensors, rules, expected, *specs):
        """Loads and compares, sharded and not, and saves the same file again."""
        path = self.write(tensors)
        shapes = {name: array.shape for name, array in expected.items()}
        for spec in (P(), *specs):
            for chunk in 2**24, 64:  # the second to read each array in several parts
                abstract = abstract_init(lambda: zeros(**shapes), StateSharding({...: spec}), MESH)
                with mock.patch("nnx_sharding.checkpoint.safetensors._CHUNK", chunk):
                    load_safetensors(path, abstract, rules)
                for name, array in expected.items():
                    found = abstract[name].get_raw_value()
                    np.testing.assert_array_equal(found, array, name)
            written = self.folder / f"written{spec}"
            save_safetensors(written, abstract, rules)
            read = safetensors.load_file(written / "model.safetensors")
            assert read.keys() == tensors.keys()
            for name, tensor in tensors.items():
                np.testing.assert_array_equal(read[name], tensor, name)

    def test_permuted_heads(self):
        """The rows of a head, from pairs to halves, as for rotary embeddings."""
        x = numbers(4 * 8, 8)
        halves = x.reshape(4, 4, 2, 8).transpose(0, 2, 1, 3).reshape(32, 8)
        rule = Tensor("q", "(h d two) e -> (h two d) e", h=4, two=2)
        specs = (P("model", "data"), P(("model", "data")), P(None, "model"))
        self.both_ways({"w": x}, {"w": rule}, {"q": halves}, *specs)

    def test_one_tensor_in_three_arrays(self):
        x = numbers((8 + 2 * 4) * 4, 8)
        split = {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}
        fused = {
            "w": [
                Tensor(n, "(h d) e -> e (h d)", h=16, d=4, take={"h": s}) for n, s in split.items()
            ]
        }
        parts = np.split(x.T, [32, 48], 1)
        expected = dict(zip("qkv", parts, strict=True))
        self.both_ways({"w": x}, fused, expected, P("data", "model"), P("model"))

    def test_interleaved_groups(self):
        """Queries of each group followed by its key and value, as in Falcon and GPT-NeoX."""
        x = numbers(4 * 4 * 3, 8)
        grouped = x.reshape(4, 4, 3, 8)
        dimensions = "(g r d) e -> g r d e", "(g r d) e -> g d e"
        sizes = {"g": 4, "r": 4}
        rules = {
            "w": [
                Tensor("q", dimensions[0], take={"r": slice(0, 2)}, **sizes),
                Tensor("k", dimensions[1], take={"r": 2}, **sizes),
                Tensor("v", dimensions[1], take={"r": 3}, **sizes),
            ]
        }
        expected = {"q": grouped[:, :2], "k": grouped[:, 2], "v": grouped[:, 3]}
        self.both_ways({"w": x}, rules, expected, P("model"), P("data", None, None))

    def test_three_tensors_in_one_array(self):
        tensors = {name: numbers(size, 8) for name, size in (("q", 32), ("k", 16), ("v", 16))}
        ranges = {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}
        rules = {n: Tensor("w", "o i -> i o", put={"o": s}) for n, s in ranges.items()}
        expected = {"w": np.concatenate(list(tensors.values())).T}
        specs = (P("data", "model"), P(None, ("model", "data")))
        self.both_ways(tensors, rules, expected, *specs)

    @parameterized.named_parameters(
        # Rows in turns, and rows that are a dimension of other axes.
        ("other_axes", "acb", [
            Tensor("a", "(h p) i -> h i", h=4, p=2, take={"h": slice(0, 2), "p": 0}),
            Tensor("c", "(h p) i -> h i", h=4, p=2, take={"h": slice(0, 2), "p": 1}),
            Tensor("b", "o i -> o i", o=8, take={"o": slice(4, 8)}),
        ]),
        # Of one array, twice the same.
        ("twice", "b", [Tensor("b", "(h o) i -> o i", h=2, take={"h": h}) for h in range(2)]),
        # An array that is a tensor of its own, too.
        ("two_tensors", "acb", [
            Tensor("a", "(h p) i -> h i", h=4, p=2, take={"h": slice(0, 2), "p": 0}),
            Tensor("c", "(h p) i -> h i", h=4, p=2, take={"h": slice(0, 2), "p": 1}),
            Tensor("b", "(h p) i -> (h p) i", h=4, p=2, take={"h": slice(2, 4)}),
        ], {"own": "b"}),
    )  # fmt: skip
    def test_all_rows_are_saved(self, names, rule, first_rules=None):
        rows = {"a": numbers(2, 3), "b": numbers(4, 3), "c": numbers(2, 3)}
        model = {name: rows[name] for name in names}
        save_safetensors(self.folder, model, {**(first_rules or {}), "t": rule})
        tensors = safetensors.load_file(self.folder / "model.safetensors")
        in_turns = np.stack([rows["a"], rows["c"]], 1).reshape(4, 3)
        first = in_turns if "a" in names else rows["b"]
        np.testing.assert_array_equal(tensors["t"], np.concatenate([first, rows["b"]]))

    def test_experts_of_layers(self):
        tensors = {f"l.{i}.e.{j}": numbers(4, 8) for i in range(2) for j in range(4)}
        rules = {r"l\.(\d+)\.e\.(\d+)": Tensor("w", "o i -> {0} {1} i o")}
        expected = np.array([[tensors[f"l.{i}.e.{j}"].T for j in range(4)] for i in range(2)])
        specs = (P("data", "model"), P(None, None, "model", "data"))
        self.both_ways(tensors, rules, {"w": expected}, *specs)

    @given(st.data())
    def test_any_region(self, data):
        """Shards whose edges are within merged dimensions, compared with NumPy."""
        sizes = dict(zip("abcd", data.draw(st.tuples(*[st.integers(1, 4)] * 4)), strict=True))

        def grouped(names):
            ends = sorted(data.draw(st.sets(st.integers(1, 3))) | {4})
            return [names[i:j] for i, j in zip([0, *ends], ends, strict=False)]

        left, right = (grouped(data.draw(st.permutations("abcd"))) for _ in range(2))
        text = " -> ".join(" ".join(f"({' '.join(g)})" for g in side) for side in (left, right))
        x = np.arange(math.prod(sizes.values()), dtype=np.int32)
        order = [n for g in left for n in g]
        atoms = x.reshape([sizes[n] for n in order])
        tensor = atoms.reshape([math.prod(sizes[n] for n in g) for g in left])
        array = atoms.transpose([order.index(n) for g in right for n in g])
        array = array.reshape([math.prod(sizes[n] for n in g) for g in right])
        path = self.write({"w": tensor})
        placement = Tensor("w", text, **sizes).place("w", (), array.shape)
        assert placement.tensor_shape == tensor.shape
        wanted = []
        for size in array.shape:
            first = data.draw(st.integers(0, size - 1))
            wanted.append((first, data.draw(st.integers(first + 1, size))))
        box = array[tuple(slice(*bounds) for bounds in wanted)]
        parts = list(placement.pieces(wanted))
        found = np.full(box.shape, -1, data.draw(st.sampled_from(["int32", "int64"])))
        short = data.draw(st.sampled_from([1, 16, 256]))
        with open_tensors("test", path) as stored, mock.patch(f"{FILES}._SHORT", short):
            for part in parts:
                view = part.view(found)
                view[...] = read_box(stored["w"], part.box).reshape(view.shape)
        np.testing.assert_array_equal(found, box)
        assert sum(math.prod(part.box.shape) for part in parts) == box.size
        create(path, {"w": tensor})
        with ShortWrites(path, "r+") as file:
            stored = read_header("test", path, file)["w"]
            writer = Writer(file)
            for part in parts:
                writer.add(stored, part.box, part.view(box + 1))
            writer.flush()
        changed = np.isin(tensor, box)
        read = safetensors.load_file(path)["w"]
        np.testing.assert_array_equal(read, np.where(changed, tensor + 1, 0))


class DtypesTest(TestCase):
    @parameterized.parameters(
        *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "int8", "uint32", "bool")
    )
    def test_dtypes(self, name):
        dtype = jnp.dtype(name)
        x = (np.arange(32).reshape(8, 4) % 3).astype(dtype)
        model = nnx.Dict(w=nnx.Param(jnp.zeros((8, 4), dtype, device=jax.devices()[1])))
        load_safetensors(self.write({"w": x}), model, {"w": "w"})
        assert model.w.dtype == dtype
        assert model.w.get_raw_value().devices() == {jax.devices()[1]}
        np.testing.assert_array_equal(np.asarray(model.w).view("u1"), x.view("u1"))
        save_safetensors(self.folder / "new", model, {"w": "w"})
        [(_, entry)] = safetensors_entries(self.folder / "new" / "model.safetensors")
        [(_, expected)] = safetensors_entries(self.folder / "model.safetensors")
        assert (entry["dtype"], entry["data"]) == (expected["dtype"], expected["data"])

    def test_the_order_of_bytes(self):
        model = {"x": np.arange(4, dtype=">f4"), "y": np.arange(3, dtype=">i2")}
        save_safetensors(self.folder, model, {"(.)": "{0}"})
        for order in "<>":
            zero = {"x": np.zeros(4, f"{order}f4"), "y": np.zeros(3, f"{order}i2")}
            for name, x in load_safetensors(self.folder, zero, {"(.)": "{0}"}).items():
                assert x.dtype == zero[name].dtype
                np.testing.assert_array_equal(x, model[name])

    def test_cast(self):
        x = numbers(4, 4, dtype=ml_dtypes.bfloat16)
        model = nnx.Dict(w=nnx.Param(jnp.zeros((4, 4))), n=nnx.Variable(np.zeros(3, np.float16)))
        n = np.array([1, 2, 3], np.float64)
        path = self.write({"w": x, "n": n})
        with self.assertRaisesRegex(CheckpointError, r"w: bfloat16, w: float32"):
            load_safetensors(path, model, {"w": "w", "n": "n"})
        load_safetensors(path, model, {"w": "w", "n": "n"}, cast=True)
        np.testing.assert_array_equal(model.w, x.astype(np.float32))
        assert type(model.n.get_raw_value()) is np.ndarray and model.n.dtype == np.float16
        for value, there, here, fits in (
            (300, np.int64, np.int32, True),
            (300, np.int32, np.uint8, False),
            (-1, np.int8, np.uint32, False),
            (2**31, np.int64, np.int32, False),
            (448, np.float32, ml_dtypes.float8_e4m3fn, True),
            (1e5, np.float32, ml_dtypes.float8_e4m3fn, False),
            (57344, ml_dtypes.float8_e5m2, np.float16, True),
            (-1, np.float32, ml_dtypes.float8_e8m0fnu, False),
            (1e5, ml_dtypes.bfloat16, np.float16, False),
            (np.inf, np.float32, np.float16, True),
            (3.4e38, np.float32, ml_dtypes.bfloat16, True),
        ):
            path = self.write({"w": np.array([1, value]).astype(there)})
            model = nnx.Dict(w=nnx.Param(np.zeros(2, here)))
            if fits:
                load_safetensors(path, model, {"w": "w"}, cast=True)
                np.testing.assert_array_equal(
                    model.w[...].astype(float), np.array([1, value]).astype(here).astype(float)
                )
            else:
                with self.assertRaisesRegex(CheckpointError, f"w: {np.dtype(there)} as"):
                    load_safetensors(path, model, {"w": "w"}, cast=True)
                assert (model.w[...].astype(float) < 1e-30).all()  # 2**-127 is the least
        integers = nnx.Dict(w=nnx.Param(jnp.zeros((4, 4), jnp.int32)))
        with self.assertRaisesRegex(CheckpointError, "bfloat16, w: int32"):
            load_safetensors(self.write({"w": x}), integers, {"w": "w"}, cast=True)

    def test_references_and_memory_of_the_host(self):
        """A reference keeps its identity; a shard that several devices hold is read once."""
        x = numbers(512, 1024)  # large enough for memory that JAX shares
        path = self.write({"w": x})
        for options in {"ref": True}, {"hijax": True}:
            model = nnx.Dict(w=nnx.Param(jnp.zeros(x.shape), **options))
            before = model.w.get_raw_value()
            load_safetensors(path, model, {"w": "w"})
            assert "hijax" in options or model.w.get_raw_value() is before
            np.testing.assert_array_equal(model.w[...], x)
            written = self.folder / next(iter(options))
            save_safetensors(written, model, {"w": "w"})
            read = safetensors.load_file(written / "model.safetensors")
            np.testing.assert_array_equal(read["w"], x)
        for spec, kind in (P("data"), "pinned_host"), (P("data"), "device"), (P(), "device"):
            sharding = jax.NamedSharding(MESH, spec, memory_kind=kind)
            model = nnx.Dict(w=nnx.Param(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)))
            load_safetensors(path, model, {"w": "w"})
            array = model.w.get_raw_value()
            assert array.sharding == sharding
            np.testing.assert_array_equal(array, x)
            if kind == "device":
                increment = jax.jit(lambda x: x + 1, donate_argnums=0)
                for shard in increment(increment(array)).addressable_shards:
                    np.testing.assert_allclose(shard.data, x[shard.index] + 2, rtol=1e-6)

    def test_only_the_bytes_of_the_shards_are_read(self):
        """Of column shards, too: each element once, and not for each of several devices."""
        x = numbers(64, 2048)
        path, read = self.write({"w": x}), []

        def counting(file, memory):
            read.append(len(memory))
            return read_into(file, memory)

        for spec in P(None, "model"), P("data", "model"), P("data"):
            sharding = jax.NamedSharding(MESH, spec)
            model = nnx.Dict(w=nnx.Param(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)))
            with mock.patch(f"{FILES}._read_into", counting):
                load_safetensors(path, model, {"w": "w"})
            assert sum(read) == x.nbytes, spec
            read.clear()

    @parameterized.named_parameters(
        ("rows", "w", "w", (1024, 1024), (1024, 1024), P("model")),
        ("columns", "w", "w", (1024, 1024), (1024, 1024), P(None, "model")),
        ("blocks", "w", "w", (1024, 1024), (1024, 1024), P("data", "model")),
        ("replicated", "w", "w", (1024, 1024), (1024, 1024), P()),
        ("transposed rows", "w", Tensor("w", "o i -> i o"), (1024, 1024), (1024, 1024), P("model")),
        (
            "transposed columns",
            "w",
            Tensor("w", "o i -> i o"),
            (1024, 1024),
            (1024, 1024),
            P(None, "model"),
        ),
        (
            "a fused third",
            "w",
            Tensor("w", "(three o) i -> o i", three=3, take={"three": 2}),
            (1536, 1024),
            (512, 1024),
            P(None, "model"),
        ),
        (
            "a fused third of the columns",
            "w",
            Tensor("w", "o (three i) -> i o", three=3, take={"three": 1}),
            (1024, 1536),
            (512, 1024),
            P("data", "model"),
        ),
        (
            "an eighth of the columns",
            "w",
            Tensor("w", "o (n i) -> o i", n=8, take={"n": 7}),
            (1024, 4096),
            (1024, 512),
            P("model"),
        ),
        (
            "heads",
            "w",
            Tensor("w", "(h d) e -> e h d", h=16),
            (1024, 1024),
            (1024, 16, 64),
            P(None, "model"),
        ),
        (
            "stacked",
            r"w(\d)",
            Tensor("w", "o i -> {0} i o"),
            (512, 1024),
            (2, 1024, 512),
            P(None, "model", "data"),
        ),
    )
    def test_bytes_read(self, names, rule, tensor_shape, shape, spec):
        """The system counts at most 1.1 times those of the shards, with the headers."""
        names_of = ["w0", "w1"] if "d" in names else ["w"]
        path = self.write({name: numbers(*tensor_shape) for name in names_of})
        sharding = jax.NamedSharding(MESH, spec)
        model = nnx.Dict(w=nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)))

        def bytes_read():
            lines = Path("/proc/self/io").read_text().splitlines()
            return int(lines[0].removeprefix("rchar:"))

        before = bytes_read()
        load_safetensors(path, model, {names: rule})
        assert bytes_read() - before < 1.1 * model.w.nbytes

    def test_short_runs_are_read_together(self):
        """Of every second number, those between are read, too, instead of each alone."""
        x = numbers(32, 64)
        rule = Tensor("w", "a (b two) -> a b", two=2, take={"two": 1})
        model, reads = zeros(w=(32, 32)), mock.Mock(side_effect=read_into)
        with mock.patch(f"{FILES}._read_into", reads):
            load_safetensors(self.write({"w": x}), model, {"w": rule})
        np.testing.assert_array_equal(model.w[...], x[:, 1::2])
        assert reads.call_count <= 32

    def test_empty_and_scalar(self):
        tensors = {"e": np.zeros((0, 3), np.float32), "s": np.array(2.5, np.float32)}
        model = zeros(e=(0, 3), s=())
        load_safetensors(self.write(tensors), model, {"(.)": "{0}"})
        assert model.e.shape == (0, 3) and model.s[...] == 2.5
        save_safetensors(self.folder / "new", model, {"(.)": "{0}"})
        found = safetensors.load_file(self.folder / "new" / "model.safetensors")
        assert found["e"].shape == (0, 3) and found["s"] == 2.5


def safetensors_entries(path):
    from safetensors import deserialize

    return deserialize(path.read_bytes())


class ErrorTest(TestCase):
    def test_all_differences_in_one_message(self):
        tensors = {"a.w": numbers(2, 4), "b.w": numbers(3, 3), "l.0": numbers(2), "x": numbers(1)}
        tensors["c.w"] = numbers(2, 2, dtype=np.float16)
        tensors["l.5"] = numbers(2)
        model = zeros(a=(4, 2), b=(3, 4), c=(2, 2), d=(1,), stacked=(3, 2))
        before = {name: variable.get_raw_value() for name, variable in model.items()}
        rules = {
            r"(\w)\.w": Tensor("{0}", "o i -> i o"),
            r"l\.(\d)": Tensor("stacked", "d -> {0} d"),
        }
        with self.assertRaises(CheckpointError) as caught:
            load_safetensors(self.write(tensors), model, rules)
        text = str(caught.exception)
        for part in (
            "Arrays without a tensor:\n  d, shape (1,)\n  stacked, shape (3, 2): no tensor for "
            "[1:3, 0:2]",
            "Tensors without an array:\n  x: no rule matches",
            "  b.w, shape (3, 3): b, shape (3, 4) needs (4, 3)",
            "  l.5, shape (2,): stacked, shape (3, 2): {0} has the size 3 in the array, and the "
            "tensor is 5:6",
            "  c.w: float16, c: float32",
        ):
            assert part in text, text
        assert {name: variable.get_raw_value() for name, variable in model.items()} == before

    def test_paths_that_are_not_there(self):
        path = self.write({"a": numbers(2), "b": numbers(2)})
        with self.assertRaisesRegex(CheckpointError, "b: no array kernle.*did you mean 'kernel'"):
            load_safetensors(path, zeros(kernel=(2,)), {"a": "kernel", "b": "kernle"})
        with self.assertRaisesRegex(CheckpointError, r"kernel.*several tensors for \[0:2\]"):
            load_safetensors(path, zeros(kernel=(2,)), {"a|b": "kernel"})

    def test_only(self):
        path = self.write({"w": numbers(2)})
        model = nnx.Dict(w=nnx.Param(jnp.zeros(2)), n=nnx.BatchStat(jnp.zeros(1)))
        with self.assertRaisesRegex(CheckpointError, r"n, shape \(1,\)"):
            load_safetensors(path, model, {"w": "w"})
        load_safetensors(path, model, {"w": "w"}, only=nnx.Param)
        assert model.w[0] != 0
        load_safetensors(path, model, {"w": "w"} | {"n": "n"}, only=nnx.Param)
        with self.assertRaisesRegex(ValueError, "matches none"):
            load_safetensors(path, model, {}, only=nnx.Cache)
        with self.assertRaisesRegex(TypeError, r"rngs/.*not arrays|not arrays.*\n.*rngs"):
            load_safetensors(path, nnx.Dict(rngs=nnx.Rngs(0)), {}, only=...)

    def test_a_file_is_damaged_or_missing(self):
        path = self.write({"w": numbers(64)})
        model = zeros(w=(64,))
        content = path.read_bytes()
        for damaged in (b"", content[:20], content[:-4], b"\xff" * 100, content[:8] + b"{" * 99):
            path.write_bytes(damaged)
            with self.assertRaisesRegex(CheckpointError, "is damaged"):
                load_safetensors(path, model, {"w": "w"})
        with self.assertRaisesRegex(NoCheckpointError, "none.safetensors: No such file"):
            load_safetensors(self.folder / "none.safetensors", model, {"w": "w"})
        path.rename(self.folder / "model-0.safetensors")
        with self.assertRaisesRegex(NoCheckpointError, "several files, model.safetensors.index.j"):
            load_safetensors(self.folder, model, {"w": "w"})
        split_files(self.folder, {"w": numbers(64), "v": numbers(2)}, 2)
        (self.folder / "model-1.safetensors").write_bytes(
            (self.folder / "model-0.safetensors").read_bytes()
        )
        with self.assertRaisesRegex(CheckpointError, "w: model-1.safetensors"):
            load_safetensors(self.folder, model, {"w": "w"})
        assert not np.any(model.w[...])

    @parameterized.named_parameters(
        ("list", [1]),
        ("null", None),
        ("nested", b"[" * 200_000),
        ("strings", {"data_offsets": ["0", "64"]}),
        ("floats", {"data_offsets": [0.0, 64.0]}),
        ("size_is_null", {"shape": [None, 4]}),
        ("size_is_float", {"shape": [4.0, 4.0]}),
        ("shape_is_text", {"shape": "44"}),
        ("dtype_is_null", {"dtype": None}),
        ("dtype_is_a_number", {"dtype": 3}),
        ("trailing_bytes", {"shape": [4, 3], "data_offsets": [0, 48]}),
        ("gap", {"shape": [4, 3], "data_offsets": [16, 64]}),
        ("overlap", {}, {"v": {"dtype": "U8", "shape": [4], "data_offsets": [60, 64]}}),
        ("twice", b'{"w": 1, "w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}'),
        ("index_of_5", {}, {}, 5),
        ("index_of_a_list", {}, {}, ["a"]),
        ("index_outside", {}, {}, "../model.safetensors"),
    )
    def test_wrong_headers(self, header, more=None, index=None):
        entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
        if isinstance(header, dict):
            header = {"w": {**entry, **header}, **(more or {})}
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + b"\0" * 64
        (self.folder / "model.safetensors").write_bytes(content)
        if index is not None:
            located = json.dumps({"weight_map": {"w": index}})
            (self.folder / "model.safetensors.index.json").write_text(located)
        with self.assertRaisesRegex(CheckpointError, "is damaged"):
            load_safetensors(self.folder, zeros(w=(4, 4)), {".": "w"})

    def test_wrong_indices(self):
        split_files(self.folder, {"w": numbers(64), "v": numbers(2)}, 2)
        index = self.folder / "model.safetensors.index.json"
        for text in (
            b"3",
            b"{}",
            b'{"weight_map": [["w", "model-0.safetensors"]]}',
            b'{"weight_map": {"w": "model-1.safetensors", "w": "model-0.safetensors"}}',
            b'{"weight_map": {"w": ["model-0.safetensors"]}}',
        ):
            index.write_bytes(text)
            with self.assertRaisesRegex(CheckpointError, "index.json is damaged"):
                load_safetensors(self.folder, zeros(w=(64,)), {"w": "w", "v": None})

    def test_a_tensor_without_a_numpy_dtype(self):
        entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
        other = {"dtype": "F4", "shape": [8], "data_offsets": [16, 20]}
        text = json.dumps({"w": entry, "q": other}).encode()
        path = self.folder / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 20)
        load_safetensors(path, zeros(w=(4,)), {"w": "w", "q": None})
        with self.assertRaisesRegex(CheckpointError, "q: F4, q: float32"):
            load_safetensors(path, zeros(w=(4,), q=(8,)), {"(.)": "{0}"}, cast=True)

    @parameterized.parameters(
        ("a b", {}, "expected dimensions"),
        ("(a b -> a b", {}, "expected dimensions"),
        ("a a -> a", {}, "named twice"),
        ("a b -> a", {}, "on one side only: b"),
        ("{0} a -> a", {}, "belongs to the dimensions of the array"),
        ("a -> a", {"h": 3}, "no axis h"),
        ("a -> a", {"take": {"a": slice(0, 1)}}, "give the size in the tensor of a"),
        ("a b -> (a b)", {"put": {"b": slice(0, 1)}}, "only the first axis"),
        ("a -> a", {"take": {"a": slice(2, 1)}, "a": 4}, "start < stop"),
        ("a -> a", {"take": {"a": slice(-2, 1)}, "a": 4}, "start < stop"),
        ("a -> a", {"take": {"a": slice(0, 5)}, "a": 4}, "a has the size 4"),
        ("a -> a", {"take": {"a": slice(0, 4, 2)}, "a": 4}, "start < stop"),
        ("a -> a", {"take": {"a": slice(0.0, 4)}, "a": 4}, "start < stop"),
        ("a -> a", {"take": {"a": slice(0, None)}, "a": 4}, "start < stop"),
        ("a b -> b", {"take": {"a": 4}, "a": 4}, "a has the size 4"),
        ("a b -> b", {"take": {"a": -1}, "a": 4}, "index of 0 or more"),
        ("a b -> b", {"take": {"a": np.int64(4)}, "a": 4}, "a has the size 4"),
        ("a b -> b", {"take": {"a": True}, "a": 4}, "index of 0 or more"),
        ("a -> a", {"take": {"a": 1.0}, "a": 4}, "index of 0 or more"),
        ("a -> a", {"put": {"a": slice(-1, 3)}}, "start < stop"),
        ("a -> b a", {"put": {"b": -1}}, "index of 0 or more"),
        ("a -> a", {"put": {"a": slice(0, 3)}, "a": 4}, "4 of the tensor do not fit"),
        ("a -> a", {"a": 0}, "size of 1 or more"),
        ("a -> a", {"a": -4}, "size of 1 or more"),
        ("a -> a", {"a": 4.0}, "size of 1 or more"),
        ("a -> a", {"a": True}, "size of 1 or more"),
        ("a -> a", {"a": "4"}, "size of 1 or more"),
        (None, {"take": {"a": 1}}, "names of axes"),
    )
    def test_dimensions(self, dimensions, options, text):
        with self.assertRaisesRegex(ValueError, text):
            Tensor("w", dimensions, **options)

    def test_rules(self):
        path, model = self.write({"w": numbers(8)}), zeros(w=(8,))
        for rules, kind, text in (
            ({"(": "w"}, ValueError, "unterminated"),
            ({"w": "{0}"}, ValueError, "Replacement index 0 out of range"),
            ({"w": 3}, TypeError, "'w': 3"),
            ({"w": Tensor("w", "(a b) -> (a b)")}, CheckpointError, "give the size of a or b"),
            ({"w": Tensor("w", "(a b) -> (a b)", a=3)}, CheckpointError, r"8 is not a \(3\)"),
            ({"w()": Tensor("w", " -> {0}")}, CheckpointError, "'', which is no index"),
            ({"(w)": Tensor("w", " -> {0}")}, CheckpointError, "'w', which is no index"),
        ):
            with self.assertRaisesRegex(kind, text):
                load_safetensors(path, model, rules)

    def test_save(self):
        model = zeros(a=(2, 2), b=(2,))
        for rules, text in (
            ({"a": "a"}, r"b, shape \(2,\): no rule has this path"),
            ({"a.*": "a", "b": "b"}, "no name can be made of 'a.*'"),
            ({r"(\d)x": "a", "b": "b"}, "no name can be made"),
            ({"(?:a)": "a", "b": "b"}, "no name can be made"),
            ({"(?:a|x)y": "a", "(?P<x>b)": "{0}"}, "no name can be made"),
            (
                {"a": Tensor("a", "h d -> h d", h=4, take={"h": slice(0, 2)}), "b": "b"},
                "no array f",
            ),
            (
                {
                    "t": [
                        Tensor("a", "(h p) i -> h i", h=3, p=2, take={"h": slice(0, 2), "p": 0}),
                        Tensor("b", "o i -> i", o=6, take={"o": 4}),
                        Tensor("b", "o i -> i", o=6, take={"o": 5}),
                    ]
                },
                r"t, shape \(6, 2\): no array for \[1:2, 0:2\]",
            ),
            ({"a": ["a", "b"]}, r"a, shape \(2, 2\): b, shape \(2,\) needs \(2,\)"),
            (
                {"a": Tensor("a", "o i -> o i", put={"o": slice(0, 1)}), "b": "b"},
                r"no tensor for \[1:2",
            ),
        ):
            with self.assertRaisesRegex(ValueError, text):
                save_safetensors(self.folder / "new", model, rules)
        assert not (self.folder / "new").exists()
        save_safetensors(self.folder, model, {"a": "a", "old": "a", "b": "b"})
        with self.assertRaisesRegex(CheckpointError, "has model.safetensors; overwrite=True"):
            save_safetensors(self.folder, model, {"a": "a", "b": "b"})
        same = nnx.Dict({"a/b": nnx.Param(jnp.ones(2)), "a": zeros(b=(2,))})
        with self.assertRaisesRegex(ValueError, "of several arrays:\n  a/b\nRename"):
            save_safetensors(self.folder / "new", same, {"a": "a/b"})
        with self.assertRaisesRegex(TypeError, "abstract"):
            save_safetensors(self.folder, nnx.eval_shape(lambda: zeros(a=(1,))), {"a": "a"})

    def test_a_bucket(self):
        """``gs://`` goes through fsspec, here to a folder."""
        fsspec = pytest.importorskip("fsspec")
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        class Bucket(DirFileSystem):
            protocol = "gs"

            def __init__(self, **_):
                local = LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)
                super().__init__(path=folder, fs=local, skip_instance_cache=True)

            def _join(self, path):
                text = super()._join(path.removeprefix("gs://")) if type(path) is str else None
                return text or super()._join(path)

        folder = str(self.folder)
        for name in ("gs", "gcs"):
            fsspec.register_implementation(name, Bucket, clobber=True)
        rules, model = {r"w(\d)": "w{0}"}, zeros(w0=(8, 8), w1=(8,))
        model.w0[...] = jnp.asarray(numbers(8, 8))
        where = "gs://bucket/some/model"
        with self.assertRaisesRegex(ValueError, "cannot be written to gs://bucket.*upload"):
            save_safetensors(where, model, rules)
        save_safetensors(self.folder / "bucket/some/model", model, rules, max_shard_size=200)
        other = load_safetensors(where, zeros(w0=(8, 8), w1=(8,)), rules)
        np.testing.assert_array_equal(other.w0, model.w0)
        with self.assertRaises(NoCheckpointError):
            load_safetensors("gs://bucket/none", other, rules)

    def test_overwrite(self):
        rules = {"a": "a", "b": "b"}
        old, new = zeros(a=(4, 4), b=(2,)), zeros(a=(4, 4), b=(2,))
        new.a.set_value(jnp.ones((4, 4)))
        for size in (1, 10**9, 1):  # several files with an index, one file, several again
            save_safetensors(self.folder, old, rules, max_shard_size=size, overwrite=True)
            names = {file.name for file in self.folder.iterdir()}
            assert (names == {"model.safetensors"}) == (size > 1)
            save_safetensors(self.folder, new, rules, max_shard_size=size, overwrite=True)
            assert len([*self.folder.iterdir()]) == len(names)
            loaded = load_safetensors(self.folder, zeros(a=(4, 4), b=(2,)), rules)
            np.testing.assert_array_equal(loaded.a[...], 1)

    def test_overwrite_keeps_what_the_index_does_not_name(self):
        rules = {"a": "a", "b": "b"}
        others = (
            "model_ema.safetensors",
            "model.fp16.safetensors",
            "model-1-of-9.safetensors",
        )
        for first, second in itertools.product((1, 10**9), repeat=2):
            folder = self.folder / f"{first}-{second}"
            save_safetensors(folder, zeros(a=(4,), b=(2,)), rules, max_shard_size=first)
            for name in others:
                (folder / name).write_bytes(b"precious")
            new = zeros(a=(4,), b=(2,))
            save_safetensors(folder, new, rules, max_shard_size=second, overwrite=True)
            assert all((folder / name).read_bytes() == b"precious" for name in others)
            assert len(list(folder.iterdir())) == len(others) + (3 if second == 1 else 1)

    def test_a_full_disk_leaves_the_old_model(self):
        self._assert_a_full_disk_leaves_the_old_model()

    def test_a_full_disk_without_hard_links_leaves_the_old_model(self):
        with mock.patch.object(os, "link", side_effect=OSError(95, "Operation not supported")):
            self._assert_a_full_disk_leaves_the_old_model()

    def _assert_a_full_disk_leaves_the_old_model(self):
        rules = {r"w(\d)": "w{0}"}

        def model(value):
            return {f"w{i}": nnx.Param(jnp.full((64,), float(value))) for i in range(4)}

        for old, new in itertools.product((256, 512, 10**9), repeat=2):
            folder = self.folder / f"{old}-{new}"
            save_safetensors(folder, model(1), rules, max_shard_size=old)
            faults = [(tensor_release, "exchange"), (tensor_files.Writer, "flush")]
            faults += [(tensor_release, "_link")] * (new < 10**9)
            for fault in faults:
                full = mock.patch.object(*fault, side_effect=OSError(28, "No space left on device"))
                with full, self.assertRaisesRegex(CheckpointError, "No space left"):
                    save_safetensors(folder, model(2), rules, max_shard_size=new, overwrite=True)
                loaded = load_safetensors(folder, model(0), rules)
                assert all((x[...] == 1).all() for x in loaded.values())
                assert not [path for path in folder.iterdir() if path.name.startswith(".")]

    def _model_beside_its_index(self, named):
        """Writes a model in which ``model.safetensors`` has the tensors ``named`` by the index."""
        folder, others = self.folder / f"named-{len(named)}", self.folder / "others"
        files = {"model.safetensors": named or ["x"], "other.safetensors": {*"abc"} - {*named}}
        for file, names in files.items():
            if names:
                arrays = {name: np.ones(8, np.float32) for name in names}
                save_safetensors(others, arrays, {r"(\w)": "{0}"}, overwrite=True)
                folder.mkdir(exist_ok=True)
                (others / "model.safetensors").rename(folder / file)
        located = {x: file for file, names in files.items() for x in names if x in "abc"}
        (folder / tensor_files.INDEX_FILE).write_text(json.dumps({"weight_map": located}))
        return folder

    def _ends_before_old_files_are_deleted(self, folder):
        """Interrupts a save where it would delete the first file in a folder, or its index."""
        unlink = Path.unlink

        def interrupted(path, **options):
            if path.parent == folder and "nnx_sharding" not in path.name:
                raise KeyboardInterrupt
            unlink(path, **options)

        return mock.patch.object(Path, "unlink", interrupted)

    def test_a_single_file_beside_an_index(self):
        """It may be of the model, alone or with others, or not: no error deletes or mixes any."""
        rules, zero = {r"(\w)": "{0}"}, dict.fromkeys("abc", np.zeros(8, np.float32))
        new = dict.fromkeys("abc", np.full(8, 2, np.float32))

        def values(folder):
            return {float(x[0]) for x in load_safetensors(folder, zero, rules).values()}

        for named in "abc", "ab", "":
            folder = self._model_beside_its_index(named)
            before = sorted(folder.iterdir())
            full = mock.patch.object(tensor_release, "exchange", side_effect=OSError(28, "full"))
            with full, self.assertRaisesRegex(CheckpointError, "full"):
                save_safetensors(folder, new, rules, max_shard_size=32, overwrite=True)
            assert sorted(folder.iterdir()) == before and values(folder) == {1.0}
            end = self._ends_before_old_files_are_deleted(folder)
            with end, self.assertRaises(KeyboardInterrupt):
                save_safetensors(folder, new, rules, overwrite=True)
            assert len(values(folder)) == 1, named  # all of one model
            for _ in range(2):
                save_safetensors(folder, new, rules, overwrite=True)
            assert values(folder) == {2.0}
            assert [path.name for path in folder.iterdir()] == ["model.safetensors"]

    def test_old_files_that_are_links(self):
        """As in a cache of Hugging Face. The next job deletes those that a killed one has left."""
        rules, blobs, folder = {r"(\w)": "{0}"}, self.folder / "blobs", self.folder / "a/model"
        arrays = dict.fromkeys("abc", np.ones(8, np.float32))
        save_safetensors(blobs, arrays, rules, max_shard_size=32)
        folder.mkdir(parents=True)
        for path in blobs.iterdir():
            (folder / path.name).symlink_to(os.path.relpath(path, folder))
        killed = mock.patch.object(tensor_release.Draft, "_delete")
        end = self._ends_before_old_files_are_deleted(folder)
        with killed, end, self.assertRaises(KeyboardInterrupt):
            save_safetensors(folder, arrays, rules, max_shard_size=32, overwrite=True)
        assert len([*folder.iterdir()]) == 4 + 3 + 1
        save_safetensors(folder, arrays, rules, max_shard_size=32, overwrite=True)
        assert len([*folder.iterdir()]) == len([*blobs.iterdir()]) == 4


class ProcessesTest(TestCase):
    @pytest.fixture(autouse=True)
    def _surroundings(self, capfd):
        self.capfd = capfd

    def test_two_processes(self):
        tensors = np.random.default_rng(0)
        made = {"norm": tensors.normal(size=8)}
        for i in range(2):
            made[f"layers.{i}.up"] = tensors.normal(size=(8, 8))
            made[f"layers.{i}.down"] = tensors.normal(size=(8, 4))
        made = {name: x.astype(np.float32) for name, x in made.items()}
        split_files(self.folder, made, 2)
        (self.folder / "blocked0").write_text("a file")
        options = ["--processes", "2", "--devices-per-process", "4", "--timeout", "100"]
        code = main(["launch", *options, str(WORKERS / "tensors.py"), str(self.folder)])
        out, err = self.capfd.readouterr()
        assert code == 0, out + err
        assert "[0] ok" in out and "[1] ok" in out
        written = {}
        for file in (self.folder / "new").glob("*.safetensors"):
            written |= safetensors.load_file(file)
        np.testing.assert_array_equal(written.pop("local"), np.arange(3.0))
        assert written.keys() == made.keys()
        for name, x in made.items():
            np.testing.assert_array_equal(written[name], x)
