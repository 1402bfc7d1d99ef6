"""Each mistake in ``mistakes.py`` raises one error, with all that the user needs to know."""

from __future__ import annotations

import os
import pathlib
import random
import re
import traceback
import types
import warnings
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

import configurations
import mistakes
import nnx_sharding
import transform_mistakes
from graphs import Memory
from libraries import TREE, Transforms
from mistakes import MISTAKES, PAGE, Mistake
from nnx_sharding.core.call_context import CacheNotice
from nnx_sharding.errors import MAX_WIDTH
from test_pages import anchors


class Watched:
    """The library, with a comparison of all models before and after each call that fails."""

    StateSharding = nnx_sharding.StateSharding
    explain_retraces = True

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.failures = 0

    def jit(self, fun: Any, **options: Any) -> Any:
        return self.watch(nnx_sharding.jit(fun, **options))

    def shard_map(self, fun: Any, **options: Any) -> Any:
        return self.watch(nnx_sharding.shard_map(fun, **options))

    def vmap(self, fun: Any, **options: Any) -> Any:
        return self.watch(nnx_sharding.vmap(fun, **options))

    def scan(self, fun: Any, **options: Any) -> Any:
        return self.watch(nnx_sharding.scan(fun, **options))

    def grad(self, fun: Any, **options: Any) -> Any:
        return self.watch(nnx_sharding.grad(fun, **options))

    def cond(self, *args: Any) -> Any:
        return self.watch(nnx_sharding.cond)(*args)

    def switch(self, *args: Any) -> Any:
        return self.watch(nnx_sharding.switch)(*args)

    def while_loop(self, *args: Any) -> Any:
        return self.watch(nnx_sharding.while_loop)(*args)

    def watch(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            memories = [Memory(model) for model in self.models if self.is_alive(model)]
            try:
                return function(*args, **kwargs)
            except Exception:
                self.failures += 1
                for memory in memories:
                    memory.assert_unchanged()
                raise

        call.lower = lambda *args: types.SimpleNamespace(  # type: ignore[attr-defined]
            compile=lambda: self.watch(function.lower(*args).compile())
        )
        return call

    def is_alive(self, model: Any) -> bool:
        return not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(model)))


class Nested(nnx.Module):
    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def large(depth: int, count: int) -> type[mistakes.Model]:
    """The model of the mistakes with many blocks more, and one that is deep inside of others."""

    class Model(mistakes.Model):
        def __init__(self, hidden: int = 16):
            deep: Any = mistakes.Block(hidden)
            for _ in range(depth):
                deep = Nested(deep)
            blocks = [mistakes.Block(hidden) for _ in range(count)]
            self.blocks = nnx.List([*blocks, deep])

    return Model


# What JAX says about them has lines of its own.
OF_JAX = ("captured_explicit", "captured_other_mesh", "constraint_by_mesh", "untyped_loss")


