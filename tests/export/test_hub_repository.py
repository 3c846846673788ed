"""Model repositories of Hugging Face: its library reads one from its cache on disk and uploads to a server here."""

import base64
import hashlib
import http.server
import json
import signal
import threading
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load, load_file
from sample_networks import assert_features, open_source

import jcl
from jcl.commands.embed import embed
from jcl.commands.finetune import resume_finetuning
from jcl.errors import Interrupted, RunError, SettingsError
from jcl.evaluate.feature_file import read_feature_file
from jcl.export import export_backbone
from jcl.export.loading import read_initial
from jcl.settings.commands import EmbedOptions
from jcl.settings.detection import DetectOptions
from small_runs import tiny_settings
from supervised_tools import finetune, stop_after

COMMIT = "0123456789" * 4

pytestmark = pytest.mark.usefixtures("empty_starts")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(tmp_path_factory.mktemp("backbones"), "timm/test_resnet")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of Hugging Face's, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def repository(source, cache) -> str:
    """A downloaded model."""
    export_backbone(source.file, "hub-folder", cache / f"models--me--net/snapshots/{COMMIT}")
    (cache / "models--me--net/refs").mkdir()
    (cache / "models--me--net/refs/main").write_text(COMMIT)
    return "hf:me/net"


def test_a_repository_is_a_backbone(source, repository):
    network = jcl.load_backbone("hf:me/net")
    assert_features(network, source)
    assert network.info.mean == (0.5, 0.4, 0.3)
    assert_features(jcl.load_backbone(f"hf:me/net@{COMMIT}"), source)
    assert read_initial(tiny_settings("images", model__init="hf:me/net")).tensors


def test_a_fine_tuning_of_a_repository_is_resumed(repository, npz, tmp_path, monkeypatch):
    options = {"epochs": 2, "batch_size": 8, "device": "cpu", "workers": 0, "out": tmp_path / "tuned"}
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(Path(repository), str(npz), **options)
    assert resume_finetuning(tmp_path / "tuned", workers=0).summary()["epochs"] == 2


def test_files_name_a_repository_as_it_was_given(repository, npz, tmp_path):
    embed(EmbedOptions(weights=Path(repository), data=str(npz), out=tmp_path / "f.npz", device="cpu"))
    assert read_feature_file(tmp_path / "f.npz").info.weights == repository
    start = {"backbone": "resnet18", "mean": (0.0,) * 3, "std": (1.0,) * 3, "label": "net"}
    assert DetectOptions(task="box", init=repository).settings(**start).init == repository


def test_a_repository_that_is_not_there(cache):
    with pytest.raises(RunError, match="hf:me/other"):
        jcl.load_backbone("hf:me/other")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as downloads and uploads of small files need; keeps the files of each repository."""

    def do_GET(self) -> None:
        _, user, name, *rest = self.path.partition("?")[0].removeprefix("/api/models").split("/")
        files = self.server.repositories.get(f"{user}/{name}")
        if files is None:
            self.answer(404, {})
        elif "resolve" in rest:
            self.send_file(files[rest[-1]])
        elif "tree" in rest:
            self.answer(200, [{"type": "file", "path": name, "size": 0, "oid": "0"} for name in files])
        else:
            self.answer(
                200, {"id": f"{user}/{name}", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            )

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_file(self, content: bytes) -> None:
        self.send_response(200)
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "Content-Length": len(content),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        repositories, name = self.server.repositories, "/".join(self.path.split("/")[3:5])
        if self.path == "/api/repos/create":
            name = f"{json.loads(content)['organization']}/{json.loads(content)['name']}"
            self.server.private[name] = b'"private"' in content
            repositories.setdefault(name, {})
            self.answer(200, {"url": f"http://{self.headers['Host']}/{name}"})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(content)["files"]]
            self.answer(200, {"files": [file | {"shouldIgnore": False} for file in files]})
        elif "/commit/" not in self.path:  # a check of the card's front matter
            self.answer(200, {"errors": [], "warnings": []})
        else:
            lines = [json.loads(line) for line in content.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            repositories[name] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            self.answer(200, {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/0", "commitOid": "0"})

    def answer(self, code: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.private = {}, {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setenv("NO_PROXY", "*")
    yield server
    server.shutdown()
    server.server_close()


def test_export_uploads_what_a_hub_folder_holds(source, hub, tmp_path):
    export_backbone(source.file, "hub-folder", tmp_path / "model")
    written = export_backbone(source.file, "hf", "me/net")
    files = hub.repositories["me/net"]
    assert files.keys() == {"README.md", "config.json", "model.safetensors"} and hub.private["me/net"]
    assert files["config.json"] == (tmp_path / "model" / "config.json").read_bytes()
    uploaded, written_here = load(files["model.safetensors"]), load_file(tmp_path / "model" / "model.safetensors")
    assert uploaded.keys() == written_here.keys()
    assert all(torch.equal(value, written_here[name]) for name, value in uploaded.items())
    card = files["README.md"].decode()
    assert "hf-hub:me/net" in card and 'jcl.load_backbone("hf:me/net")' in card and "local-dir" not in card
    assert written.hints[0].endswith("/me/net")
    with pytest.raises(RunError, match="--force"):
        export_backbone(source.file, "hf", "hf:me/net")
    export_backbone(source.file, "hf", "hf:me/net", force=True)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_repository_is_downloaded(source, hub, tmp_path, monkeypatch, weights):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    export_backbone(source.file, "hub-folder", tmp_path / "model")
    torch.save(load_file(tmp_path / "model/model.safetensors"), tmp_path / "model/pytorch_model.bin")
    names = ("config.json", "README.md", weights)
    hub.repositories["me/net"] = {name: (tmp_path / "model" / name).read_bytes() for name in names}
    assert_features(jcl.load_backbone("hf:me/net"), source)


@pytest.mark.parametrize("name", ["net", "me/net/more", "hf:"])
def test_repositories_are_called_user_and_name(source, name):
    with pytest.raises(SettingsError, match="USER/NAME"):
        export_backbone(source.file, "hf", name)
