import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from torchtitan.data import files
from torchtitan.data.columns import column_problem
from torchtitan.data.datasets import DATASETS, Passage, Skipped, TextSource
from torchtitan.errors import ConfigError


def build(name: str, path: Path | str | None, on_bad_record: str = "raise", **options: Any) -> TextSource:
    return DATASETS.bind(name, options, key="data.args")(None if path is None else str(path), on_bad_record)


def read(source: TextSource) -> list[str | Passage | Skipped]:
    return [document for piece in range(source.num_pieces) for document in source.read(piece)]


class TestPythonDocs:
    def test_is_a_few_megabytes_of_english_and_code(self) -> None:
        documents = [d for d in read(build("python_docs", None)) if isinstance(d, str)]
        assert 2e6 < sum(map(len, documents)) < 8e6
        whole = "\n".join(documents)
        for phrase in ("list comprehension", "Return the ceiling of x as an Integral", "def namedtuple("):
            assert phrase in whole

    def test_is_the_same_in_another_process_whatever_was_replaced_there(self) -> None:
        code = (
            "import builtins, sys; builtins.print = sys.excepthook = lambda *args: None\n"
            "from torchtitan.data.python_docs import PythonDocs; import hashlib; s = PythonDocs()\n"
            "text = [d for k in range(s.num_pieces) for d in s.read(k)]\n"
            "sys.stdout.write(s.fingerprint + hashlib.sha256(repr(text).encode()).hexdigest())"
        )
        found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        source = build("python_docs", None)
        assert found == source.fingerprint + hashlib.sha256(repr(read(source)).encode()).hexdigest()

    def test_takes_no_path(self) -> None:
        with pytest.raises(ConfigError, match="takes no path"):
            build("python_docs", "x.txt")


class TestText:
    def test_each_file_is_a_document_to_the_byte(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes("one\r\n\n é ".encode())
        (tmp_path / "b.md").write_bytes(b"")
        (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
        (tmp_path / "d.log").write_bytes(b"other")
        assert read(build("text", tmp_path)) == ["one\r\n\n é ", "", "with a mark"]
        assert read(build("text", tmp_path, suffixes=[".log"])) == ["other"]

    def test_a_large_file_comes_in_passages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_MIN_PIECE_BYTES", 100)
        monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 100)
        text = "".join(f"line {i} é\n" for i in range(100))
        (tmp_path / "a.txt").write_text(text)
        passages = read(build("text", tmp_path))
        assert len(passages) > 5 and all(isinstance(p, Passage) for p in passages)
        assert "".join(p.text for p in passages if isinstance(p, Passage)) == text
        ends = [(p.opens, p.closes) for p in passages if isinstance(p, Passage)]
        assert ends == [(True, False)] + [(False, False)] * (len(passages) - 2) + [(False, True)]

    def test_text_in_another_encoding(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"first\nsecond \xff third\n")
        with pytest.raises(ConfigError, match=r"a\.txt:2: not UTF-8 \(byte 0xff\).*data\.on_bad_record = skip"):
            read(build("text", path))
        (tmp_path / "b.txt").write_text("good")
        skipped, good = read(build("text", tmp_path, "skip"))
        assert isinstance(skipped, Skipped) and str(skipped).endswith("a.txt:2: not UTF-8 (byte 0xff)")
        assert good == "good"

    def test_a_bad_part_of_a_large_file_leaves_its_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_MIN_PIECE_BYTES", 10)
        monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 10)
        (tmp_path / "a.txt").write_bytes(b"\xff bad bad\ngood good\n")
        skipped, *passages = read(build("text", tmp_path, "skip"))
        assert isinstance(skipped, Skipped)
        assert [(p.text, p.opens, p.closes) for p in passages if isinstance(p, Passage)] == [
            ("", True, False),
            ("good good\n", False, True),
        ]


