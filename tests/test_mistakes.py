"""Each mistake in ``mistakes.py`` gives one error that says what its user has to know."""

from __future__ import annotations

import os
import traceback
import warnings

from absl.testing import parameterized

import mistakes
import nnx_sharding
from mistakes import MISTAKES, Mistake


class MistakesTest(parameterized.TestCase):
    def error_of(self, own: Mistake) -> BaseException | None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                own.run(nnx_sharding)
            except Exception as error:  # assertRaises would drop the traceback
                return error
        return None

    @parameterized.named_parameters((name, name) for name in MISTAKES)
    def test_message(self, name: str):
        own = MISTAKES[name]
        error = self.error_of(own)
        self.assertIsInstance(error, own.error)
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        missing = [fact for fact in own.facts if fact not in text]
        self.assertEmpty(missing, text)
        # One error, not one that followed another.
        self.assertTrue(error.__suppress_context__ or error.__context__ is None, text)
        # The traceback is the user's.
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ours = os.path.dirname(nnx_sharding.__file__)
        self.assertEmpty([f for f in frames if f.startswith(ours)], frames)
        self.assertIn(mistakes.__file__, frames)
