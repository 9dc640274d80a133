"""Pipelines with other axes against one process, as test_layouts.py does it."""

import pytest

from tests.equivalence.layouts import Layout, Model, Record
from tests.equivalence.short import assert_numbers_of_one_process, launch_name, launches

LAUNCHES = launches("test_pipelines_combined")


@pytest.mark.parametrize("layouts", LAUNCHES, ids=launch_name)
def test_layouts_give_the_numbers_of_one_process(
    base: list[str], references: dict[Model, Record], layouts: list[Layout]
) -> None:
    assert_numbers_of_one_process(base, references, layouts)
