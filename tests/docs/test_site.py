"""The documentation as a site builds without a warning, and its links lead somewhere in the repository as well."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_site_builds(tmp_path: Path) -> None:
    ended = build(CHECKOUT, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    start = (tmp_path / "index.html").read_text()
    assert "small Llama on real text" in start
    assert 'href="numerics.html"' in start and 'href="security.html"' in start
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk|www\.mkdocs)[^"]+\.(?:js|css)"', start), (
        "from elsewhere"
    )
    # Of what pages include, only the package that a page links to lies beside them.
    sources = {
        str(path.relative_to(tmp_path).parent) for path in tmp_path.rglob("*") if path.suffix in (".py", ".toml")
    }
    assert sources == {"example", "example/acme"}


def test_a_broken_link_anchor_or_snippet_fails(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKOUT / "docs", source / "docs")
    for path in (*CHECKOUT.glob("*.md"), CHECKOUT / "mkdocs.yml"):
        shutil.copy(path, source)
    page = source / "docs" / "tour.md"
    text = page.read_text()
    page.write_text(f"{text}\n[a](nowhere.md) [b](numerics.md#nowhere) [c](../NOWHERE.md)\n")
    (source / "docs" / "forgotten.md").write_text("# A page that nothing leads to\n")
    told = build(source, tmp_path / "site")
    assert told.returncode != 0
    for word in ("'nowhere.md'", "'numerics.md#nowhere'", "NOWHERE.md", "forgotten.md"):
        assert word in told.stdout + told.stderr, told.stdout + told.stderr
    page.write_text(text + '\n```python\n--8<-- "example/nowhere.py"\n```\n')
    (source / "docs" / "forgotten.md").unlink()
    told = build(source, tmp_path / "site")
    assert told.returncode != 0 and "example/nowhere.py" in told.stdout + told.stderr


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_links_lead_to_files_of_the_repository(file: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", file.read_text()):
        assert (file.parent / target).exists(), target
