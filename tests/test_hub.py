"""Upload to and download from a local stand-in of the Hugging Face Hub. Nothing leaves the machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import small_config

import incseg
from incseg.cli import main
from incseg.engine.rundir import RunDir
from incseg.io import load_tensors
from incseg.run import train

pytest.importorskip("huggingface_hub", reason="pip install incseg[hub] brings the client of the hub")
# The client of the hub uses what its own HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TOKEN = "hf_a_secret_that_nobody_may_see"


class FakeHub(ThreadingHTTPServer):
    """Repositories in memory: {name: {"private": …, "branches": {revision: {path: content}}}}."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.status: int | None = None
        """If set, the answer to everything."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repo: str, content: bytes, private: bool = False) -> None:
        self.repos[repo] = {"private": private, "branches": {"main": {"model.safetensors": content}}}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, value: Any = None, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value or {}).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str = "") -> None:
        self.answer({"error": "no"}, status, **({"X_Error_Code": code} if code else {}))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.status:
            return self.fail(self.server.status)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            repo = self.known(found[1])
            return repo and self.answer({"id": found[1], "private": repo["private"], "siblings": [], "tags": []})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self.known(found[1])
            if repo is None:
                return None
            branch = repo["branches"].get(found[2])
            if branch is None:
                return self.fail(404, "RevisionNotFound")
            if found[3] not in branch:
                return self.fail(404, "EntryNotFound")
            content = branch[found[3]]
            digest = hashlib.sha256(content).hexdigest()
            return self.answer(content, ETag=f'"{digest}"', X_Repo_Commit=digest[:40])
        return self.fail(404)

    do_HEAD = do_GET

    def known(self, name: str) -> dict[str, Any] | None:
        """Return a repository, or the hub's error if there is none or it is private."""
        repo = self.server.repos.get(name)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and (repo is None or repo["private"]):
            self.fail(401, "RepoNotFound")
            return None
        if repo is None:
            self.fail(404, "RepoNotFound")
        return repo

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(401)
        server, path = self.server, self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            private = asked.get("private") or asked.get("visibility") == "private"
            server.repos[name] = {"private": bool(private), "branches": {"main": {}}}
            return self.answer({"url": f"{server.url}/{name}"})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            branches = server.repos[found[1]]["branches"]
            if found[2] in branches:
                return self.fail(409)
            branches[found[2]] = dict(branches["main"])
            return self.answer()
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "lfs" if p.endswith(".safetensors") else "regular"} for p in files]
            return self.answer({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [
                {**o, "actions": {"upload": {"href": f"{server.url}/blobs/{o['oid']}", "header": {}}}} for o in objects
            ]
            return self.answer({"transfer": "basic", "objects": upload})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            branch = server.repos[found[1]]["branches"][found[2]]
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    branch[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    branch[value["path"]] = server.blobs[value["oid"]]
            return self.answer({"commitUrl": f"{server.url}/{found[1]}/commit/1", "commitOid": "1" * 40, "success": 1})
        return self.answer() if path == "/api/validate-yaml" else self.fail(404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.blobs[self.path.rpartition("/")[2]] = content
        self.answer()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    at_hub(server.url, tmp_path, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def at_hub(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_ENDPOINT and HF_HOME as if before the import of huggingface_hub."""
    from huggingface_hub import constants

    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
        "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_ETAG_TIMEOUT": 2,
    }.items():
        monkeypatch.setattr(constants, name, value, raising=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "run"
    train(small_config(folder, train={"epochs": 1}))
    return folder


IMAGE = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)


def test_a_pushed_model_predicts_like_the_local_one(
    hub: FakeHub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "me/shapes", "--license", "apache-2.0"]) == 0
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert "uploaded; next: incseg predict hf://me/shapes" in out
    assert hub.repos["me/shapes"]["private"] is False
    assert hub.repos["me/shapes"]["branches"]["main"].keys() == {"README.md", "model.safetensors"}
    model = incseg.load("hf://me/shapes")
    expected, found = incseg.load(run).predict(IMAGE), model.predict(IMAGE)
    np.testing.assert_array_equal(expected.labels, found.labels)
    np.testing.assert_array_equal(expected.uncertainty, found.uncertainty)
    hub.status = 503  # the cached file serves if the hub does not
    assert incseg.load("hf://me/shapes").classes == model.classes
    image = tmp_path / "photo.png"
    incseg.load(run).predict(IMAGE).image.save(image)
    assert main(["predict", "hf://me/shapes", str(image), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/photo_mask.png").is_file()
    assert main(["remove", "hf://me/shapes", "--classes", "disc", "--out", str(tmp_path / "less.safetensors")]) == 0


def test_a_revision_is_a_branch_of_its_own(hub: FakeHub, run: Path) -> None:
    assert incseg.push(run, "me/shapes", private=True) == "hf://me/shapes"
    assert incseg.push(RunDir(run).model(0), "me/shapes", revision="base") == "hf://me/shapes@base"
    assert hub.repos["me/shapes"]["private"] is True
    assert len(incseg.load("hf://me/shapes").increments) == 3
    assert len(incseg.load("hf://me/shapes@base").increments) == 1
    with pytest.raises(incseg.UserError, match="hf://me/shapes has no revision 'old'; give a branch"):
        incseg.load("hf://me/shapes@old")


def test_the_card_has_classes_figures_and_licence_and_no_path(run: Path, tmp_path: Path) -> None:
    """A dry run needs neither network nor huggingface_hub."""
    import yaml

    assert incseg.push(run, "me/shapes", out=tmp_path / "files", license="mit") == "hf://me/shapes"
    _, head, text = (tmp_path / "files/README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert (metadata["license"], metadata["library_name"], metadata["pipeline_tag"]) == (
        "mit", "incseg", "image-segmentation",
    )  # fmt: skip
    row = RunDir(run).rows()[-1]
    for name, iou in row["iou"].items():
        assert re.search(rf"\| {name} \|.*\| {iou:.1f} \|", text), name
    assert 'incseg.load("hf://me/shapes")' in text
    assert str(tmp_path) not in text
    with pytest.raises(incseg.UserError, match="exists already and would be overwritten"):
        incseg.push(run, "me/shapes", out=tmp_path / "files")


def test_paths_of_this_machine_are_not_uploaded(run: Path, tmp_path: Path) -> None:
    from incseg.models.files import load_segmenter, save_segmenter

    model, about = load_segmenter(RunDir(run).model(2))
    model.config.weights = "/home/ann/weights.pth"
    about["method"]["replay"] = "/home/ann/photographs"
    about["method"]["kd_reduction"] = "sum"
    save_segmenter(tmp_path / "own.safetensors", model, about)
    incseg.push(tmp_path / "own.safetensors", "me/shapes", out=tmp_path / "files")
    assert all(b"/home/ann" not in file.read_bytes() for file in (tmp_path / "files").iterdir())
    pushed, about = load_segmenter(tmp_path / "files/model.safetensors")
    assert about["method"]["kd_reduction"] == "sum"
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), pushed.state_dict().values(), strict=True)
    )
    assert "How good it is, is not known" in (tmp_path / "files/README.md").read_text()


def test_class_names_cannot_break_the_card(run: Path, tmp_path: Path) -> None:
    import dataclasses

    from incseg.models.files import load_segmenter, save_segmenter

    model, about = load_segmenter(RunDir(run).model(0))
    model.increments[0] = dataclasses.replace(
        model.increments[0], classes=("<script>", "a | b", "[x](http://evil)", "c\n# d", "e", "f")
    )
    save_segmenter(tmp_path / "odd.safetensors", model, about)
    incseg.push(tmp_path / "odd.safetensors", "me/odd", out=tmp_path / "files")
    text = (tmp_path / "files/README.md").read_text()
    assert "| 1 | &lt;script&gt; | 0 |" in text
    assert "| 2 | a \\| b | 0 |" in text
    assert "\\[x\\](http" in text
    assert "| c \\# d |" in text


def test_a_public_repository_does_not_get_a_private_model(hub: FakeHub, run: Path) -> None:
    hub.add("me/open", b"")
    with pytest.raises(incseg.UserError, match="'me/open' exists and is public"):
        incseg.push(run, "me/open", private=True)
    assert hub.repos["me/open"]["branches"]["main"] == {"model.safetensors": b""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02", "is a pickle"),
        (b"PK\x03\x04" + b"x" * 99, "is a pickle"),
        (b"<html>", "truncated, damaged or not a safetensors file"),
    ],
)
def test_a_downloaded_file_is_checked_like_any_other(hub: FakeHub, content: bytes, message: str) -> None:
    hub.add("them/model", content)
    with pytest.raises(incseg.UserError, match=message):
        incseg.load("hf://them/model")


def test_a_downloaded_file_makes_no_code_be_imported(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    from incseg.models.files import load_segmenter, save_segmenter

    model, about = load_segmenter(RunDir(run).model(0))
    about["method"] = {"name": "antigravity:Method"}
    save_segmenter(tmp_path / "evil.safetensors", model, about)
    hub.add("them/evil", (tmp_path / "evil.safetensors").read_bytes())
    with pytest.raises(incseg.UserError, match="trained by 'antigravity:Method', which is not part of incseg"):
        incseg.load("hf://them/evil")


@pytest.mark.parametrize("address", ["hf://me", "hf://me/a/b", "hf://me/a@", "hf://me/a b", "hf://../../x"])
def test_a_wrong_address(hub: FakeHub, address: str) -> None:
    with pytest.raises(incseg.UserError, match=r"not the address of a model|cannot be the name"):
        incseg.load(address)


def test_what_the_hub_refuses_is_one_line(
    hub: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(*command: str) -> str:
        assert main([*command]) == 2
        out, err = capsys.readouterr()
        text = [one for one in err.splitlines() if one.startswith("error:")]
        assert len(text) == 1
        assert "Traceback" not in err
        assert TOKEN not in out + err
        return text[0]

    missing = line("remove", "hf://me/none", "--classes", "a", "--out", "a.safetensors")
    assert "has no model 'me/none'; check the name" in missing
    hub.repos["me/other"] = {"private": False, "branches": {"main": {}}}
    assert "hf://me/other has no file model.safetensors" in line("demo", "hf://me/other")
    assert "leave --step out" in line("export", "hf://me/other", "--out", "a.onnx", "--step", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.add("me/secret", b"", private=True)
    assert "wants a token for 'me/secret'" in line("export", "hf://me/secret", "--out", "a.onnx")
    assert "wants a token for 'me/new'" in line("push", str(run), "me/new")
    monkeypatch.setenv("HF_TOKEN", TOKEN + "é")  # the HTTP library quotes a malformed header
    assert "cannot be reached" in line("push", str(run), "me/new")


def test_a_hub_that_is_not_there(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_hub("http://127.0.0.1:9", tmp_path, monkeypatch)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the package tries again for half a minute
    for call in (lambda: incseg.load("hf://me/shapes"), lambda: incseg.push(run, "me/shapes")):
        with pytest.raises(incseg.UserError, match=r"the hub at http://127.0.0.1:9 cannot be reached \(.*efused\)"):
            call()


def test_without_the_package(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(incseg.UserError, match=r"pip install 'incseg\[hub\]'"):
        incseg.load("hf://me/shapes")
    assert incseg.push(run, "me/shapes", out=tmp_path / "files") == "hf://me/shapes"
    assert load_tensors(tmp_path / "files/model.safetensors")[1]["format"] == "incseg-model"
