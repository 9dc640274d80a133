"""Pages of the site that are files beside ``docs/``: README.md is its start, and so on, with links that lead to pages.

Read by mkdocs (``hooks`` in mkdocs.yml). No page is written here.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "NOTICE.md": "notice.md",
    "SECURITY.md": "security.md",
}
"""File at the top of the repository → its page."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    top = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=with_links_of_the_site((top / source).read_text(), ".")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links of pages that lie in docs/."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return with_links_of_the_site(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def with_links_of_the_site(markdown: str, folder: str) -> str:
    """``markdown`` of a file in ``folder`` of the repository, with links to what has a page leading there."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        inside = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is None:
            return match[1]
        here = "" if folder == "." else posixpath.relpath(folder, "docs")
        return posixpath.relpath(inside, here or ".")

    return _LINK.sub(link, markdown)
