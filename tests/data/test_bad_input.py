from pathlib import Path

import pytest

from tests.data.bad_input import TABLE, Bad, message, tokenise
from torchtitan.data.datasets import DATASETS
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.tokenizers.utf8 import BytesTokenizer
from torchtitan.data.tokens.cache import open_tokens
from torchtitan.data.tokens.encode import Encoding
from torchtitan.errors import ConfigError


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: f"{bad.dataset}: {bad.what}")
def test_bad_input_is_told_with_its_place_or_counted(tmp_path: Path, bad: Bad) -> None:
    said = message(bad, tmp_path)
    assert said.startswith("training.dataset_path: ") and bad.says in said and "\n" not in said
    if bad.skipped is None or bad.left == 0:
        with pytest.raises(ConfigError, match=None if bad.skipped is None else "empty: .* 1 bad records were skipped"):
            tokenise(bad, tmp_path, "skip")
        return
    assert "data.on_bad_record = skip" in said
    assert tokenise(bad, tmp_path, "skip") == (bad.left, bad.skipped)


def test_documents_of_any_length_are_not_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "' + "long " * 700 + '"}\n{"text": ""}\n')
    source = DATASETS.bind("jsonl", {}, key="data.args")(str(tmp_path), "raise")
    tokens = open_tokens(source, Encoding(BytesTokenizer(), None, 256), cache_folder=str(tmp_path / "cache"))
    assert (tokens.header.documents, tokens.header.skipped, len(tokens)) == (3, 0, 3503)
    rows = ConcatRows(tokens, seq_len=34, shuffle=False, seed=0)
    assert rows.rows_per_epoch == 100
    assert rows[0][0].tolist() == [256, *(b"long " * 7)[:33]]
