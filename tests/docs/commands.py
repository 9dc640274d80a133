"""Reads the commands, keys and TOML of a Markdown file and says which of them would not work.

Run as a program, one for each file, since what the file's own examples register stays in its process:
python -m tests.docs.commands FILE FOLDER, where FOLDER takes the modules that the file tells the reader to write.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import ConfigError, describe_error, load_config
from torchtitan.config.help import explain
from torchtitan.config.nearest import nearest_key
from torchtitan.config.parts import offered, with_options
from torchtitan.config.presets import DEFAULT
from torchtitan.config.schema import SECTIONS
from torchtitan.config.sources import is_known
from torchtitan.config.toml import parse

CHECKOUT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)(```+) *([\w-]*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_SNIPPET = re.compile(r"""^[ \t]*-+8<-+ ["']([^"':]+)(?::(\w+))?["'][ \t]*$""", re.MULTILINE)
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|N|….*|\.\.\.|<.*>")
"""FILE, KEY, N, …: what the reader is to put something in place of."""
_OPTIONAL = re.compile(r"\[(?:…|\.\.\.|--|[A-Z])[^\]]*\]")
_KEY = re.compile(r"[a-z_]+(\.[a-z0-9_*]+)+")
_FILE_NAME = re.compile(r".*\.(py|toml|md|jsonl?|sh|csv|txt|yml)$")
_INSTALL = re.compile(r"\.\[([\w,-]+)\]")


def with_snippets(text: str) -> str:
    """``text`` with the files that it includes by reference in their places."""

    def content(match: re.Match[str]) -> str:
        found = next(path for path in (CHECKOUT / "docs" / match[1], CHECKOUT / match[1]) if path.is_file())
        included = found.read_text()
        if match[2]:
            included = re.split(rf".*8<-+ \[(?:start|end):\s*{match[2]}\].*\n", included)[1]
        return included.rstrip("\n")

    return _SNIPPET.sub(content, text)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block."""
    for match in _FENCE.finditer(text):
        yield match[3], re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)


