"""Layouts against one process: initial weights to the bit; loss, norm and each parameter's gradient to 1e-5.

Here those without a pipeline. These are some of the layouts; ``scripts/prove_layouts.py`` compares all of them.
"""

import pytest

from tests.equivalence.layouts import FAULTS, Layout, Model, Record, all_layouts, short_form
from tests.equivalence.short import ROOMS, assert_numbers_of_one_process, assert_seen, launch_name, launches

LAUNCHES = launches("test_layouts")


@pytest.mark.parametrize("layouts", LAUNCHES, ids=launch_name)
def test_layouts_give_the_numbers_of_one_process(
    base: list[str], references: dict[Model, Record], layouts: list[Layout]
) -> None:
    assert_numbers_of_one_process(base, references, layouts)


@pytest.mark.parametrize(("fault", "name"), [item for item in FAULTS.items() if "pp" not in item[1]])
def test_the_comparison_sees(base: list[str], references: dict[Model, Record], fault: str, name: str) -> None:
    (layout,) = [layout for layout in all_layouts() if layout.name == name]
    assert_seen(base, references, fault, layout)


def test_the_whole_matrix_is_what_the_docs_say() -> None:
    layouts = all_layouts()
    assert len({layout.name for layout in layouts}) == len(layouts)
    assert {layout.ranks for layout in layouts} == {1, 2, 3, 4, 6, 8, 16}


def test_no_layout_of_the_short_form_is_left_out() -> None:
    assert all(sum(fits(layout) for fits in ROOMS.values()) == 1 for layout in short_form())
