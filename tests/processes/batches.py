"""``shard_batches`` over two processes with four devices each; ``library.py`` runs it."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
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
padded = functools.partial(shard_batches, uneven="pad")


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
    """Processes load so many rows, 8 at a time: all are seen once, and each in its order."""
    offset = 1000 * RANK
    mine = [np.arange(i, min(i + 8, counts[RANK])) + offset for i in range(0, counts[RANK], 8)]
    seen = []
    number = 0
    for batch, mask in padded(map(of, mine), spec, mesh, prefetch=prefetch):
        real = everywhere(mask)
        ids, x = everywhere(batch["id"])[real], everywhere(batch["x"])[real]
        np.testing.assert_array_equal(x[:, 0], ids)
        seen += ids.tolist()
        number += 1
    assert number == max(-(-count // 8) for count in counts), number
    for process, count in enumerate(counts):
        ids_of_process = [i - 1000 * process for i in seen if i // 1000 == process]
        assert ids_of_process == list(range(count)), ids_of_process
    assert len(seen) == sum(counts)


def replicas():
    """Processes that hold the same rows load the same; other numbers of them are an error."""
    same = [of(np.arange(16)), of(np.arange(16, 21))]
    pairs = list(padded(same, P("model"), BY_PROCESS))
    found = [everywhere(b["id"])[everywhere(m)].tolist() for b, m in pairs]
    assert found == [list(range(16)), list(range(16, 21))]
    differing = [of(np.arange(16)), of(np.arange(5 + RANK))]
    text = raised(ValueError, lambda: list(padded(differing, P("model"), BY_PROCESS)))
    assert "5 on process 0, 6 on process 1" in text, text


def one_without_rows():
    """Its batches are there, but empty: all that it adds is masked."""
    mine = [of(np.arange(8 - 8 * RANK)), of(np.arange(5 - 5 * RANK))]
    pairs = list(padded(mine, ROWS, BY_PROCESS))
    found = [everywhere(b["id"])[everywhere(m)].tolist() for b, m in pairs]
    assert found == [list(range(8)), list(range(5))], found


def one_without_batches():
    mine = [of(np.arange(8))] * RANK
    text = raised(ValueError, lambda: list(padded(mine, ROWS, BY_PROCESS)))
    assert "process 0 has no batch" in text and "batches of 0 rows" in text, text


class Counting:
    """An iterator with a state, over batches of 8 rows."""

    def __init__(self, count):
        self.count, self.state = count, {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        first = self.state["next"]
        if first >= self.count:
            raise StopIteration
        self.state["next"] = min(first + 8, self.count)
        return of(np.arange(first, self.state["next"]) + 1000 * RANK)

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
    for batch, mask in padded(Counting(counts[RANK]), ROWS, BY_PROCESS):
        found = evaluate(batch, mask)
        right, total = right + int(found[0]), total + int(found[1])
    all_ids = np.concatenate([np.arange(n) + 1000 * p for p, n in enumerate(counts)])
    assert (right, total) == ((all_ids % 3 == 0).sum(), sum(counts)), (right, total)


def resuming():
    """A new iterator continues where the states of both processes are."""

    def collect(batches):
        return [everywhere(b["id"])[everywhere(m)].tolist() for b, m in batches]

    batches = iter(padded(Counting(29 - 12 * RANK), ROWS, BY_PROCESS))
    shapes = {next(batches)[0]["x"].shape for _ in range(2)}
    state = batches.get_state()
    rest = collect(batches)
    resumed = iter(padded(Counting(29 - 12 * RANK), ROWS, BY_PROCESS))
    resumed.set_state(state)
    found = list(resumed)
    assert collect(found) == rest == [[*range(16, 24), 1016], [*range(24, 29)]], rest
    assert shapes == {batch["x"].shape for batch, _ in found}


def drop_stops_together():
    mine = [of(np.arange(8))] * (3 + 2 * RANK)
    assert len(list(shard_batches(mine, P("data"), BY_PROCESS, uneven="drop"))) == 3
    uneven = [of(np.arange(8)), of(np.arange(8 - 3 * RANK)), of(np.arange(8))]
    assert len(list(shard_batches(uneven, P("data"), BY_PROCESS, uneven="drop"))) == 2
    nothing = [of(np.arange(8))] * RANK
    assert list(shard_batches(nothing, P("data"), BY_PROCESS, uneven="drop")) == []


def errors_are_everywhere():
    batches = shard_batches([of(np.arange(8))] * (1 + RANK), P("data"), BY_PROCESS, uneven="error")
    text = raised(ValueError, lambda: list(batches))
    assert "0 on process 0, 8 on process 1" in text, text

    other = padded([{"x": np.ones((8, 2 + RANK))}], P("data"), BY_PROCESS)
    text = raised(ValueError, lambda: list(other))
    assert "float64[rows, 2]" in text and "float64[rows, 3]" in text, text

    options = padded([of(np.arange(8))], ROWS, BY_PROCESS, batch_size=16 + 16 * RANK)
    assert "batch_size=32" in raised(ValueError, lambda: list(options))

    mixed = {"id": P("data"), "x": P()}
    text = raised(ValueError, lambda: list(padded([of(np.arange(8))], mixed, BY_PROCESS)))
    assert "batch['x'], by no axis" in text, text

    indivisible = padded([of(np.arange(7))], P("data"), BY_PROCESS)
    assert "batch_size=16" in raised(ValueError, lambda: list(indivisible))


def a_loader_that_fails(process):
    def loader():
        yield of(np.arange(8))
        yield of(np.arange(8))
        if process == RANK:
            raise OSError("disk")
        while True:
            yield of(np.arange(8))

    seen = []
    start = time.monotonic()
    kind = OSError if process == RANK else RuntimeError
    batches = padded(loader(), P("data"), BY_PROCESS)
    text = raised(kind, lambda: seen.extend(batches))
    assert len(seen) == 2, len(seen)
    assert time.monotonic() - start < 20
    assert process == RANK or f"process {process} failed at batch 2" in text, text
    assert "disk" in text


def one_that_stops_early(process):
    """Batches that both agreed on still come, then the other process gets an error."""
    batches = iter(padded([of(np.arange(8))] * 20, P("data"), BY_PROCESS))
    next(batches)
    if process == RANK:
        batches.close()
        return
    text = raised(RuntimeError, lambda: list(batches))
    assert f"process {process} closed its iteration" in text, text


def one_that_leaves_while_it_waits(closed):
    """A process that closes while it waits for another one still informs it."""

    def loader():
        yield of(np.arange(8))
        while RANK == 0 and not closed.exists():
            time.sleep(0.01)
        while True:
            yield of(np.arange(8))

    batches = iter(padded(loader(), P("data"), BY_PROCESS, timeout=20.0))
    next(batches)
    if RANK == 1:
        time.sleep(0.05)  # its thread then waits for process 0
        batches.close()
        closed.touch()
    else:
        text = raised(RuntimeError, lambda: list(batches))
        assert "process 1 closed its iteration" in text, text


def one_that_does_not_come():
    batches = padded([of(np.arange(8))], P("data"), BY_PROCESS, timeout=0.2)
    iterator = iter(batches)
    if RANK == 1:
        assert "process 0 sent nothing" in raised(TimeoutError, lambda: list(iterator))
    sync_global_devices("process 1 waited for long enough")
    iterator.close()


def a_pause_is_no_fault():
    """A consumer that computes for longer than the timeout is not late."""
    now, pause, seen = time.monotonic, 0.0, 0
    # Process 1 waits for process 0, whose next batches are not taken for a while.
    with mock.patch.object(time, "monotonic", lambda: now() + pause):
        for _ in padded([of(np.arange(8))] * 6, P("data"), BY_PROCESS, timeout=60.0, prefetch=1):
            if not seen:
                time.sleep(0.3)  # the time in which process 1 looks at its clock
                pause += 100.0
                time.sleep(0.3)
            seen += 1
    assert seen == 6


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
    """A mesh of this process's devices needs no agreement: the others do not take part."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    found = list(padded([of(np.arange(8))] * (1 + RANK), P("data"), mesh))
    assert len(found) == 1 + RANK
    theirs = Mesh(np.array([d for d in jax.devices() if d.process_index != RANK]), ("data",))
    text = raised(ValueError, lambda: padded([], P("data"), theirs))
    assert f"process {RANK} has none of the devices" in text


def main(folder):
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
    for counts in (21, 4), (9, 17), (0, 0):
        exact_evaluation(counts)
    one_without_batches()
    resuming()
    drop_stops_together()
    errors_are_everywhere()
    for process in (0, 1):
        a_loader_that_fails(process)
        one_that_stops_early(process)
    one_that_leaves_while_it_waits(folder / "closed")
    training()
    a_pause_is_no_fault()
    own_devices_only()
    one_that_does_not_come()
    names = [t.name for t in threading.enumerate() if t.name.startswith("nnx_sharding")]
    assert not names, names
