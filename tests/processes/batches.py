"""``shard_batches`` over two processes with four devices each; ``library.py`` runs it."""

from __future__ import annotations

import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from preamble import RANK

from nnx_sharding.placement import process_rows, shard_batches


def mesh_in(order):
    return Mesh(np.array(jax.devices())[np.array(order)], ("data", "model"))


# The first four devices are those of process 0.
BY_PROCESS = mesh_in([[0, 1], [2, 3], [4, 5], [6, 7]])
ACROSS = mesh_in([[0, 4], [1, 5], [2, 6], [3, 7]])
MIXED = mesh_in([[0, 1], [4, 5], [6, 7], [2, 3]])
MESHES = {"by process": BY_PROCESS, "across": ACROSS, "mixed": MIXED}
SPECS = [P("data"), P("model"), P(), P(("data", "model")), P(("model", "data")), P("data", "model")]
SIZE = 16
ROWS = P("data")
padded = functools.partial(shard_batches, uneven="pad", batch_size=SIZE)


def of(numbers):
    numbers = np.asarray(numbers)
    return {"id": numbers, "x": (numbers[:, None] * np.array([1.0, 0.5])).astype(np.float32)}


def everywhere(x):
    """A global array as NumPy, on each process."""
    full = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
    return np.asarray(full.addressable_data(0))


def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def specs_of(spec):
    return {"id": P(*spec[:1]), "x": spec}


def rows_are_those_of_jax():
    """JAX puts the rows of ``process_rows`` where they belong."""
    for (name, mesh), spec in itertools.product(MESHES.items(), SPECS):
        rows = process_rows(spec, SIZE, mesh=mesh)
        batch = of(np.arange(SIZE)[rows])
        sharding = NamedSharding(mesh, spec)
        plain = jax.make_array_from_process_local_data(sharding, batch["x"], (SIZE, 2))
        [(ours, mask)] = padded([batch], specs_of(spec), mesh)
        assert ours["x"].sharding == plain.sharding == sharding
        expected = of(np.arange(SIZE))
        for found, key in ((plain, "x"), (ours["x"], "x"), (ours["id"], "id")):
            for shard in found.addressable_shards:
                part = expected[key][shard.index]
                np.testing.assert_array_equal(shard.data, part, f"{name}, {spec}")
        assert ours["id"].dtype == np.int32, ours["id"].dtype
        assert mask.shape == (SIZE,) and all(s.data.all() for s in mask.addressable_shards)


