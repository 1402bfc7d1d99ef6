"""Kills or stops a writer at each call that changes the disk, and looks at what is there then.

Runs with ``tests/crash.c`` preloaded, which counts the calls. Writers and readers are forks of this
process, which imports everything, but leaves it to them to start JAX and its threads.

    python crashing.py KIND FOLDER [CALL…]        (all calls without any)
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from nnx_sharding.analysis.hardware import Hardware
from nnx_sharding.checkpoint import load_safetensors, restore, save, save_safetensors
from nnx_sharding.errors import NoCheckpointError
from nnx_sharding.export import files as export_files
from nnx_sharding.report.page import page

CRASH = ctypes.CDLL(None)
OLD, NEW, NEXT = 1, 2, 3
RULES = {r"(\w+)": "{0}"}


def tree(value):
    return {f"w{i}": np.full(600 + i, value, np.float32) for i in range(4)}


def value_of(arrays):
    values = np.unique(np.concatenate([x.reshape(-1) for x in arrays.values()]))
    assert len(values) == 1, f"a mixture of {values}"
    return int(values[0])


class Checkpoint:
    """A folder that is exchanged."""

    def write(self, path, value):
        save(path, tree(value), overwrite=True)

    def read(self, path):
        return value_of(restore(path, tree(0)))

    def files(self, path):
        """The files that are next to each other, without those that belong there."""
        return [x.name for x in path.parent.iterdir() if x != path]


class Tensors:
    """Files in a folder that holds others, too: one or several, before and after."""

    def __init__(self, old, new):
        self.sizes = {OLD: old, NEW: new, NEXT: old}

    def write(self, path, value):
        size = 10**9 if self.sizes[value] == 1 else 2500
        save_safetensors(path, tree(value), RULES, max_shard_size=size, overwrite=True)

    def read(self, path):
        return value_of(load_safetensors(path, tree(0), RULES))

    def files(self, path):
        index = path / "model.safetensors.index.json"
        known = {"config.json", "model.safetensors"}
        if index.exists():
            located = json.loads(index.read_text())["weight_map"]
            known = {"config.json", index.name, *located.values()}
        names = [x.name for x in (*path.iterdir(), *path.parent.iterdir())]
        return [name for name in names if name not in known | {path.name}]


class Export(Checkpoint):
    def write(self, path, value):
        export_files.write(path, str(value), b"program" * 1000)

    def read(self, path):
        return int(export_files.read(path)[0])


class Json(Checkpoint):
    def write(self, path, value):
        Hardware(str(value), 1.0, 1, 1.0, 1.0).save(path)

    def read(self, path):
        return int(Hardware.load(path).name)


class Page(Checkpoint):
    def write(self, path, value):
        with mock.patch.object(page, "html_page", lambda *_: f"<p>{value}</p>" * 1000):
            page.write_html(path, None)

    def read(self, path):
        [value] = {*path.read_text().split("<p>")[1:]}
        return int(value.removesuffix("</p>"))


KINDS = {
    "checkpoint": Checkpoint(),
    "one-file": Tensors(1, 1),
    "files": Tensors(3, 3),
    "files-to-one": Tensors(3, 1),
    "one-to-files": Tensors(1, 3),
    "export": Export(),
    "json": Json(),
    "page": Page(),
}


def forked(function, *arguments):
    """Runs a function in a fork; returns its process."""
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    except FileExistsError as error:  # of another writer
        print(error, file=sys.stderr)
        os._exit(3)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(child, *codes):
    code = code_of(child)
    assert code in (codes or (0,)), f"exit code {code}"
    return code


class Trial:
    """One kind of file, with an old one or without, and one moment."""

    def __init__(self, kind, has_old, folder):
        self.kind, self.has_old, self.folder = KINDS[kind], has_old, folder
        self.path = folder / "trial" / "model"
        self.template = folder / "old"
        if has_old:
            (self.template).mkdir()
            check(forked(self.kind.write, self.template / "model", OLD))

    def start(self):
        """Puts the old files there, and a file of the user's."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        if self.has_old:
            shutil.copytree(self.template, self.path.parent)
        else:
            self.path.parent.mkdir()
        if isinstance(self.kind, Tensors):
            self.path.mkdir(exist_ok=True)
            (self.path / "config.json").write_text("{}")

    def write(self, value, call=0, number=0):
        CRASH.crash_arm(str(self.path.parent).encode(), ctypes.c_long(call), number)
        self.kind.write(self.path, value)
        if call == -1:
            (self.folder / "count").write_text(str(CRASH.crash_count()))

    def expect(self, *values):
        """Reads one of these; None stands for nothing, which says so."""
        try:
            value = self.kind.read(self.path)
        except (NoCheckpointError, FileNotFoundError):
            value = None
            is_there = self.path.exists() and not isinstance(self.kind, Tensors)
            assert not is_there, "something is there, and cannot be read"
        assert value in values, f"{value}, not one of {values}"

    def count(self):
        self.start()
        check(forked(self.write, NEW, -1))
        return int((self.folder / "count").read_text())

    def killed(self, call):
        """The old or the new is there; the next writer leaves nothing of the killed one."""
        self.start()
        code = check(forked(self.write, NEW, call, signal.SIGKILL), -signal.SIGKILL, 0)
        check(forked(self.after_kill))
        return code != 0

    def after_kill(self):
        self.expect(OLD if self.has_old else None, NEW)
        self.write(NEXT)
        self.expect(NEXT)
        self.expect_clean()

    def expect_clean(self):
        left = self.kind.files(self.path)
        assert not left, left
        if isinstance(self.kind, Tensors):
            assert (self.path / "config.json").read_text() == "{}"

    def stopped(self, call):
        """Another writer comes and goes in between: one is whole, and the other one hears of it."""
        self.start()
        first = forked(self.write, NEW, call, signal.SIGSTOP)
        _, status = os.waitpid(first, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return False
        second_code = check(forked(self.write, NEXT), 0, 3)
        check(forked(self.expect, OLD if self.has_old else None, NEW, NEXT))
        os.kill(first, signal.SIGCONT)
        first_code = check(first, 0, 3)
        outcomes = {(0, 3): [NEW], (3, 0): [NEXT], (0, 0): [NEW, NEXT]}
        check(forked(self.after_both, outcomes[first_code, second_code]))
        return True

    def after_both(self, values):
        self.expect(*values)
        self.expect_clean()


def main(kind, folder, *chosen):
    counts = {}
    for has_old in (False, True):
        where = Path(folder) / f"{kind}-{has_old}"
        where.mkdir()
        trial = Trial(kind, has_old, where)
        total = trial.count()
        done = {"killed": 0, "stopped": 0}
        # Threads write in an order of their own, so a run may have a few calls more.
        for call in [int(x) % total + 1 for x in chosen] or range(1, total + 9):
            for how in done:
                try:
                    done[how] += getattr(trial, how)(call)
                except AssertionError as error:
                    place = f"{kind}, {has_old}, {how} at {call} of {total}"
                    raise AssertionError(f"{place}: {error}") from None
        counts["over an old one" if has_old else "new"] = {"calls": total, **done}
    print(json.dumps({kind: counts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