class MistakesTest(parameterized.TestCase):
    def assert_short(self, name: str, model: type[mistakes.Model]) -> None:
        with mock.patch.object(mistakes, "Model", model):
            text = mistakes.message_of(MISTAKES[name].run, nnx_sharding)
        lines = text.splitlines()
        self.assertLess(len(lines), 25, text)
        self.assertEmpty([x for x in lines if len(x) > MAX_WIDTH and name not in OF_JAX], text)

    def test_messages_about_large_models(self):
        for name in random.sample([*MISTAKES], 8):
            with self.subTest(name):
                self.assert_short(name, large(depth=6, count=40))

    @parameterized.named_parameters((name, name) for name in MISTAKES)
    def test_message_about_200_layers(self, name: str):
        self.assert_short(name, large(depth=12, count=200))

    def test_page_explains_each(self):
        parts = re.split(r"^(?=###? )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        has_remedy = re.compile(r"^```\n\n\S", re.MULTILINE)  # text after the message
        sections = (mistakes.SECTION.match(part) for part in parts if has_remedy.search(part))
        explained = {mistakes.anchor_of(section[2]) for section in sections if section}
        self.assertContainsSubset({case.anchor for case in MISTAKES.values()}, explained)

    def test_anchors_exist(self):
        before = r'(?:@as_check\(|\bsee\([^"]*?,|without_gradient\(text,|anchor ?=|\belse)'
        used = set[str]()
        for path in pathlib.Path(nnx_sharding.__file__).parent.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(before + r'\s*"([a-z]+(?:-[a-z]+)+)"', text))
        self.assertContainsSubset({case.anchor for case in MISTAKES.values()}, used)
        self.assertContainsSubset(used, anchors(PAGE))

    def error_of(self, case: Mistake) -> BaseException | None:
        # An explanation that fails is logged.
        with warnings.catch_warnings(), self.assertNoLogs("nnx_sharding", "WARNING"):
            warnings.simplefilter("error")
            try:
                case.run(nnx_sharding)
            except Exception as error:  # assertRaises would drop the traceback
                return error
        return None

    @parameterized.named_parameters((name, name) for name in MISTAKES)
    def test_message(self, name: str):
        case = MISTAKES[name]
        error = self.error_of(case)
        self.assertIsInstance(error, case.error)
        notes = getattr(error, "__notes__", ())
        is_warning = isinstance(error, Warning)
        note = f"Run `nnx-sharding explain {case.anchor}` for causes and remedies."
        self.assertEqual(notes.count(note), int(not is_warning))
        text = "\n".join([str(error), *notes])
        missing = [fact for fact in case.facts if fact not in text]
        self.assertEmpty(missing, text)
        if case is next(x for x in MISTAKES.values() if x.anchor == case.anchor):
            shown = mistakes.headline(f"{type(error).__name__}: {error}")
            sections = mistakes.SECTION.findall(PAGE.read_text("utf-8"))
            on_page = [(mistakes.anchor_of(heading), text) for _, heading, text in sections]
            self.assertIn((case.anchor, shown), on_page)
        # One error, not one that followed another.
        self.assertTrue(error.__suppress_context__ or error.__context__ is None, text)
        # The traceback is the user's.
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ours = os.path.dirname(nnx_sharding.__file__)
        self.assertEmpty([f for f in frames if f.startswith(ours)], frames)
        self.assertIn(mistakes.__file__, frames)

    @parameterized.product(
        devices=(1, 8), is_on=(True, False), transform=("jit", "shard_map"), stage=(False, True)
    )
    def test_cache_is_warned_of_once(self, devices: int, is_on: bool, transform: str, stage: bool):
        mesh = jax.make_mesh((devices,), ("a",), devices=jax.devices()[:devices])
        specs = (
            {"in_shardings": (P("a"),)}
            if transform == "jit"
            else {"in_specs": P("a"), "out_specs": P("a")}
        )
        with (
            warnings.catch_warnings(record=True) as seen,
            configurations.with_cache(is_enabled=is_on),
            mock.patch.object(CacheNotice, "is_due", True),
        ):
            warnings.simplefilter("always")
            for factor in range(3):
                fun = getattr(nnx_sharding, transform)(lambda x: x * factor, mesh=mesh, **specs)
                x = np.ones(8, np.float32)
                (fun.lower(x).compile() if stage else fun)(x)
        texts = [str(one.message) for one in seen]
        self.assertLen(texts, int(devices > 1 and is_on), texts)

    @parameterized.named_parameters((name, name) for name in transform_mistakes.MISTAKES)
    def test_transforms(self, name: str):
        case = transform_mistakes.MISTAKES[name]
        for library in nnx_sharding, Transforms(nnx_sharding, **TREE):
            with self.assertRaises(case.error) as caught:
                case.run(library)
            text = "\n".join([str(caught.exception), *getattr(caught.exception, "__notes__", ())])
            self.assertEmpty([fact for fact in case.facts if fact not in text], text)

    @parameterized.named_parameters((name, name) for name in MISTAKES)
    def test_no_object_changes(self, name: str):
        watched = Watched()

        class Model(mistakes.Model):
            def __init__(self, *args: Any):
                super().__init__(*args)
                watched.models.append(self)

        with warnings.catch_warnings(), mock.patch.object(mistakes, "Model", Model):
            warnings.simplefilter("error")
            with self.assertRaises(MISTAKES[name].error):
                MISTAKES[name].run(watched)
        is_early = name.startswith(("bare", "unknown_name"))  # before any call
        self.assertEqual(watched.failures, 0 if is_early else 1)
