"""``encode``: what the tokenizer of a configuration makes of files.

What is counted is worked out in tokens/survey.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchtitan.config import load_config
from torchtitan.data.datasets import TextSource, is_stream, is_tokens, source_builder
from torchtitan.data.files import KEY
from torchtitan.data.tokenizer import TOKENIZERS, DescribedTokenizer, Tokenizer, special_ids
from torchtitan.data.tokens.survey import Survey, survey, total
from torchtitan.errors import ConfigError, brief

_MOST_IDS = 10_000
_MOST_NAMED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="a file, a folder, a glob, or - for standard input")
    parser.add_argument(
        "--as",
        dest="kind",
        metavar="KIND",
        default="text",
        help="kind of data set that FILE is, as training.dataset has it, which brings data.args (default: text)",
    )
    parser.add_argument("--ids", action="store_true", help="print the ids and pieces of short texts as well")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the report; ConfigError where the configuration or a file cannot be used."""
    config = load_config(overrides)
    data, kind = config.data, arguments.kind
    name, options = config.tokenizer.name, config.tokenizer.model_extra or {}
    tokenizer = TOKENIZERS.bind(name, options, key="tokenizer")(config.model.hf_assets_path)
    problem = ""
    edges: tuple[int | None, int | None] = None, None
    try:
        edges = special_ids(tokenizer, data)
    except ConfigError as error:
        if error.key not in ("data.add_bos", "data.add_eos"):
            raise
        problem = str(error)  # training would be refused; the text has its tokens all the same
    build = source_builder(kind, data.args if kind == config.training.dataset else {}, data.on_bad_record, key="--as")
    found: dict[str, Survey] = {}
    for file in dict.fromkeys(arguments.files):
        try:
            with _on_disk(file) as path:
                source = build(path)
                if is_tokens(source):
                    raise ConfigError(file, f"holds tokens already, as {kind}; give text")
                if is_stream(source):
                    raise ConfigError(file, "is a stream, whose end nobody knows; set data.args.streaming = false")
                found[file] = _survey(source, tokenizer, keep=_MOST_IDS + 1 if arguments.ids else 0)
                found[file].first_skipped = found[file].first_skipped.replace(path, file)
        except ConfigError as error:
            raise ConfigError(file, error.problem) if error.key == KEY else error from None
        if len(found[file].ids) > _MOST_IDS:
            raise ConfigError(file, f"has more than {_MOST_IDS:,} tokens; --ids is for short texts")
    report = _report(tokenizer, name, edges, problem, found, ids=arguments.ids)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))
    return 0


