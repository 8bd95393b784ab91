from __future__ import annotations

import hashlib
import http.server
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero import paths
from hetero.errors import DownloadError
from hetero.workload import datasets
from hetero.workload.datasets import Dataset, RawFile

GOOD = b"arrival_s,input_tokens,output_tokens\n0,1,1\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A file server on loopback; its folder is tmp_path/public."""
    folder = tmp_path / "public"
    folder.mkdir()
    (folder / "good.csv").write_bytes(GOOD)
    (folder / "wrong.csv").write_bytes(GOOD + b"tampered")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}"
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Replace the registry by one dataset "toy" of one file; returns where it is fetched to."""
    raw = tmp_path / "raw"
    monkeypatch.setattr(paths, "raw", lambda: raw)
    monkeypatch.delenv(datasets.MIRROR, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def put(address: str | None, made_from: str = "") -> Path:
        file = RawFile("toy/toy.csv", len(GOOD), hashlib.sha256(GOOD).hexdigest(), address)
        toy = Dataset("toy", "a toy", "MIT", "nobody", "example.org", made_from, (file,))
        monkeypatch.setattr(datasets, "registry", lambda: {"toy": toy})
        return raw / "toy" / "toy.csv"

    return put


def unreachable() -> str:
    with socket.socket() as unused:  # a port that was free a moment ago, and nobody listens on
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/toy.csv"


# The registry ----------------------------------------------------------------------------------


def test_every_file_has_a_checksum_and_a_pinned_address_or_an_origin() -> None:
    for dataset in datasets.registry().values():
        assert dataset.files
        assert all((dataset.what, dataset.licence, dataset.citation, dataset.home))
        assert dataset.public != bool(dataset.made_from), dataset.name
        for file in dataset.files:
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            assert file.size_bytes > 0
            if file.address is not None:
                pinned = r"https://raw\.githubusercontent\.com/[\w.-]+/[\w.-]+/[0-9a-f]{7,40}/.+"
                assert re.fullmatch(pinned, file.address)
    places = [file.path for each in datasets.registry().values() for file in each.files]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("name", list(datasets.registry()))
def test_the_registry_describes_the_files_that_are_here(
    name: str, need: Callable[[str], None]
) -> None:
    need(name)
    for file in datasets.dataset(name).files:
        found = datasets.path(name, file.path)
        assert found.stat().st_size == file.size_bytes
        assert hashlib.sha256(found.read_bytes()).hexdigest() == file.sha256


def test_a_set_of_files_has_a_folder(need: Callable[[str], None]) -> None:
    need("helix_lengths")
    assert (datasets.path("helix_lengths") / "alpaca.csv.gz").is_file()
    assert datasets.path("helix_lengths", "alpaca.csv.gz").is_file()
    with pytest.raises(DownloadError, match="0 files of the dataset helix_lengths"):
        datasets.path("helix_lengths", "paca.csv.gz")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DownloadError, match="azure2023_conv, azure2023_code"):
        datasets.path("azure")


# Fetching --------------------------------------------------------------------------------------


def test_a_good_download_arrives_and_stays(server: str, register: Callable[..., Path]) -> None:
    target = register(f"{server}/good.csv")
    assert not datasets.available("toy")
    with pytest.raises(DownloadError, match="run `hetero data fetch toy`"):
        datasets.path("toy")
    assert datasets.fetch(["toy"]).rows[0][-1] == "fetched"
    assert target.read_bytes() == GOOD
    assert datasets.path("toy") == target
    assert datasets.available("toy")
    written = target.stat().st_mtime_ns
    assert datasets.fetch(["toy"]).rows[0][-1] == "was here"
    assert target.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("{server}/wrong.csv", "another sha256"),
        ("{server}/none.csv", r"does not have the file \(404\)"),
        ("unreachable", "cannot be reached"),
    ],
)
def test_a_failed_download_leaves_nothing_and_touches_nothing(
    server: str, register: Callable[..., Path], address: str, says: str
) -> None:
    target = register(unreachable() if address == "unreachable" else address.format(server=server))
    with pytest.raises(DownloadError, match=says) as caught:
        datasets.fetch(["toy"])
    assert "\n" not in str(caught.value)
    assert not target.exists()
    # What was there before stays, even if it is not what was published.
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"earlier")
    with pytest.raises(DownloadError, match=says):
        datasets.fetch(["toy"])
    assert target.read_bytes() == b"earlier"
    assert [entry.name for entry in target.parent.iterdir()] == [target.name]


def test_a_damaged_file_is_noticed_and_replaced(server: str, register: Callable[..., Path]) -> None:
    target = register(f"{server}/good.csv")
    datasets.fetch(["toy"])
    target.write_bytes(GOOD.replace(b"0,1,1", b"0,1,2"))
    with pytest.raises(DownloadError, match="another sha256"):
        datasets.path("toy")
    assert datasets.check().damaged == (target,)
    datasets.fetch(["toy"])
    assert datasets.path("toy").read_bytes() == GOOD
    assert datasets.check().damaged == ()


def test_data_without_a_public_address_say_what_they_were_made_from(
    register: Callable[..., Path],
) -> None:
    register(None, made_from="a table, by hand")
    for get in (lambda: datasets.fetch(["toy"]), lambda: datasets.path("toy")):
        with pytest.raises(DownloadError, match="made from a table, by hand"):
            get()
    assert datasets.listing().rows[0][1] == "missing (mirror only)"


# The mirror ------------------------------------------------------------------------------------


def test_the_mirror_is_used_in_place(
    tmp_path: Path, register: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = register(unreachable())
    mirror = tmp_path / "mirror"
    (mirror / "toy").mkdir(parents=True)
    (mirror / "toy" / "toy.csv").write_bytes(GOOD)
    monkeypatch.setenv(datasets.MIRROR, str(mirror))
    assert datasets.path("toy") == mirror / "toy" / "toy.csv"
    assert datasets.fetch(["toy"]).rows[0][-1] == "in the mirror"
    assert not target.exists()
    assert datasets.listing().rows[0][1] == "mirror"
    (mirror / "toy" / "toy.csv").write_bytes(b"damaged")
    for use in (lambda: datasets.path("toy"), lambda: datasets.fetch(["toy"])):
        with pytest.raises(DownloadError, match=datasets.MIRROR):
            use()
    assert datasets.check().damaged == (mirror / "toy" / "toy.csv",)


def test_a_mirror_that_lacks_a_file_leaves_fetching(
    tmp_path: Path,
    server: str,
    register: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = register(f"{server}/good.csv")
    monkeypatch.setenv(datasets.MIRROR, str(tmp_path))
    datasets.fetch(["toy"])
    assert datasets.path("toy") == target


def test_a_relative_mirror_counts_from_the_checkout_too(
    tmp_path: Path, register: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(None, made_from="nothing")
    checkout = tmp_path / "checkout"
    (checkout / "notebooks").mkdir(parents=True)
    (tmp_path / "shared" / "toy").mkdir(parents=True)
    (tmp_path / "shared" / "toy" / "toy.csv").write_bytes(GOOD)
    monkeypatch.setattr(paths, "raw", lambda: checkout / "data" / "raw")
    monkeypatch.setenv(datasets.MIRROR, "../shared")
    for folder in (checkout, checkout / "notebooks", tmp_path):
        monkeypatch.chdir(folder)
        assert datasets.path("toy").read_bytes() == GOOD


def test_a_mirror_that_is_no_folder_is_an_error(
    register: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    register("http://127.0.0.1/none")
    monkeypatch.setenv(datasets.MIRROR, "/no/such/folder")
    with pytest.raises(DownloadError, match="which is no folder"):
        datasets.available("toy")
