"""A hub on this machine, as far as the libraries ask one, and what data sets say of it, as JSON.

In a process of its own, for the libraries read their environment when they are imported.
"""

import hashlib
import http.server
import json
import os
import sys
import threading
import time
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40
TOKEN = "hf_secretsecretsecret"
FILES = {
    "data/train-0.jsonl": b"".join(b'{"text": "train %d", "n": 1}\n' % i for i in range(100)),
    "data/validation-0.jsonl": b'{"text": "validation", "n": 1}\n',
}


class Hub(http.server.BaseHTTPRequestHandler):
    """a/set is there, a/gated not for everybody, and a/script would run code."""

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        url = urlparse(self.path)
        parts = unquote(url.path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            return self.tell("/".join(parts[2:4]), parts[4:])
        name = "/".join(parts[5:])
        body = b"" if parts[1:3] == ["a", "script"] and name == "script.py" else FILES.get(name)
        if body is None or parts[0] != "datasets":
            return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        facts = {"ETag": hashlib.sha256(body).hexdigest(), "X_Repo_Commit": COMMIT}
        if "Range" not in self.headers:
            return self.reply(200, body, **facts)
        first, last = (int(edge) for edge in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        self.reply(206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(body)}", **facts)

    do_HEAD = do_GET

    def tell(self, name: str, rest: list[str]) -> None:
        if name not in ("a/set", "a/gated", "a/script"):
            return self.reply(401, b"{}", X_Error_Code="RepoNotFound")
        if rest == ["auth-check"]:
            return self.reply(403, b"{}", X_Error_Code="GatedRepo")
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self.reply(404, b"{}", X_Error_Code="RevisionNotFound")
        found: Any = {"id": name, "sha": COMMIT, "gated": "manual" if name == "a/gated" else False, "private": False}
        found |= {"tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": file} for file in FILES]}
        if rest[:1] == ["tree"]:
            found = [{"type": "directory", "oid": "1" * 40, "size": 0, "path": "data"}]
            if len(rest) > 2:
                found = [{"type": "file", "oid": "0" * 40, "size": len(FILES[file]), "path": file} for file in FILES]
        self.reply(200, json.dumps(found).encode(), Content_Type="application/json")


def tell(name: str, path: str | None, **options: Any) -> dict[str, Any]:
    """What comes of a data set: its documents, or its error; and in how many seconds."""
    from torchtitan.data.datasets import DATASETS, Place, is_stream
    from torchtitan.errors import ConfigError
    from torchtitan.secrets import hidden

    began = time.monotonic()
    try:
        source = DATASETS.bind(name, options, key="data.args")(path, "raise")
        if is_stream(source):
            documents = [text for found, _ in source.read_from(Place()) for text in found]
        else:
            documents = [text for piece in range(source.num_pieces) for text in source.read(piece)]
        told: dict[str, Any] = {"documents": documents, "fingerprint": source.fingerprint}
    except ConfigError as error:
        told = {"key": error.key, "problem": hidden(error.problem)}
    return {**told, "seconds": time.monotonic() - began}


def main() -> None:
    cases = json.loads(sys.argv[1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_TOKEN": TOKEN}
    if "gone" in cases:
        server.shutdown()
        server.server_close()
    print(json.dumps({name: tell(**case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
