"""Checkpoints in Orbax's managers: items, data, going back, failures, other forms and versions."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding.checkpoint import Checkpoints, ModelRestore, ModelSave, restore, save
from nnx_sharding.errors import CheckpointError
from nnx_sharding.placement import shard_batches
from test_checkpoints import contents_of, flip
from zoo import mesh_of

WORKER = Path(__file__).parent / "processes" / "killed.py"
RECORDED = Path(__file__).parent / "recorded" / "orbax_0_11_20"
Composite = ocp.args.Composite


def trained(seed=0):
    rngs = nnx.Rngs(seed)
    model = nnx.Linear(4, 4, rngs=rngs)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    metrics.update(loss=jnp.full(3, seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "rngs": rngs, "metrics": metrics}


class Counter:
    """A data iterator whose state is a dict."""

    def __init__(self):
        self.state = {"next": 0}

    def __next__(self):
        self.state = {"next": self.state["next"] + 1}
        return self.state["next"]

    def get_state(self):
        return self.state

    def set_state(self, state):
        if not isinstance(state, dict):
            raise TypeError(state)
        self.state = state


def damage(step):
    for file in (step / "model" / "d").iterdir():
        flip(file)


def test_a_manager_of_the_user(tmp_path):
    one, two = trained(1), trained(2)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["accuracy"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in range(3):
            args = Composite(model=ModelSave(one), name=ocp.args.JsonSave([1]))
            assert manager.save(step, args=args, metrics={"accuracy": -step})
        assert manager.best_step() == 0
        args = Composite(model=ModelRestore(two), name=ocp.args.JsonRestore())
        found = manager.restore(2, args=args)
        assert found.model["model"] is two["model"] and found.name == [1]
        assert contents_of(two) == contents_of(one)
        before = contents_of(wrong := nnx.Linear(4, 5, rngs=nnx.Rngs(0)))
        with pytest.raises(CheckpointError, match=r"kernel: \(4, 4\) in the check"):
            args = ModelRestore({"model": wrong}, only=nnx.PathContains("model"))
            manager.restore(2, args=Composite(model=args))
        assert contents_of(wrong) == before
    with ocp.CheckpointManager(tmp_path) as plain:
        args = Composite(model=ocp.args.StandardRestore(nnx.state(trained(3))))
        state = plain.restore(1, args=args).model
    three = trained(3)
    nnx.update(three, state)
    assert contents_of(three) == contents_of(one)
    # An only item has no name.
    with ocp.CheckpointManager(tmp_path / "single") as manager:
        manager.save(0, args=ModelSave(one))
        assert contents_of(manager.restore(0, args=ModelRestore(trained(4)))) == contents_of(one)


def loaders():
    grain = pytest.importorskip("grain")
    samplers = pytest.importorskip("grain.samplers")
    sampler = samplers.IndexSampler(50, shuffle=True, seed=0, num_epochs=1)
    source = grain.MapDataset.source(range(50)).shuffle(1)
    return [
        lambda: iter(grain.DataLoader(data_source=range(50), sampler=sampler, worker_count=0)),
        lambda: iter(source.to_iter_dataset()),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_grain(tmp_path, kind):
    make = loaders()[kind]
    handler = pytest.importorskip("grain.checkpoint")
    data, tree = make(), trained(1)
    with Checkpoints(tmp_path / "ours") as ours, ocp.CheckpointManager(tmp_path / "grain") as other:
        for step in range(4):
            next(data)
            assert ours.save(step, tree, data=data)
        items = Composite(model=ModelSave(tree), data=handler.CheckpointSave(data))
        other.save(0, args=items)
        other.wait_until_finished()
        want = [next(data) for _ in range(3)]
        for resume in (
            lambda x: ours.resume(trained(2), data=x),
            lambda x: Checkpoints(tmp_path / "grain").resume(trained(2), data=x),
            lambda x: ocp.CheckpointManager(tmp_path / "ours").restore(
                3, args=Composite(data=handler.CheckpointRestore(x))
            ),
        ):
            again = make()
            resume(again)
            assert [next(again) for _ in range(3)] == want


# When one read fails, Orbax does not cancel the others, whose event loop is then closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_going_back_and_damage(tmp_path):
    data, tree = Counter(), trained(1)
    with Checkpoints(tmp_path, max_to_keep=4) as checkpoints:
        assert checkpoints.resume(tree, data=data) is None
        for step in range(1, 6):
            next(data)
            checkpoints.save(step, tree, data=data)
        with pytest.raises(ValueError, match=r"after step 5, which exists in .* To go"):
            checkpoints.save(3, tree)
        checkpoints.wait_until_finished()
        damage(tmp_path / "5")
        other, before = trained(2), contents_of(trained(2))
        with pytest.raises(
            CheckpointError, match=r"5/model is damaged(.|\n)*Earlier steps: 2, 3, 4"
        ):
            checkpoints.resume(other, data=data)
        assert contents_of(other) == before and data.state == {"next": 5}
        checkpoints.restore(other, step=4)
        assert checkpoints.all_steps() == [2, 3, 4, 5]  # reading changes nothing
        assert checkpoints.resume(other, step=4) == 4
        assert checkpoints.all_steps() == [2, 3, 4, 5]
        assert checkpoints.resume(other, data=data, step=3, discard_later=True) == 3
        assert data.state == {"next": 3} and checkpoints.all_steps() == [2, 3]
        assert contents_of(other) == contents_of(tree)
        assert checkpoints.save(4, other, data={"next": 9})  # a state
        assert checkpoints.resume(other, data=data) == 4 and data.state == {"next": 9}
        checkpoints.delete(4)
        assert checkpoints.latest_step() == checkpoints.best_step() == 3
        # The model is left as it was if only the data cannot be restored.
        checkpoints.save(5, trained(7), data=data)
        checkpoints.wait_until_finished()
        flip(tmp_path / "5" / "data" / "process_0-of-1.json")
        with pytest.raises(CheckpointError, match=r"process_0-of-1.json is damaged"):
            checkpoints.resume(other, data=data)
        checkpoints.delete(5)
        checkpoints.save(5, trained(7))
        before = contents_of(other)
        with pytest.raises(CheckpointError, match='step 5: Item "data" was not found'):
            checkpoints.resume(other, data=data)
        shutil.copytree(tmp_path / "3" / "data", tmp_path / "5" / "data")
        for name in ("process_0-of-{}.json", "process_0-of-{}.json.crc32"):
            (tmp_path / "5/data" / name.format(1)).rename(tmp_path / "5/data" / name.format(2))
        with pytest.raises(CheckpointError, match=r"only process_0-of-2.json"):
            checkpoints.resume(other, data=data)
        assert contents_of(other) == before and data.state == {"next": 9}
        loader = shard_batches([], None)  # not its iterator
        use_iterator = r"get_state.* got shard_batches\(.*batches = iter\(...\).*data=batches"
        with pytest.raises(TypeError, match=use_iterator):
            checkpoints.save(6, tree, data=loader)
        with pytest.raises(TypeError, match=use_iterator):
            checkpoints.resume(other, data=loader)
        with pytest.raises(TypeError, match=r"set_state, got <list_iterator object>"):
            checkpoints.resume(other, data=iter([]))
        with pytest.raises(TypeError, match=r"JSON values, got .*object"):
            checkpoints.save(6, tree, data={"x": object()})
        state = {0: 5, "0": 6, "files": [{"a": 1}, {"b": {2.5: (), None: 3}}]}
        with pytest.raises(TypeError) as caught:
            checkpoints.save(6, tree, data=state)
        places = ["state[0]", "state['files'][1]['b'][2.5]", "state['files'][1]['b'][None]"]
        assert str(caught.value).splitlines()[1:4] == [f"  {place}" for place in places]
        assert checkpoints.save(6, tree, data=data)


class Numbered:
    """A data iterator with a state of another kind than `Counter`, or of `shard_batches`."""

    def __init__(self):
        self.i = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.i += 1
        return np.full((8, 2), self.i, np.float32)

    def get_state(self):
        return {"i": self.i}

    def set_state(self, state):
        self.i = -1  # changes before it fails
        self.i = state["i"]


class Renamed(Numbered):
    """The same, with another key in the state."""

    def get_state(self):
        return {"j": self.i}


def batches(loader=Numbered):
    return iter(shard_batches(loader(), P("data"), mesh_of((8,), ("data",))))


OTHER_DATA = {
    "the loader instead of shard_batches": (batches, Numbered, r"KeyError: 'i'"),
    "shard_batches instead of the loader": (Numbered, batches, "ValueError: .*expected a state"),
    "another loader": (Counter, Numbered, r"KeyError: 'i'"),
    "another loader in shard_batches": (
        lambda: batches(Renamed),
        batches,
        r"KeyError: 'i'",
    ),
    "bytes instead of JSON": (lambda: b"\x00", Numbered, "JSONDecodeError"),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_another_data_iterator_refuses_the_state(tmp_path, case):
    make_saved, make, cause = OTHER_DATA[case]
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, trained(step), data=make_saved())
        model, data = trained(3), make()
        before, state = contents_of(model), data.get_state()
        expected = rf"step 2: data=.*refuses.*{cause}.*\nPass an iterator like.*shard_batches"
        with pytest.raises(CheckpointError, match=expected) as caught:
            checkpoints.resume(model, data=data)
        assert "Earlier steps" not in str(caught.value)
        assert contents_of(model) == before and data.get_state() == state
        assert checkpoints.resume(model) == 2


def test_key_errors_of_the_user_stay(tmp_path):
    def only(path, variable):
        raise KeyError("mine")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, trained(1))
        with pytest.raises(KeyError, match="mine"):
            checkpoints.resume(trained(2), only=only)


def test_a_full_disk(tmp_path):
    tree = {"x": nnx.Param(jax.random.normal(jax.random.key(0), (1024, 512)))}
    with Checkpoints(tmp_path / "steps") as checkpoints:
        checkpoints.save(1, tree)
        checkpoints.wait_until_finished()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(Exception, match=r"File too large|full|exhausted"):
                checkpoints.save(2, tree)
                checkpoints.wait_until_finished()
            with pytest.raises(CheckpointError, match="could not be written"):
                save(tmp_path / "one", tree)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.all_steps() == [1] and not (tmp_path / "one").exists()
        assert checkpoints.resume({"x": nnx.Param(jnp.zeros((1024, 512)))}) == 1
        assert checkpoints.save(2, tree)


def test_killed_while_saving(tmp_path):
    random.seed(0)
    start = 0
    for number in range(3):
        command = [sys.executable, str(WORKER), str(tmp_path), "preempt" if number == 2 else "kill"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == f"resumed {start}\n"
                if number == 2:  # SIGTERM is the notice; the process ends by itself
                    process.send_signal(signal.SIGTERM)
                else:
                    while int(process.stdout.readline()) < start + 3:
                        pass
                    time.sleep(random.random() / 20)
                    process.kill()
                rest = process.stdout.read()
            finally:
                process.kill()
        with ocp.CheckpointManager(tmp_path) as manager:
            found, start = start, manager.latest_step()
        if number == 2:  # steps are saved only every million
            assert f"preempted {start}\n" in rest and start > found
        else:
            assert start > found


def test_renames(tmp_path):
    one = nnx.Dict(encoder=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), out=nnx.Param(jnp.ones(2)))
    two = nnx.Dict(body=nnx.Linear(2, 3, rngs=nnx.Rngs(1)), head=nnx.Param(jnp.zeros(2)))
    save(tmp_path / "a", one)
    restore(tmp_path / "a", {"encoder": two.body, "out": two.head})
    np.testing.assert_array_equal(two.body.kernel, one.encoder.kernel)
    np.testing.assert_array_equal(two.head, one.out)
    with pytest.raises(CheckpointError, match="Missing in the checkpoint:\n  head"):
        restore(tmp_path / "a", {"encoder": two.body, "head": two.head})


def test_recorded_by_an_older_orbax(tmp_path):
    def make(seed=1):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    model, _ = restore(RECORDED / "3", make())
    np.testing.assert_array_equal(model.kernel, np.arange(6.0).reshape(2, 3))
    shutil.copytree(RECORDED, tmp_path / "steps")
    with Checkpoints(tmp_path / "steps") as checkpoints:
        tree = make(2)
        assert checkpoints.resume(tree) == 3
        np.testing.assert_array_equal(tree[0].kernel, model.kernel)
        assert checkpoints.save(4, tree)


def test_two_jobs_on_one_directory(tmp_path):
    def of(value):
        return nnx.Param(jnp.full(3, float(value)))

    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        first.save(1, of(1))
        first.wait_until_finished()
        with pytest.raises(ValueError, match=r"after step 1, .* Another job has saved it"):
            second.save(1, of(2))
        assert second.save(2, of(2))
        second.wait_until_finished()
        with pytest.raises(ValueError, match=r"after step 2, .* Another job has saved it"):
            first.save(2, of(3))
        assert second.save(3, of(3))
        second.wait_until_finished()
        assert first.resume(x := of(0)) == 3 and x[0] == 3
    with Checkpoints(tmp_path) as checkpoints:
        values = [checkpoints.restore(of(0), step=step)[0] for step in (1, 2)]
    assert values == [1, 2]


def test_weak_types(tmp_path):
    def make(value):
        scalar, row = jnp.asarray(value), jnp.full(3, value)
        return nnx.Dict(scalar=nnx.Variable(scalar), row=nnx.Variable(row), x=nnx.Param(row * 1))

    save(tmp_path / "a", make(1.5))
    strong = nnx.Dict(jax.tree.map(lambda x: x + jnp.float32(0), dict(make(0.0))))
    for model in make(0.0), nnx.eval_shape(lambda: make(0.0)), strong:
        weak = [x.get_raw_value().weak_type for x in (model.scalar, model.row)]
        restore(tmp_path / "a", model)
        assert [x.get_raw_value().weak_type for x in (model.scalar, model.row)] == weak
        np.testing.assert_array_equal(model.row, [1.5] * 3)


def test_slashes_in_keys(tmp_path):
    def tree(value):
        return {"a/b": nnx.Param(jnp.full(2, value)), "a": {"b": nnx.Param(jnp.full(2, -value))}}

    save(tmp_path / "a", tree(1.0))
    found = restore(tmp_path / "a", tree(0.0))
    assert found["a/b"][0] == 1 and found["a"]["b"][0] == -1