BAD_RECORDS = [
    (b"{nope", r"not JSON \(Expecting property name.*column 2\)"),
    (b'{"body": "x", "id": 3}', "no key 'text' .there are: body, id; set data.args.text_key"),
    (b'{"text": 3}', "'text' holds a JSON int, not a string"),
    (b'{"text": null}', "'text' holds a JSON NoneType"),
    (b'["text"]', "a JSON list where an object"),
    (b'{"text": "\xff"}', "not UTF-8 .byte 0xff"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"text": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
    (b"[" * 100_000, "too deep to read"),
    (b'{"a\\nb": 1, "c": 2}', r"there are: a\\nb, c; set"),
    (b"{" + b", ".join(b'"%d": 0' % n for n in range(1000)) + b"}", "6, 7 and 992 more;"),
]


class TestJsonl:
    def test_lines_are_documents(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('\ufeff{"text": "one\\ntwo"}\n\n{"text": "", "body": "é"}\r\n{"text": "last", "body": "x"}')
        assert read(build("jsonl", path)) == ["one\ntwo", "", "last"]

    def test_another_key(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
        assert read(build("jsonl", tmp_path, text_key="body")) == ["x"]

    @pytest.mark.parametrize(("line", "problem"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
    def test_bad_records(self, tmp_path: Path, line: bytes, problem: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
        with pytest.raises(ConfigError, match=rf"a\.jsonl:3: .*{problem}") as error:
            read(build("jsonl", path))
        assert error.value.key == "training.dataset_path"
        first, skipped, last = read(build("jsonl", path, "skip"))
        assert (first, last) == ("first", "last") and isinstance(skipped, Skipped)

    def test_lines_are_counted_in_later_pieces_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_MIN_PIECE_BYTES", 64)
        monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 64)
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(100)) + "bad\n")
        source = build("jsonl", path)
        assert source.num_pieces > 10
        with pytest.raises(ConfigError, match=r"a\.jsonl:101: "):
            read(source)

    def test_a_file_that_vanishes(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "x"}\n')
        source = build("jsonl", path)
        path.unlink()
        with pytest.raises(ConfigError, match="No such file"):
            read(source)

    @pytest.mark.parametrize("on_bad_record", ["raise", "skip"])
    def test_a_file_that_is_rewritten_meanwhile(self, tmp_path: Path, on_bad_record: str) -> None:
        """Whether it can be read to its end or not: what was read is of neither."""
        path = tmp_path / "a.jsonl"
        for rewritten in ("{", '{"text": "y"}\n'):
            path.write_text('{"text": "x"}\n' * 1000)
            documents = build("jsonl", path, on_bad_record).read(0)
            assert next(documents) == "x"
            with open(path, "r+") as file:
                file.write(rewritten)
            os.utime(path, ns=(1, 1))
            with pytest.raises(ConfigError, match=r"a\.jsonl was changed while it was read"):
                list(documents)

    def test_a_file_that_is_rewritten_before_it_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "x"}\n')
        source = build("jsonl", path)
        path.write_text("no JSON at all\n")
        with pytest.raises(ConfigError, match="was changed while it was read"):
            list(source.read(0))


class TestC4Test:
    def test_with_a_path_is_jsonl(self, tmp_path: Path) -> None:
        (tmp_path / "data.json").write_text('{"text": "x"}\n')
        assert read(build("c4_test", tmp_path)) == ["x"]

    def test_without_is_python_docs_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []
        monkeypatch.setattr("torchtitan.data.datasets.json_lines.note_once", said.append)
        assert build("c4_test", None).name == "python_docs"
        assert len(said) == 1 and "python_docs" in said[0]


@pytest.mark.parametrize("path", [None, ""])
@pytest.mark.parametrize("name", ["text", "jsonl", "c4_test", "c4", "hub", "parquet", "nanoset", "megatron"])
def test_files_need_a_path(name: str, path: str | None) -> None:
    """An empty one, which a shell makes of a variable that is not set, is not the working directory."""
    if path is None and name.startswith("c4"):
        return  # it means data of its own
    with pytest.raises(ConfigError, match=f"the dataset {name.replace('c4_test', 'jsonl')} needs"):
        build(name, path)


@pytest.mark.parametrize("name", ["text", "jsonl", "c4", "hub", "parquet", "nanoset", "megatron"])
def test_a_path_in_the_home_of_nobody(name: str) -> None:
    with pytest.raises(ConfigError, match="no home folder ~nobody9") as error:
        build(name, "~nobody9/x")
    assert error.value.key == "training.dataset_path"


def test_fingerprint_follows_what_the_documents_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "body": "y"}\n')
    os.utime(path, ns=(1, 1))
    same = [build("jsonl", path), build("jsonl", tmp_path), build("jsonl", tmp_path / "*.jsonl")]
    other = [build("jsonl", path, text_key="body"), build("jsonl", path, "skip"), build("text", path)]
    os.utime(path, ns=(2, 2))
    other.append(build("jsonl", path))
    assert len({s.fingerprint for s in same}) == 1
    assert len({s.fingerprint for s in same + other}) == 1 + len(other)


def test_a_link_to_nothing_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("gone.txt")
    with pytest.raises(ConfigError, match=r"cannot read .*b\.txt: it is a symbolic link to gone\.txt, which is not"):
        build("text", tmp_path)


def test_names_of_strangers_are_few_and_on_one_line() -> None:
    """Columns as well as the keys of JSON."""
    schema = pa.schema([(f"a\n{n}", pa.string()) for n in range(1000)])
    problem = column_problem(schema, "text") or ""
    assert "\n" not in problem and "a\\n7 and 992 more; set" in problem
    kind = pa.struct([(f"a\n{n}", pa.string()) for n in range(1000)])
    problem = column_problem(pa.schema([("text", kind)]), "text") or ""
    assert "\n" not in problem and len(problem) < 200


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_another_file_of_the_same_name_size_and_time_is_other_data(tmp_path: Path, name: str) -> None:
    """As of archives with fixed times."""
    found = set()
    for word in ("one", "two"):
        path = tmp_path / word / "a.jsonl"
        path.parent.mkdir()
        path.write_text(json.dumps({"text": f"{word} " * 100_000}) + "\n")
        os.utime(path, ns=(1, 1))
        found.add(build(name, path).fingerprint)
    assert len(found) == 2
