"""Options of JAX and Flax: which tests cannot run with some (``make test-modes``), and why."""

from __future__ import annotations

import contextlib
import fnmatch
import tempfile
from collections.abc import Iterator

import jax
import pytest
from flax import nnx
from jax.experimental.compilation_cache.compilation_cache import reset_cache


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Everything is compiled: nothing comes from JAX's persistent cache."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    reset_cache()


@contextlib.contextmanager
def with_cache(*, is_enabled: bool = True) -> Iterator[None]:
    """The persistent cache has a folder; programs as quick as those of tests do not get into it."""
    folder, enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    with tempfile.TemporaryDirectory() as new:
        jax.config.update("jax_compilation_cache_dir", folder or new)
        jax.config.update("jax_enable_compilation_cache", is_enabled)
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", enabled)
            jax.config.update("jax_compilation_cache_dir", folder)
            if folder is None:
                reset_cache()


def ignored_warnings() -> Iterator[str]:
    if jax.config.jax_enable_x64:
        # Functions of the tests add 64-bit numbers to 32-bit Variables.
        yield "ignore:scatter inputs have incompatible types:FutureWarning"


def skip(items: list[pytest.Item]) -> None:
    """Marks the tests that cannot run with the options that are set."""
    for name, is_set in _OPTIONS.items():
        if not is_set():
            continue
        for reason, patterns in CANNOT_RUN[name].items():
            for item in items:
                test = item.nodeid.removeprefix("tests/test_")
                if any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns):
                    item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


def _graph() -> bool:
    return nnx.set_graph_mode.current_value()


_OPTIONS = {
    "tree mode": lambda: not _graph(),
    # Tree mode has none either.
    "no graph updates": lambda: not (_graph() and nnx.set_graph_updates.current_value()),
    "x64": lambda: jax.config.jax_enable_x64,
    "rank promotion": lambda: jax.config.jax_numpy_rank_promotion == "raise",
}

# By option and reason: tests, as `file::class::test` without the `test_` of the file.
CANNOT_RUN: dict[str, dict[str, tuple[str, ...]]] = {
    "tree mode": {
        "the arguments share objects, have cycles, or are not pytrees": (
            "arguments.py::KindsTest::test_three_calls_*_rngs",
            "arguments.py::PassingTest::test_shared_by_positional_and_keyword",
            "arguments.py::PassingTest::test_variadic",
            "grad.py::AsFlaxTest::test_program_shared_in_one_argument",
            "references.py::IdentityTest::test_a_call_without_changes_changes_nothing",
            "references.py::IdentityTest::test_new_object*",
            "references.py::ReferenceModeTest::test_shared_ref_variable_is_one",
            "references.py::SameAsPythonTest::*_cycle*",
            "references.py::SameAsPythonTest::*_loose*",
            "references.py::SameAsPythonTest::*_shared_*",
            "shard_map.py::UpdatesTest::test_shared_variables*",
            "shardings.py::DonationTest::test_shared_between_a_donated_and_another_argument",
            "shardings.py::SharedTest::*",
            "stack.py::AsListTest::test_call_tied",
            "stack.py::AsListTest::test_training_shared_dropout",
            "stages.py::CallTest::test_other_sharing_is_refused",
            "stages.py::EvalShapeTest::test_shared_parts_stay_shared",
        ),
        "the reference of Flax takes a DiffState": ("accumulation.py::test_one_reduction*",),
    },
    "no graph updates": {
        "the reference of Flax takes a DiffState": ("accumulation.py::test_one_reduction*",),
        "attributes change inside of the function": (
            "arguments.py::KindsTest::*_dataclass",
            "arguments.py::KindsTest::*_list_and_dict",
            "arguments.py::KindsTest::*_plain_lists",
            "arguments.py::KindsTest::test_three_calls_*_raw_arrays",
            "references.py::IdentityTest::test_detached_*",
            "references.py::IdentityTest::test_new_*",
            "references.py::IdentityTest::test_objects_of_the_caller_move",
            "references.py::MethodTest::test_static_argument_of_method*",
            "references.py::ReferenceModeTest::test_attached_new_ref_variable_*",
            "references.py::ReferenceModeTest::test_moved_ref_variable",
            "references.py::SameAsPythonTest::*_arrays_*",
            "references.py::SameAsPythonTest::*_break_cycle",
            "references.py::SameAsPythonTest::*_change_loose",
            "references.py::SameAsPythonTest::*_containers_*",
            "references.py::SameAsPythonTest::*_two_blocks_*",
            "references.py::SameAsPythonTest::*_untie*",
            "references.py::SameAsPythonTest::test_three_calls_on_the_same_objects_*",
            "references.py::StateOfLibraryObjectsTest::test_train_and_eval_modes",
            "shard_map.py::UpdatesTest::test_added_and_removed_parts",
            "shard_map.py::UpdatesTest::test_static_attribute",
            "shardings.py::DonationTest::test_donated_variable_that_is_removed",
            "statics.py::StaticsTest::test_change_inside_is_written_back_to_the_caller_only",
        ),
        "inputs are returned": (
            "references.py::IdentityTest::test_returned_inputs_are_the_callers_objects",
            "references.py::ReferenceModeTest::test_returned_ref_variable_is_the_callers",
            "shard_map.py::SpecsTest::test_returned_input",
            "shardings.py::DonationTest::test_donated_and_returned",
            "shardings.py::KindsOfShardingsTest::*_over_a_state_argument",
            "shardings.py::NewModelTest::*",
            "stages.py::CallTest::test_structural_updates",
            "stages.py::EvalShapeTest::test_returned_input_is_a_new_abstract_object",
            "stages.py::TreesTest::test_returned_input",
            "stages.py::UntouchedTest::test_by_*",
        ),
        "Flax's own transforms take and return something else": (
            "composition.py::ShardedTest::test_flax_shard_map_inside_of_ours",
            "plain_jax.py::RefTest::test_returned_refs_are_what_they_are_as_with_flax",
            "shard_map.py::NestingTest::test_inside_of_jit_inside_of_grad",
            "state_sharding.py::AsInFlaxTest::*",
        ),
        "it tests the default of this very option": (
            "modes.py::GlobalFlagsTest::test_flags_are_the_default",
            "modes.py::GlobalFlagsTest::test_flags_count_where_a_function_is_decorated_*",
        ),
    },
    "x64": {
        "it expects 32-bit results": (
            "arguments.py::KindsTest::test_abstract_arguments_are_for_stages_only",
            "shardings.py::MeshTest::test_explicit_mesh_as_in_jax",
            "stages.py::BoundTest::test_decorated_method",
        ),
    },
    "rank promotion": {
        "the test itself combines arrays of different rank": (
            "shard_map.py::OptionsTest::test_partial_manual_update",
            "shard_map.py::UpdatesTest::test_sharded_parameters",
            "shard_map.py::UpdatesTest::test_statistics_with_pmean",
        ),
    },
}
