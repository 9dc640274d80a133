"""Pipelines alone against one process, as test_layouts.py does it."""

import pytest

from tests.equivalence.layouts import FAULTS, Layout, Model, Record, all_layouts
from tests.equivalence.short import assert_numbers_of_one_process, assert_seen, launch_name, launches

LAUNCHES = launches("test_pipelines")


@pytest.mark.parametrize("layouts", LAUNCHES, ids=launch_name)
def test_layouts_give_the_numbers_of_one_process(
    base: list[str], references: dict[Model, Record], layouts: list[Layout]
) -> None:
    assert_numbers_of_one_process(base, references, layouts)


@pytest.mark.parametrize(("fault", "name"), [item for item in FAULTS.items() if "pp" in item[1]])
def test_the_comparison_sees(base: list[str], references: dict[Model, Record], fault: str, name: str) -> None:
    (layout,) = [layout for layout in all_layouts() if layout.name == name]
    assert_seen(base, references, fault, layout)
