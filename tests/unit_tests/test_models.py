"""Model files by name, without a network: wheels are made here and "downloaded" by copying."""

import hashlib
import http.server
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import types
import zipfile
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest

from specguard_chains import models
from specguard_chains.errors import (
    ConfigurationError,
    ModelIntegrityError,
    ModelNotFoundError,
)
from specguard_chains.models import FileState, ModelFile, ModelPair, Wheel, sources
from specguard_chains.models.cache import is_ready

CONTENT = b"GGUF" + bytes(range(256)) * 40
PIECES = [CONTENT[:3000], CONTENT[3000:6000], CONTENT[6000:6001], CONTENT[6001:]]
WHEELS = (
    Wheel("toy-part1", "1.0", ("toy_part1/a.bin",)),
    Wheel("toy-part2", "1.0", ("toy_part2/a.bin", "toy_part2/b.bin")),
    Wheel("toy-part3", "1.0", ("toy_part3/a.bin",)),
)
TOY = ModelFile(
    name="toy",
    file="toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="CC0-1.0",
    hub_repo="toys/toy",
    wheels=WHEELS,
)
Usage = namedtuple("Usage", "total used free")


class Shop:
    """A folder of wheels in place of an index; remembers, in a file, which ones were fetched."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "fetched.txt"
        self.trip_at = None
        self.pause_s = 0.0
        self.fill(PIECES)

    def fill(self, pieces):
        pieces = iter(pieces)
        for wheel in WHEELS:
            with zipfile.ZipFile(self.path(wheel), "w") as archive:
                for member in wheel.members:
                    archive.writestr(member, next(pieces))
                archive.writestr(f"{wheel.distribution}.dist-info/RECORD", "")

    def path(self, wheel):
        return self.folder / f"{wheel.distribution.replace('-', '_')}-1.0-py3-none-any.whl"

    def download(self, wheel, folder, report):
        with self.log.open("a") as log:
            log.write(f"{wheel.distribution}\n")
        if wheel.distribution == self.trip_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause_s)
        report(10)
        return Path(shutil.copy(self.path(wheel), folder))

    def fetched(self):
        names = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [name.removeprefix("toy-") for name in names]


def no_hub(file, path, progress):
    raise ModelNotFoundError("the hub is closed")


def fetch_in_child(shop, cache, results):
    """Fetch the toy in a process of its own, in which nothing is patched yet."""
    os.environ["SPECGUARD_CACHE"] = str(cache)
    sources.download_wheel = shop.download
    sources.from_hub = no_hub
    results.put(str(models.fetch(TOY)))


def start_child(shop, cache):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=fetch_in_child, args=(shop, cache, results))
    child.start()
    return child, results


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shop(tmp_path, monkeypatch, cache):
    (tmp_path / "shop").mkdir()
    shop = Shop(tmp_path / "shop")
    monkeypatch.setattr(sources, "download_wheel", shop.download)
    monkeypatch.setattr(sources, "from_hub", no_hub)
    return shop


def names_in(folder):
    return {entry.name for entry in folder.iterdir()}


# Fetching


def test_pieces_are_joined_in_order_verified_and_nothing_else_stays(shop, cache):
    path = models.fetch(TOY)
    assert path == cache / "models" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert shop.fetched() == ["part1", "part2", "part3"]
    assert names_in(path.parent) == {"toy.gguf", "toy.gguf.verified", "toy.gguf.lock"}


def test_a_verified_file_is_neither_fetched_nor_hashed_again(shop, monkeypatch):
    path = models.fetch(TOY)
    shop.fetched()
    monkeypatch.setattr("specguard_chains.models.cache.verify", None)
    assert models.fetch(TOY) == path
    assert shop.fetched() == []


def test_progress_rises_to_the_total(shop):
    seen = []
    models.fetch(TOY, progress=lambda *report: seen.append(report))
    for label in ("fetching toy.gguf", "checking toy.gguf"):
        done = [report[0] for report in seen if report[2] == label]
        assert done == sorted(done)
        assert done[-1] == TOY.size
    assert {report[1] for report in seen} == {TOY.size}


def test_a_killed_fetch_goes_on_where_it_was(shop, cache):
    shop.trip_at = "toy-part3"
    child, _ = start_child(shop, cache)
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert shop.fetched() == ["part1", "part2", "part3"]
    assert not (cache / "models" / "toy.gguf").exists()

    shop.trip_at = None
    assert models.fetch(TOY).read_bytes() == CONTENT
    assert shop.fetched() == ["part3"]


@pytest.mark.parametrize(
    ("damage", "fetched"),
    [
        (lambda partial: partial.write_bytes(partial.read_bytes() + b"half a piece"), ["part3"]),
        (lambda partial: partial.write_bytes(partial.read_bytes()[:-1]), ["part2", "part3"]),
        (lambda partial: partial.write_bytes(b"x" * 6001), ["part1", "part2", "part3"]),
        (lambda partial: partial.unlink(), ["part1", "part2", "part3"]),
        (
            lambda partial: partial.with_name("toy.gguf.journal").write_text('[{"name": 1}'),
            ["part1", "part2", "part3"],
        ),
    ],
    ids=["bytes ahead", "bytes missing", "bytes changed", "no bytes", "no journal"],
)
def test_only_intact_pieces_are_kept(shop, cache, damage, fetched):
    shop.path(WHEELS[2]).rename(shop.folder / "away")
    with pytest.raises(ModelNotFoundError):
        models.fetch(TOY)
    shop.fetched()
    (shop.folder / "away").rename(shop.path(WHEELS[2]))
    damage(cache / "models" / "toy.gguf.partial")
    assert models.fetch(TOY).read_bytes() == CONTENT
    assert shop.fetched() == fetched


def test_two_processes_share_one_fetch(shop, cache, caplog):
    shop.pause_s = 0.5
    child, results = start_child(shop, cache)
    while not shop.log.exists():
        time.sleep(0.02)
    waited = []
    path = models.fetch(TOY, progress=lambda done, total, label: waited.append(label))
    child.join(30)
    assert results.get(timeout=5) == str(path)
    assert path.read_bytes() == CONTENT
    assert shop.fetched() == ["part1", "part2", "part3"]
    assert waited == ["waiting for another process to fetch toy.gguf"]
    assert "Another process is fetching toy.gguf" in caplog.text


def test_two_threads_share_one_fetch(shop):
    threads = [threading.Thread(target=models.fetch, args=(TOY,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shop.fetched() == ["part1", "part2", "part3"]


# What must be refused


def test_a_wrong_hash_leaves_nothing_and_says_so(shop, cache):
    shop.fill([PIECES[0], PIECES[1], b"?", PIECES[3]])
    with pytest.raises(ModelIntegrityError, match=TOY.sha256):
        models.fetch(TOY)
    assert not {"toy.gguf", "toy.gguf.partial"} & names_in(cache / "models")
    shop.fill(PIECES)
    assert models.fetch(TOY).read_bytes() == CONTENT


def test_a_short_file_is_refused(shop, cache):
    shop.fill([PIECES[0], PIECES[1], b"", PIECES[3]])
    with pytest.raises(ModelIntegrityError, match="10,243 bytes where toy has 10,244"):
        models.fetch(TOY)
    assert not (cache / "models" / "toy.gguf").exists()


def test_a_piece_that_is_too_long_is_refused(shop):
    shop.fill([PIECES[0], CONTENT * 2, b"", b""])
    with pytest.raises(ModelIntegrityError, match="longer than 10,244 bytes"):
        models.fetch(TOY)


@pytest.mark.parametrize("how", ["truncated", "bit", "member"])
def test_a_damaged_wheel_keeps_the_pieces_before_it(shop, how):
    wheel = shop.path(WHEELS[2])
    data = bytearray(wheel.read_bytes())
    if how == "truncated":
        wheel.write_bytes(data[: len(data) // 2])
    elif how == "bit":
        data[500] ^= 1
        wheel.write_bytes(data)
    else:
        zipfile.ZipFile(wheel, "w").close()
    with pytest.raises(ModelIntegrityError, match=r"toy-part3==1\.0 is damaged"):
        models.fetch(TOY)
    shop.fill(PIECES)
    shop.fetched()
    assert models.fetch(TOY).read_bytes() == CONTENT
    assert shop.fetched() == ["part3"]


@pytest.mark.parametrize("how", ["touched", "changed", "shortened", "no magic"])
def test_a_changed_cached_file_is_checked_and_fetched_again_if_damaged(shop, caplog, how):
    path = models.fetch(TOY)
    shop.fetched()
    if how == "touched":
        os.utime(path, ns=(1, 1))
    elif how == "changed":
        path.write_bytes(CONTENT[:-1] + b"?")
    elif how == "shortened":
        path.write_bytes(CONTENT[:100])
    else:
        status = path.stat()
        path.write_bytes(b"????" + CONTENT[4:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert models.fetch(TOY).read_bytes() == CONTENT
    assert shop.fetched() == ([] if how == "touched" else ["part1", "part2", "part3"])
    assert ("Fetching it again" in caplog.text) == (how != "touched")
    assert is_ready(path, TOY)


def test_a_full_disk_is_noticed_before_the_download(shop, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(9, 9, 0))
    with pytest.raises(ModelNotFoundError, match=r"0\.00 GB free where .*SPECGUARD_CACHE"):
        models.fetch(TOY)
    assert shop.fetched() == []


def test_a_cache_folder_that_cannot_be_made_is_named(shop, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigurationError, match=r"cache.models cannot be used .*SPECGUARD_CACHE"):
        models.fetch(TOY)


def test_when_no_source_delivers_every_reason_is_told(shop):
    shop.path(WHEELS[0]).unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        models.fetch(TOY)
    for words in ("the hub is closed", "toy_part1", "Check the network", "give its path"):
        assert words in str(caught.value)


# Sources


def test_the_hub_comes_first(shop, monkeypatch):
    def hub(file, path, progress):
        found = path.with_name("from-hub")
        found.write_bytes(CONTENT)
        return found

    monkeypatch.setattr(sources, "from_hub", hub)
    assert models.fetch(TOY).read_bytes() == CONTENT
    assert shop.fetched() == []


def test_a_wrong_file_from_the_hub_gives_way_to_the_wheels(shop, monkeypatch, caplog, cache):
    def hub(file, path, progress):
        found = path.with_name("from-hub")
        found.write_bytes(CONTENT[::-1])
        return found

    monkeypatch.setattr(sources, "from_hub", hub)
    assert models.fetch(TOY).read_bytes() == CONTENT
    assert shop.fetched() == ["part1", "part2", "part3"]
    assert "trying the next source" in caplog.text
    assert "from-hub" not in names_in(cache / "models")


@pytest.mark.parametrize("installed", [True, False])
def test_a_hub_that_cannot_be_had_is_given_up_at_once(monkeypatch, tmp_path, installed):
    def head(url, timeout):
        raise OSError("no route")

    client = types.ModuleType("huggingface_hub")
    client.hf_hub_url = lambda repo, file: f"{repo}/{file}"
    client.utils = types.SimpleNamespace(get_session=lambda: types.SimpleNamespace(head=head))
    monkeypatch.setitem(sys.modules, "huggingface_hub", client if installed else None)
    reason = r"toys/toy \(OSError: no route\)" if installed else r"pip install '.*\[hub\]'"
    with pytest.raises(ModelNotFoundError, match=reason):
        sources.from_hub(TOY, tmp_path / "toy.gguf", lambda *report: None)


class HubHandler(http.server.BaseHTTPRequestHandler):
    """As much of a hub as the client needs for one file."""

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.send_header("ETag", f'"{TOY.sha256}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


def test_the_real_client_fetches_and_reports(shop, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.undo()
    monkeypatch.setenv("SPECGUARD_CACHE", str(shop.folder / "cache"))
    monkeypatch.setattr(hub, "hf_hub_url", partial(hub.hf_hub_url, endpoint=endpoint))
    monkeypatch.setattr(hub, "hf_hub_download", partial(hub.hf_hub_download, endpoint=endpoint))
    seen = []
    try:
        path = models.fetch(TOY, progress=lambda *report: seen.append(report))
    finally:
        server.shutdown()
        server.server_close()
    assert path.read_bytes() == CONTENT
    assert (TOY.size, TOY.size, "fetching toy.gguf") in seen
    assert names_in(path.parent) == {"toy.gguf", "toy.gguf.verified", "toy.gguf.lock"}


def test_pip_downloads_a_wheel_and_says_why_it_cannot(tmp_path, monkeypatch):
    wheel = Wheel("toy-wheel", "1.0", ("toy_wheel/a.bin",))
    metadata = {
        "METADATA": "Metadata-Version: 2.1\nName: toy-wheel\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "toy_wheel-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy_wheel/a.bin", CONTENT)
        for name, text in metadata.items():
            archive.writestr(f"toy_wheel-1.0.dist-info/{name}", text)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "here").mkdir()
    found = sources.download_wheel(wheel, tmp_path / "here", lambda done: None)
    assert zipfile.ZipFile(found).read("toy_wheel/a.bin") == CONTENT

    other = Wheel("toy-wheel", "2.0", ())
    (tmp_path / "there").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"toy-wheel==2\.0 .*No matching distribution"):
        sources.download_wheel(other, tmp_path / "there", lambda done: None)


# Names and paths


def test_names_lead_to_files_and_pairs(shop, monkeypatch):
    monkeypatch.setitem(models.FILES, "toy", TOY)
    monkeypatch.setitem(models.PAIRS, "toys", ModelPair("toys", TOY, TOY, "a toy for itself"))
    assert models.resolve("toy").read_bytes() == CONTENT
    assert models.resolve(TOY) == models.resolve("toy")
    pair = models.resolve_pair("toys")
    assert pair.draft == pair.target == models.resolve("toy")
    assert shop.fetched() == ["part1", "part2", "part3"]


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        models.resolve_pair("qwen2.5-coder-0.5b")
    assert "Did you mean 'qwen2.5-coder-0.5b-1.5b'?" in str(caught.value)
    assert "smollm2-135m" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"Did you mean 'gemma-3-270m'.*path of a GGUF"):
        models.resolve("Gemma-270m")
    with pytest.raises(ConfigurationError, match=r"is a pair of models.*'smollm2-135m-instruct'"):
        models.resolve("smollm2-135m")


def test_a_path_of_ones_own_is_looked_at_and_returned(tmp_path, monkeypatch):
    own = tmp_path / "own.gguf"
    own.write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    assert models.resolve(own) == models.resolve(str(own)) == models.resolve("own.gguf") == own
    with pytest.raises(ModelNotFoundError, match=r"missing\.gguf does not exist: .*gemma-3-270m"):
        models.resolve("missing.gguf")
    with pytest.raises(ModelNotFoundError, match="is a folder"):
        models.resolve(tmp_path)
    own.write_bytes(b"<html>")
    with pytest.raises(ModelIntegrityError, match="is not a GGUF file"):
        models.resolve(own)


def test_the_listing_tells_what_the_cache_holds(shop, cache, monkeypatch):
    monkeypatch.setitem(models.FILES, "toy", TOY)
    monkeypatch.setitem(models.PAIRS, "toys", ModelPair("toys", TOY, TOY, "a toy for itself"))

    def toy():
        (entry,) = [entry for entry in models.cached_models() if entry.name == "toy"]
        return entry.state, entry.size

    assert toy() == (FileState.ABSENT, 0)
    shop.path(WHEELS[1]).rename(shop.folder / "away")
    with pytest.raises(ModelNotFoundError):
        models.fetch(TOY)
    assert toy() == (FileState.PARTIAL, 3000)
    (shop.folder / "away").rename(shop.path(WHEELS[1]))
    path = models.fetch(TOY)
    assert toy() == (FileState.READY, TOY.size)
    os.utime(path, ns=(1, 1))
    assert toy() == (FileState.UNVERIFIED, TOY.size)
    assert models.cached_models()[-1].role == "draft of toys, target of toys"


def test_the_catalogue_is_sound():
    assert models.DEFAULT_PAIR in models.PAIRS
    for file in models.FILES.values():
        assert len(file.sha256) == 64
        assert file.file.endswith(".gguf")
        assert file.wheels
        assert models.find_file(file.name) is file
    for pair in models.PAIRS.values():
        assert {pair.draft.name, pair.target.name} <= set(models.FILES)
    assert len(models.find_file("qwen2.5-coder-1.5b-instruct").wheels) == 22


def test_the_default_cache_folder_is_the_platforms(monkeypatch):
    monkeypatch.delenv("SPECGUARD_CACHE", raising=False)
    folder = models.cache_folder()
    assert folder.name == "models"
    assert "specguard_chains" in folder.parts


@pytest.fixture(autouse=True)
def hear_the_log(caplog):
    caplog.set_level(logging.INFO, logger="specguard_chains")
