"""NOTICE.md names every package that pyproject.toml asks for, for what, and under the licence it says it has."""

import importlib.metadata
import re
import sys

import pytest

from tests.conftest import CHECKOUT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAMILIES = {
    "MIT": r"\bMIT\b",
    "BSD": r"BSD|Redistribution and use in source and binary forms",
    "Apache": r"\bApache\b",
    "MPL": r"\bMPL\b|Mozilla",
    "PSF": r"\bPSF\b|Python Software Foundation",
    "GPL": r"GPL|General Public",
}


def families(text: str) -> set[str]:
    return {name for name, pattern in FAMILIES.items() if re.search(pattern, text)}


def rows() -> dict[str, tuple[str, str]]:
    found = re.findall(r"^\| (\S+) \| (.+?) \| (.+?) \|$", (CHECKOUT / "NOTICE.md").read_text(), re.MULTILINE)
    return {package: (needed, licence) for package, needed, licence in found if package != "package"}


def asked_for() -> dict[str, str]:
    """Package → "all", or the extra that brings it."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    asked = {None: project["dependencies"], **project["optional-dependencies"]}
    names = ((re.match(r"[\w-]+", line), extra) for extra, lines in asked.items() for line in lines)
    return {name[0]: extra or "all" for name, extra in names if name and name[0] != "torchtitan"}


def test_every_package_asked_for_is_named_and_no_other() -> None:
    needed = {package: re.sub("[`,].*", "", for_what.lstrip("`")) for package, (for_what, _) in rows().items()}
    assert needed == asked_for()


@pytest.mark.parametrize("package", rows())
def test_its_licence_is_what_it_says_itself(package: str) -> None:
    written = families(rows()[package][1])
    assert written and "GPL" not in written
    try:
        about = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        assert rows()[package][0] in ("`dev`", "all, on Python 3.10"), "the tests need it"
        return
    title = (about["License"] or "").partition("\n")[0]  # some give the whole text there
    short = [title] if len(title) < 100 else []
    classifiers = [name for name in about.get_all("Classifier") or [] if name.startswith("License")]
    stated = families(" ".join([about["License-Expression"] or "", *short, *classifiers]))
    if not stated:  # torchao gives the text of its licence alone
        files = importlib.metadata.files(package) or []
        stated = families("\n".join(file.read_text() for file in files if file.name == "LICENSE"))
    assert stated and stated <= written, stated
