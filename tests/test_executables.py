"""Compiled functions in files: another process runs them without compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import configurations
from models import MLP, Counter, P, mesh_of
from nnx_sharding import StateSharding, errors, export, jit, shard_map
from nnx_sharding.export import files

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
ADAM = optax.adam(0.1)


def train(model, optimizer, x, *, scale):
    """Changes both, returns one, and has a static argument."""
    value, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean() * scale)(model)
    optimizer.update(model, gradients)
    model.last[...] = value
    return {"loss": value, "model": model}


SPECS = StateSharding(
    {nnx.PathContains("up"): P(None, "model"), nnx.PathContains("down"): P("model", None), ...: P()}
)


def objects():
    model = MLP()
    model.last = nnx.Variable(jnp.zeros(()))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def lowered(x=X, scale=2):
    mesh = mesh_of((2, 4), ("data", "model"))
    specs = {"model": SPECS, "optimizer": None, "x": P("data")}
    options = {"static_argnames": "scale", "donate_argnames": ("model", "optimizer")}
    return jit(train, in_shardings=specs, mesh=mesh, **options).lower(*objects(), x, scale=scale)


@pytest.fixture(autouse=True, scope="module")
def _uncached():
    # XLA writes programs for the CPU that it has read, as from the cache, without their functions.
    with configurations.without_cache():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("executable") / "train.zip"
    export.save_executable(path, lowered().compile())
    return path


PROGRAM = """
import sys
import jax

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, fun_name="", **__: compiled.append(fun_name) if "backend" in event else None
)
import numpy as np
from flax import nnx
from nnx_sharding import export
import test_executables as here

loaded = export.load_executable(sys.argv[1], here.lowered())
model, optimizer = here.objects()
for _ in range(2):
    output = loaded(model, optimizer, here.X)