@contextlib.contextmanager
def _on_disk(file: str) -> Iterator[str]:
    """Where ``file`` lies; within, standard input lies in a file as well, of which errors say ``-`` all the same."""
    if file != "-":
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "-")
        with open(path, "wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        try:
            yield str(path)
        except ConfigError as error:
            error.problem = error.problem.replace(str(path), file)
            raise


def _survey(source: TextSource, tokenizer: Tokenizer, *, keep: int) -> Survey:
    with tqdm(desc="encoding", total=source.num_pieces, unit="piece", disable=None, leave=False, delay=1) as bar:
        return survey(source, tokenizer, keep=keep, seen=bar.update)


def _report(
    tokenizer: Tokenizer,
    kind: str,
    edges: tuple[int | None, int | None],
    problem: str,
    found: Mapping[str, Survey],
    *,
    ids: bool,
) -> dict[str, Any]:
    """All that is shown, as ``--json`` prints it."""
    known = tokenizer if isinstance(tokenizer, DescribedTokenizer) else None

    def named(token_id: int) -> str | None:
        return known.token(token_id) if known else None

    def counted(of: Survey, which: Sequence[int]) -> list[dict[str, Any]]:
        most = sorted((i for i in which if of.counts[i]), key=lambda i: (-of.counts[i], i))
        return [{"id": i, "token": named(i), "count": of.counts[i]} for i in most]

    def of(survey: Survey) -> dict[str, Any]:
        unknown = counted(survey, sorted(known.unknown_ids) if known else ())
        special = counted(
            survey, [i for i in known.special_tokens.values() if i not in known.unknown_ids] if known else ()
        )
        difference = survey.difference
        return {
            "documents": survey.documents,
            "bytes": survey.text_bytes,
            "characters": survey.characters,
            "tokens": survey.tokens,
            "bytes_per_token": _ratio(survey.text_bytes, survey.tokens),
            "tokens_per_byte": _ratio(survey.tokens, survey.text_bytes),
            "distinct_tokens": len(survey.counts),
            "unknown_tokens": sum(entry["count"] for entry in unknown),
            "unknown": unknown,
            "special_tokens": special,
            "round_trip": difference is None,
            "first_difference": vars(difference) if difference else None,
            "skipped": survey.skipped,
            "first_skipped": survey.first_skipped or None,
            "encode_seconds": round(survey.encode_seconds, 6),
            "tokens_per_second": _ratio(survey.tokens, survey.encode_seconds),
        }

    def edge(token_id: int | None) -> dict[str, Any] | None:
        return None if token_id is None else {"id": token_id, "token": named(token_id)}

    files = [{"file": file, **of(one)} for file, one in found.items()]
    if ids:
        for entry, one in zip(files, found.values(), strict=True):
            entry |= {"ids": one.ids, "pieces": [named(i) for i in one.ids]}
    return {
        "tokenizer": {"name": kind, "from": tokenizer.name, "vocab_size": tokenizer.vocab_size},
        "bos": edge(edges[0]),
        "eos": edge(edges[1]),
        "refused": problem or None,
        "files": files,
        "total": of(total(list(found.values()))),
    }


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None


_COLUMNS = {
    "documents": "{:,}",
    "bytes": "{:,}",
    "characters": "{:,}",
    "tokens": "{:,}",
    "bytes_per_token": "{:.3f}",
    "tokens_per_byte": "{:.3f}",
    "unknown_tokens": "{:,}",
    "special_tokens": "{:,}",
    "round_trip": "{}",
    "tokens_per_second": "{:,.0f}",
}


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for people."""
    about = report["tokenizer"]
    yield f"tokenizer {about['from']} ({about['name']}), {about['vocab_size']:,} ids"
    if report["refused"]:
        yield f"around each document: training is refused; {report['refused']}"
    else:
        edges = [f"{which.upper()} {_token(report[which])}" for which in ("bos", "eos") if report[which]]
        yield f"around each document: {' and '.join(edges) or 'nothing'}, which is not counted here"
    yield ""
    rows = [*report["files"], {"file": "total", **report["total"]}] if len(report["files"]) > 1 else report["files"]
    cells = [["", *(column.replace("_", " ") for column in _COLUMNS)]]
    cells += [[row["file"], *(_cell(row[column], form) for column, form in _COLUMNS.items())] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
    for title, key in (("unknown", "unknown"), ("special", "special_tokens")):
        entries = report["total"][key]
        if entries:
            shown = ", ".join(f"{_token(entry)} × {entry['count']:,}" for entry in entries[:_MOST_NAMED])
            more = f", and {len(entries) - _MOST_NAMED} more" if len(entries) > _MOST_NAMED else ""
            yield f"{title} tokens: {shown}{more}"
    for row in report["files"]:
        if at := row["first_difference"]:
            where = f"document {at['document']}, line {at['line']}, column {at['column']}"
            yield f"{row['file']} does not come back: {where}: {at['text']!r} came back as {at['decoded']!r}"
        if row["skipped"]:
            yield f"{row['file']}: {row['skipped']:,} bad records skipped, the first: {row['first_skipped']}"
    for row in report["files"]:
        if "ids" in row:
            yield f"\n{row['file']}"
            yield from (f"{i:8}  {piece!r}" for i, piece in zip(row["ids"], row["pieces"], strict=True))


def _token(entry: Mapping[str, Any]) -> str:
    return str(entry["id"]) if entry["token"] is None else f"{entry['id']} {brief(entry['token'])}"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return form.format(sum(entry["count"] for entry in value) if isinstance(value, list) else value)