def inline(text: str) -> list[str]:
    """Code within sentences, on one line."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCE.sub("", text))]


def commands(text: str) -> Iterator[str]:
    """Everything that a reader could type."""
    for language, content in blocks(text):
        if language in ("", "bash", "sh", "shell", "console"):
            for line in content.replace("\\\n", " ").splitlines():
                yield from line.removeprefix("$ ").split(" && ")
    for code in inline(text):
        yield from code.split(" && ")


def problem(command: str) -> str | None:
    """What is wrong with ``command``; None where nothing is, or where it is none of ours."""
    try:
        words = shlex.split(_OPTIONAL.sub("", command), comments=True)
    except ValueError:
        return None  # a sentence with an apostrophe
    environment = {}
    while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
        environment[assignment[1]] = assignment[2]
        words.pop(0)
    words = list(itertools.takewhile(lambda word: word not in (">", "|", ";"), words))
    words = [word for word in words if word not in ("…", "...")]
    if not words:
        return None
    try:
        return _problem(words, environment)
    except ConfigError as error:
        return describe_error(error)


def _problem(words: list[str], environment: dict[str, str]) -> str | None:
    for extra in itertools.chain(*(found[1].split(",") for word in words if (found := _INSTALL.search(word)))):
        if words[:2] == ["pip", "install"] and extra not in _extras():
            return f"there is no extra {extra}"
    if words[0].endswith("run_train.sh"):
        return _started(words[1:], environment)
    if re.fullmatch(r"--[a-z_-]+\.\S+", words[0]):
        return _configured(words)
    if words[0] == "torchrun" and "-m" in words:
        words = ["python", *words[words.index("-m") :]]
    if words[0] not in ("python", "python3"):
        return None
    if words[1:2] and re.fullmatch(r"scripts/\w+\.py", words[1]):
        return _script(words[1], words[2:])
    if words[1:2] == ["-m"] and words[2:3] and words[2].startswith("torchtitan."):
        return _module(words[2], words[3:], environment)
    return None


def _module(name: str, arguments: list[str], environment: dict[str, str]) -> str | None:
    if name == "torchtitan.launch":
        return _started(arguments, environment)
    if name == "torchtitan.train":
        return _configured(arguments)
    if name == "torchtitan.config":
        for command in (arguments or ["--help"])[0].split("|"):
            if found := _looked_at(command, arguments[1:]):
                return found
        return None
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        return f"there is no {name}"
    named = [word for word in arguments[:1] if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)]  # each has options of its own
    return _offers([sys.executable, "-m", name, *named, "--help"], arguments)


def _looked_at(command: str, arguments: list[str]) -> str | None:
    """By ``python -m torchtitan.config``."""
    if command not in ("print", "check", "explain", "reference", "--help", "-h"):
        return f"torchtitan.config has no command {command}"
    if command == "explain" and arguments and not arguments[0].startswith("--"):
        key, *arguments = arguments
        if not _PLACEHOLDER.fullmatch(key):
            explain(key, load_config(_filled(arguments)))
    return _configured(arguments)


def _started(arguments: list[str], environment: dict[str, str]) -> str | None:
    """By run_train.sh."""
    number = environment.get("NGPU", "1")
    if not number.isdecimal() and not _PLACEHOLDER.fullmatch(number):
        return f"NGPU={number} is no number"
    file = environment.get("CONFIG_FILE", DEFAULT)
    return _configured([f"--job.config_file={DEFAULT if _PLACEHOLDER.fullmatch(file) else file}", *arguments])


def _configured(arguments: list[str]) -> str | None:
    load_config([word for word in _filled(arguments) if word not in ("--help", "-h", "--version")])
    return None


def _filled(arguments: list[str]) -> list[str]:
    """``arguments`` without what stands for something else: placeholders with their keys, and ``[…]``."""
    filled = []
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        _, equals, value = word.partition("=")
        open_value = _PLACEHOLDER.fullmatch(value if equals else following)
        # --section.key itself is an example of one
        if re.match(r"--(section|a)\.", word) or (word.startswith("--") and open_value):
            continue
        if not word.startswith("--") and (_PLACEHOLDER.fullmatch(word) or word == "value"):
            continue
        filled.append(word)
    return filled


def _script(name: str, arguments: list[str]) -> str | None:
    path = CHECKOUT / name
    if not path.is_file():
        return f"there is no {name}"
    if "argparse" in path.read_text():
        return _offers([sys.executable, name, "--help"], arguments)
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    return next((f"{name} has no {option}" for option in options if option not in path.read_text()), None)


def _offers(help_command: list[str], arguments: list[str]) -> str | None:
    """Whether the help names every option of ``arguments``."""
    ended = _help(tuple(help_command))
    if ended.returncode:
        return f"{' '.join(help_command[1:])} ends with {ended.returncode}"
    options = [word.partition("=")[0] for word in arguments if word.startswith("--") and "." not in word]
    return next((f"its help does not name {option}" for option in options if option not in ended.stdout), None)


@functools.cache
def _help(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=CHECKOUT)


def _extras() -> set[str]:
    return set(parse((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def unknown_keys(text: str) -> Iterator[str]:
    """Keys named within sentences that there are not."""
    options = {key for choice in with_options() for key, *_ in offered(choice)}
    for code in inline(text):
        key = re.split(r"\s*=", code)[0].removeprefix("--")
        if not _KEY.fullmatch(key) or _FILE_NAME.fullmatch(key) or key.partition(".")[0] not in SECTIONS:
            continue
        table = key.rpartition(".")[0]
        known = is_known(key) or key in options or key in SECTIONS or key.endswith(".*")
        if not known and not table.startswith(("model.args", "metrics.sink_args", "data.args")):
            yield f"{key}: there is no such key; did you mean {nearest_key(key)}?"


def bad_toml(text: str, folder: Path) -> Iterator[str]:
    """Blocks of a configuration that do not load."""
    for language, content in blocks(text):
        if language != "toml":
            continue
        try:
            table = parse(content)
        except ValueError as error:
            yield f"{content.splitlines()[0]} …: {error}"
            continue
        if table.keys() & {"project", "build-system", "tool"}:
            continue
        (folder / "block.toml").write_text(content)
        try:
            load_config([f"--job.config_file={folder / 'block.toml'}"])
        except ConfigError as error:
            yield f"{content.splitlines()[0]} …: {describe_error(error)}"


def learn_modules(text: str, folder: Path) -> None:
    """Make importable what the text tells the reader to write (``# name.py`` heads the block), and what it ships."""
    for language, content in blocks(text):
        if language == "python" and (named := re.match(r"# (\w+\.py)\b", content)):
            (folder / named[1]).write_text(content)
    roots = [path.parent for path in (CHECKOUT / "docs").rglob("pyproject.toml")]
    roots += [CHECKOUT / path for path in re.findall(r"PYTHONPATH=(\S+)", text) if not Path(path).is_absolute()]
    sys.path[:0] = [str(folder), *(str(path) for root in roots for path in (root, root / "src"))]


def problems(file: Path, folder: Path) -> list[str]:
    """All that is wrong in ``file``."""
    text = with_snippets(file.read_text())
    learn_modules(text, folder)
    found = [f"{command}: {what}" for command in dict.fromkeys(commands(text)) if (what := problem(command))]
    return [*found, *dict.fromkeys(unknown_keys(text)), *bad_toml(text, folder)]


def main(argv: list[str]) -> int:
    """Print what is wrong in the file, as a list in JSON."""
    os.chdir(CHECKOUT)  # names of presets are seen from there
    print(json.dumps(problems(Path(argv[0]), Path(argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