def every_row_once(counts, *, prefetch=2, mesh=BY_PROCESS, spec=ROWS):
    """Processes load so many rows, 8 at a time: all are seen once, and each in its order.

    Both yield as many batches: one that has no rows left yields batches of 0 rows.
    """
    offset, number = 1000 * RANK, max(-(-count // 8) for count in counts)
    ends = [min(8 * i, counts[RANK]) for i in range(number + 1)]
    mine = [np.arange(*pair) + offset for pair in itertools.pairwise(ends)]
    seen, found = [], 0
    for batch, mask in padded(map(of, mine), spec, mesh, prefetch=prefetch):
        real = everywhere(mask)
        ids, x = everywhere(batch["id"])[real], everywhere(batch["x"])[real]
        np.testing.assert_array_equal(x[:, 0], ids)
        assert not np.isnan(everywhere(batch["x"])).any()
        seen += ids.tolist()
        found += 1
    assert found == number, found
    for process, count in enumerate(counts):
        ids_of_process = [i - 1000 * process for i in seen if i // 1000 == process]
        assert ids_of_process == list(range(count)), ids_of_process
    assert len(seen) == sum(counts)


def replicas():
    """Processes that hold the same rows load the same."""
    same = [of(np.arange(16)), of(np.arange(16, 21))]
    pairs = list(padded(same, P("model"), BY_PROCESS))
    found = [everywhere(b["id"])[everywhere(m)].tolist() for b, m in pairs]
    assert found == [list(range(16)), list(range(16, 21))]


def one_without_rows():
    """Its batches are there, but empty: all that it adds is masked."""
    mine = [of(np.arange(8 - 8 * RANK)), of(np.arange(5 - 5 * RANK))]
    pairs = list(padded(mine, ROWS, BY_PROCESS))
    found = [everywhere(b["id"])[everywhere(m)].tolist() for b, m in pairs]
    assert found == [list(range(8)), list(range(5))], found


def without_batches():
    for batches in (padded([], ROWS, BY_PROCESS), shard_batches([], ROWS, BY_PROCESS)):
        text = raised(ValueError, lambda: list(batches))
        assert f"process {RANK} has no batch" in text and "batches of 0 rows" in text, text


class Counting:
    """An iterator with a state, over batches of at most 8 of so many rows."""

    def __init__(self, count, batches):
        self.count, self.batches, self.state = count, batches, {"batch": 0}

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.state["batch"]
        if batch >= self.batches:
            raise StopIteration
        self.state["batch"] += 1
        first, end = (min(8 * i, self.count) for i in (batch, batch + 1))
        return of(np.arange(first, end) + 1000 * RANK)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = dict(state)


def exact_evaluation(counts):
    """Each row of each process counts once, also where a process ends first."""

    @jax.jit
    def evaluate(batch, mask):
        return jnp.where(mask, batch["id"] % 3 == 0, False).sum(), mask.sum()

    right = total = 0
    number = max(-(-count // 8) for count in counts)
    for batch, mask in padded(Counting(counts[RANK], number), ROWS, BY_PROCESS):
        found = evaluate(batch, mask)
        right, total = right + int(found[0]), total + int(found[1])
    all_ids = np.concatenate([np.arange(n) + 1000 * p for p, n in enumerate(counts)])
    assert (right, total) == ((all_ids % 3 == 0).sum(), sum(counts)), (right, total)


def resuming():
    """A new iterator continues where the states of both processes are."""

    def collect(batches):
        return [everywhere(b["id"])[everywhere(m)].tolist() for b, m in batches]

    batches = iter(padded(Counting(29 - 12 * RANK, 4), ROWS, BY_PROCESS))
    shapes = {next(batches)[0]["x"].shape for _ in range(2)}
    state = batches.get_state()
    rest = collect(batches)
    resumed = iter(padded(Counting(29 - 12 * RANK, 4), ROWS, BY_PROCESS))
    resumed.set_state(state)
    found = list(resumed)
    assert collect(found) == rest == [[*range(16, 24), 1016], [*range(24, 29)]], rest
    assert shapes == {batch["x"].shape for batch, _ in found}


def short_batches():
    """Which of them others drop is not known, so none is dropped."""
    for uneven, text in ("drop", "Other processes may have"), ("error", "uneven='pad' fills it"):
        mine = [of(np.arange(8)), of(np.arange(8 - 3 * RANK)), of(np.arange(8))]
        seen = []
        batches = shard_batches(mine, ROWS, BY_PROCESS, uneven=uneven)
        if RANK == 0:
            seen.extend(batches)
            assert len(seen) == 3
            continue
        error = raised(ValueError, lambda: seen.extend(batches))
        assert len(seen) == 1
        assert "batch 1 (from 0) has 5 rows on process 1, fewer than 8" in error, error
        assert text in error, error
    full = shard_batches([of(np.arange(8))] * 3, ROWS, BY_PROCESS)
    assert len(list(full)) == 3


def errors():
    """What one process alone can notice."""
    text = raised(ValueError, lambda: shard_batches([], ROWS, BY_PROCESS, uneven="pad"))
    assert "uneven='pad' needs batch_size=" in text, text

    text = raised(ValueError, lambda: list(padded([of(np.arange(9))], ROWS, BY_PROCESS)))
    assert f"has 9 rows on process {RANK}, more than 8" in text, text

    mixed = {"id": P("data"), "x": P()}
    text = raised(ValueError, lambda: list(padded([of(np.arange(8))], mixed, BY_PROCESS)))
    assert "batch['x'], by no axis" in text, text

    indivisible = shard_batches([of(np.arange(7))], P("data"), BY_PROCESS)
    assert "batch_size=16" in raised(ValueError, lambda: list(indivisible))


def a_loader_that_fails():
    def loader():
        yield of(np.arange(8))
        yield of(np.arange(8))
        raise OSError("disk")

    seen = []
    batches = padded(loader(), P("data"), BY_PROCESS)
    assert "disk" in raised(OSError, lambda: seen.extend(batches))
    assert len(seen) == 2, len(seen)


def training():
    """Two loops at a time with a collective in each step, in the order of the program."""
    step = jax.jit(lambda x, mask: (x.sum(1) * mask).sum())
    train = padded([of(np.arange(8) + 8 * RANK)] * 6, P("data"), BY_PROCESS, prefetch=3)
    check = [of(np.arange(8))]
    losses = []
    for batch, mask in train:
        losses.append(float(step(batch["x"], mask)))
        for other, real in padded(check, P("data"), BY_PROCESS):
            assert float(step(other["x"], real)) == 2 * 1.5 * sum(range(8))
    assert losses == [1.5 * sum(range(16))] * 6, losses


def own_devices_only():
    """On a mesh of this process's devices the others do not take part."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    alone = functools.partial(shard_batches, sharding=P("data"), mesh=mesh)
    found = list(alone([of(np.arange(8))] * (1 + RANK), uneven="pad"))
    assert len(found) == 1 + RANK
    assert len(list(alone([of(np.arange(8)), of(np.arange(3 + RANK))]))) == 1
    theirs = Mesh(np.array([d for d in jax.devices() if d.process_index != RANK]), ("data",))
    text = raised(ValueError, lambda: padded([], P("data"), theirs))
    assert f"process {RANK} has none of the devices" in text


def main():
    assert (jax.process_count(), jax.local_device_count()) == (2, 4)
    rows_are_those_of_jax()
    every_row_once((20, 20))
    every_row_once((21, 8))
    every_row_once((3, 17), prefetch=1)
    every_row_once((24, 5), prefetch=0)
    every_row_once((13, 24), mesh=ACROSS, spec=P("model"))
    every_row_once((13, 24), mesh=MIXED, spec=P("data"))
    replicas()
    one_without_rows()
    for counts in (21, 4), (9, 17), (8, 0):
        exact_evaluation(counts)
    without_batches()
    resuming()
    short_batches()
    errors()
    a_loader_that_fails()
    training()
    own_devices_only()
    names = [t.name for t in threading.enumerate() if t.name.startswith("nnx_sharding")]
    assert not names, names