assert output["model"] is model and model.last[...] == output["loss"]
assert "jit(train)" not in compiled, compiled
flat = nnx.to_flat_state(nnx.state((model, optimizer)))
np.savez(sys.argv[2], **{"/".join(map(str, path)): leaf[...] for path, leaf in flat})
"""


@pytest.mark.slow
@pytest.mark.gate
def test_in_another_process(saved, tmp_path):
    model, optimizer = objects()
    compiled = lowered().compile()
    for _ in range(2):
        compiled(model, optimizer, X)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", PROGRAM, str(saved), str(tmp_path / "state.npz")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": path})
    theirs = np.load(tmp_path / "state.npz")
    ours = nnx.to_flat_state(nnx.state((model, optimizer)))
    assert {"/".join(map(str, path)) for path, _ in ours} == {*theirs}
    for path, leaf in ours:
        np.testing.assert_array_equal(leaf[...], theirs["/".join(map(str, path))])


def test_like_compiled(saved):
    stage, compiled = export.load_executable(saved, lowered()), lowered().compile()
    assert type(stage) is type(compiled) and stage.in_tree == compiled.in_tree
    assert stage.out_tree == compiled.out_tree
    assert stage.input_shardings == compiled.input_shardings
    assert stage.output_shardings == compiled.output_shardings
    assert stage.donate_argnums == compiled.donate_argnums != ()
    assert stage.memory() == compiled.memory() and stage.cost() == compiled.cost()
    assert [*stage.collectives()] == [*compiled.collectives()]
    model, optimizer = objects()
    with pytest.raises(TypeError, match=r"scale: 2 → 3"):
        stage(model, optimizer, X, scale=3)
    stage(model, optimizer, X, scale=2)
    kernel = model.up.kernel[...]
    stage(model, optimizer, X)
    assert kernel.is_deleted()


def programs():
    mesh = mesh_of((8,), ("data",))
    yield Counter.__call__, (Counter(), jnp.ones(())), jit
    yield (lambda x: x * jnp.arange(4.0)), (X,), jit
    yield (
        (lambda x: x + 1),
        (jnp.ones(8),),
        lambda f: shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data")),
    )
    yield (lambda: jnp.ones(3)), (), jit
    yield (lambda rngs: rngs.normal((2,))), (nnx.Rngs(0),), jit


@pytest.mark.parametrize("case", range(5))
def test_programs(case, tmp_path):
    (fun, args, transform), (_, again, _) = [*programs()][case], [*programs()][case]
    stage = transform(fun).lower(*args)
    export.save_executable(tmp_path / "f.zip", stage.compile())
    loaded = export.load_executable(tmp_path / "f.zip", stage)
    np.testing.assert_array_equal(loaded(*args), stage.compile()(*again))
    ours, theirs = (jax.tree.leaves(nnx.state([*some])) for some in (args, again))
    assert list(map(repr, ours)) == list(map(repr, theirs))  # also of keys


def test_bound_methods(tmp_path):
    model = MLP()
    stage = jit(model.__call__).lower(X)
    export.save_executable(tmp_path / "f.zip", stage.compile())
    loaded = export.load_executable(tmp_path / "f.zip", stage)
    np.testing.assert_allclose(loaded(X), model(X), 1e-5)


def forged(saved, path, payload=None, **changes):
    """The file with other entries in its manifest, or another executable."""
    manifest, program = files.read(saved, files.EXECUTABLE)
    files.write(path, {**manifest, **changes}, payload or program, files.EXECUTABLE)
    return path


def test_another_machine(saved, tmp_path):
    manifest, _ = files.read(saved, files.EXECUTABLE)
    changes = {
        "jax": "0.1",
        "jaxlib": "0.2",
        "device kind": "cpu of old",
        "compiler": "cl/123",
        "device 3": "id 3, coordinates [1, 0, 0], core 0, slice 0",
        "device 8": "id 99, coordinates [], core 0, slice 0",
    }
    machine, versions = {**manifest["machine"], **changes}, {"flax": "0.3"}
    path = forged(saved, tmp_path / "f.zip", machine=machine, versions=versions)
    with pytest.raises(errors.ExportError) as caught:
        export.load_executable(path, lowered())
    text = str(caught.value)
    for line in (
        f"jax: 0.1, here {jax.__version__}",
        "jaxlib: 0.2, here ",
        "device kind: cpu of old, here cpu",
        "compiler: cl/123, here cpu",
        "device 8: id 99, coordinates [], core 0, slice 0, here missing",
        "device 3: id 3, coordinates [1, 0, 0], core 0, slice 0, here id 3, coordinates []",
        "compile and save it again",
    ):
        assert line in text
    assert "flax" not in text  # whose changes the program shows
    machine = {**manifest["machine"], "platform": "tpu"}
    path = forged(saved, tmp_path / "f.zip", machine=machine)
    with pytest.raises(errors.ExportError, match="platform: tpu, here cpu"):
        export.load_executable(path, lowered())


def test_another_order_of_the_devices(saved):
    mesh = jax.sharding.Mesh(mesh_of((4, 2), ("model", "data")).devices.T, ("data", "model"))
    specs = {"model": SPECS, "optimizer": None, "x": P("data")}
    stage = jit(train, in_shardings=specs, mesh=mesh, static_argnames="scale")
    order = r"device 1: id 1, .*here id 2, .*\n  device 2: id 2, .*here id 4"
    with pytest.raises(errors.ExportError, match=order):
        export.load_executable(saved, stage.lower(*objects(), X, scale=2))


def test_another_function(saved):
    with pytest.raises(errors.ExportError, match=r"x: float32\[8,4\].*, here float32\[16,4\]"):
        export.load_executable(saved, lowered(np.concatenate([X, X])))
    with pytest.raises(errors.ExportError, match="train: the function is another one, or was cha"):
        export.load_executable(saved, lowered(scale=3))
    other = jit(lambda x: x).lower(X)
    with pytest.raises(errors.ExportError, match=r"model.up.kernel: .*, here missing"):
        export.load_executable(saved, other)


def test_damaged_files(saved, tmp_path):
    data, path, stage = saved.read_bytes(), tmp_path / "f.zip", lowered()
    for damaged in (data[:-1], data[: len(data) // 2], b"x" + data[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises(errors.ExportError, match=r"is damaged|starts differently"):
            export.load_executable(path, stage)
    with pytest.raises(errors.ExportError, match=r"cannot load .*Compile and save it again"):
        export.load_executable(forged(saved, path, payload=b"no pickle"), stage)
    with pytest.raises(errors.ExportError, match=r"cannot be read: .*not subscriptable"):
        export.load_executable(forged(saved, path, machine=3), stage)
    with pytest.raises(FileNotFoundError):
        export.load_executable(tmp_path / "none.zip", stage)


def test_the_other_kind_of_file(saved, tmp_path):
    with pytest.raises(errors.ExportError, match=r"export\.load_executable reads it"):
        export.load(saved)
    pytest.importorskip("flatbuffers")
    export.export(jit(lambda x: x))(X).save(tmp_path / "f.zip")
    with pytest.raises(errors.ExportError, match=r"export\.load reads it"):
        export.load_executable(tmp_path / "f.zip", lowered())


def test_what_cannot_be_saved(tmp_path):
    def prints(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ValueError, match=r"prints cannot be saved: .*Leave out what calls Python"):
        export.save_executable(tmp_path / "f.zip", jit(prints).lower(X).compile())
    assert not (tmp_path / "f.zip").exists()
    with pytest.raises(TypeError, match=r"save_executable\(path, compiled\): .*got <nnx"):
        export.save_executable(tmp_path / "f.zip", jit(prints).lower(X))
    expected = (
        r"load_executable\(path, lowered\): expected the result of fun.lower\(...\) for lowered"
    )
    with pytest.raises(TypeError, match=rf"{expected}, got 'f.zip'"):
        export.load_executable(jit(prints).lower(X), "f.zip")


def test_the_manifest_can_be_read_with_any_tool(saved):
    with zipfile.ZipFile(saved) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    assert manifest["function"] == "train" and manifest["mesh"] == "data 2 × model 4"
    assert manifest["inputs"]["model.up.kernel"] == "float32[4,16] P(None, 'model')"
    assert manifest["devices"] == list(range(8)) and manifest["machine"]["platform"] == "cpu"


def test_a_program_from_the_persistent_cache_is_refused(tmp_path):
    """XLA would write it without its functions, and no call of what is loaded would succeed."""
    code = f"""
import jax, jax.numpy as jnp
from nnx_sharding import export, jit
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
compiled = jit(lambda x: jnp.sin(x) + 1).lower(jnp.ones(4)).compile()
export.save_executable({str(tmp_path / "f.zip")!r}, compiled)
"""
    words = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(words, check=False, capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert "from JAX's persistent compilation cache" in second.stderr
