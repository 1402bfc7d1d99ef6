"""Every kind of problem has a message, and the core works without them."""

from __future__ import annotations

import re

import pytest

from nnx_sharding import jit
from nnx_sharding.core import problems
from nnx_sharding.core.problems import Diagnostics, Problem
from nnx_sharding.diagnostics.messages import MESSAGES


def test_every_problem_has_a_message():
    assert set(MESSAGES) == set(Problem)


def test_form_of_messages():
    form = re.compile(r"[A-Z{].*[.}]", re.DOTALL)
    wrong = [
        problem.name
        for problem, message in MESSAGES.items()
        if not message.head.endswith((":", "."))
        or (message.remedy and not form.fullmatch(message.remedy))
    ]
    assert wrong == []


def test_core_without_diagnostics(monkeypatch):
    monkeypatch.setattr(problems, "_installed", Diagnostics())
    with pytest.raises(ValueError, match="ARGUMENT_IS_NOT_ARRAY") as caught:
        jit(lambda x: x)("text")
    assert caught.value.args[1:] == (("x", "text"), {})


def test_diagnostics_can_be_replaced(monkeypatch):
    class Mine(Diagnostics):
        def error(self, problem, offenders, **details):
            return KeyError(problem, [path for path, _ in offenders])

    monkeypatch.setattr(problems, "_installed", problems._installed)
    problems.install(Mine())
    with pytest.raises(KeyError) as caught:
        jit(lambda x, y: x)("one", "two")
    assert caught.value.args == (Problem.ARGUMENT_IS_NOT_ARRAY, ["x", "y"])
