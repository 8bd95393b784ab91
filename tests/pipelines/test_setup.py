"""Set-up: what is pinned, what is said when something is wrong, and how it goes on."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hetero import paths
from pipelines import lock, setup

LISTS = ("constraints.txt", "tests/constraints.txt", "tests/tools.txt")
PROJECT = tomllib.loads((paths.root() / "pyproject.toml").read_text())["project"]


def listed(name: str) -> list[setup.Pin]:
    return setup.pins((paths.root() / name).read_text())


@pytest.mark.parametrize("name", LISTS)
def test_every_file_is_named_by_its_hash_and_no_index_by_its_address(name: str) -> None:
    text = (paths.root() / name).read_text()
    for pin in listed(name):
        requirement = Requirement(pin.text)
        assert [one.operator for one in requirement.specifier] == ["=="], pin.text
        assert pin.hashes, pin.text
        assert all(len(digest) == len("sha256:") + 64 for digest in pin.hashes)
    assert "://" not in text
    assert not [line for line in text.splitlines() if line.startswith("-")]


def test_the_lists_hold_what_pyproject_declares_at_versions_that_it_allows() -> None:
    pinned = {pin.name: Requirement(pin.text) for pin in listed("constraints.txt")}
    both = pinned | {pin.name: Requirement(pin.text) for pin in listed("tests/constraints.txt")}
    extras = PROJECT["optional-dependencies"]
    wanted = [(text, pinned) for text in PROJECT["dependencies"]]
    wanted += [(text, pinned) for name in setup.EXTRAS for text in extras[name]]
    wanted += [(text, both) for name in lock.TEST_EXTRAS for text in extras[name]]
    for text, here in wanted:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-").replace(".", "-")
        assert name in here, f"{text}: run make lock"
        (version,) = (one.version for one in here[name].specifier)
        assert requirement.specifier.contains(version), f"{text}: {version} is pinned"
    assert set(extras) == {*setup.EXTRAS, *lock.TEST_EXTRAS, "silicon"}
    assert set(lock.BUILD) <= {*setup.BUILD, "uv"} <= set(pinned)


def test_the_lists_share_no_package_and_cuda_comes_only_with_torch() -> None:
    first, second = ({pin.name for pin in listed(name)} for name in LISTS[:2])
    assert not first & second
    assert {name for name in first if name.startswith(setup.CUDA)} > {"triton", "nvidia-cublas"}
    assert not {name for name in second if name.startswith(setup.CUDA)}


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If\n"
            "    six==1.17.0 from https://host/six.whl (from -r /tmp/a.txt (line 1)):\n"
            "        Expected sha256 aa\n             Got        bb\n",
            "six==1.17.0 is not one that was pinned",
        ),
        (
            "error: Failed to download `six==1.17.0`\n  cause: Hash mismatch for `six==1.17.0`\n",
            "six==1.17.0 is not one that was pinned",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "disk is full"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for six==1.17.0\n",
            "No package index answers",
        ),
        (
            "error: Failed to fetch: `https://host/six/`\n  cause: error sending request for url\n",
            "No package index answers",
        ),
        ("ERROR: No matching distribution found for six==9\n", "has no file of six==9"),
        (
            "error: No solution found when resolving dependencies\n  cause: Because there is no "
            "version of six==9 and you require six==9, we can conclude that your requirements\n",
            "has no file of six==9",
        ),
        ("Error: ensurepip is not\navailable. python3-venv", "has no venv"),
        ("error: subprocess-exited-with-error\n", "subprocess-exited-with-error"),
    ],
)
def test_a_failure_is_one_sentence_and_what_to_do(log: str, said: str) -> None:
    text = str(setup.cause(log, room=2**40))
    assert said in text
    assert "\n" not in text
    assert text.count("Resolve: ") == 1


def test_a_disk_without_room_is_named_even_where_the_tool_does_not() -> None:
    assert "disk is full" in str(setup.cause("Error: returned non-zero exit status 1.", room=0))


def test_a_tool_that_says_nothing_is_heard_of_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "BEAT_S", 0.2)
    code = "import time; print('so far', flush=True); time.sleep(1)"
    assert setup.Environment(tmp_path).run(sys.executable, "-c", code) == "so far\n"
    assert "  ... 1 s  so far\n" in capsys.readouterr().out


def test_uv_looks_where_pip_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://a/simple\nfind-links = /one /two\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "https://b/simple")
    monkeypatch.setenv("UV_INDEX", "https://c/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://d/simple")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    own = setup.Environment(tmp_path)
    own.python = Path(sys.executable)
    settings = own.uv_settings()
    assert settings["UV_DEFAULT_INDEX"] == "https://b/simple"
    assert settings["UV_FIND_LINKS"] == "/one,/two"
    assert "UV_INDEX" not in settings  # what uv is told itself stays


@pytest.mark.parametrize("command", ["setup", "setup-tests"])
def test_make_names_the_pythons_that_it_can_use(command: str, tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "--silent", command, f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=paths.root(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 2
    assert made.stderr.startswith("Error: hetero needs Python 3.11, 3.12 or 3.13, and ")
    assert not (tmp_path / "venv").exists()


def wheel(folder: Path) -> setup.Pin:
    """A small package, as an index would have it."""
    file = folder / "small-1.0-py3-none-any.whl"
    info = "small-1.0.dist-info"
    texts = {
        "small.py": "VALUE = 1\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"small.py,,10\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return setup.Pin("small==1.0", ("sha256:" + hashlib.sha256(file.read_bytes()).hexdigest(),))


def test_an_altered_file_is_refused_and_a_cut_installation_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    pin = wheel(files)
    for name, _ in setup.UV_NAMES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(files))
    own = setup.Environment(tmp_path / "venv")
    own.make()
    site = own.site()
    assert not own.bring_uv(setup.Pin("uv==0", pin.hashes))  # none for this machine: pip fills
    fillers = [(own.filler, own.settings)]
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():
        fillers.append(((uv, "pip", "install", "--python", own.python), own.uv_settings()))
    for own.filler, own.settings in fillers:
        with pytest.raises(setup.AlteredError, match=r"small==1\.0 is not one that was pinned"):
            own.install([setup.Pin(pin.text, ("sha256:" + "0" * 64,))])
        with pytest.raises(setup.MissingError, match=r"no file of small==2\.0 for this Python"):
            own.install([setup.Pin("small==2.0", pin.hashes)])
        assert not (site / "small.py").exists()

    own.install([pin])
    assert (site / "small.py").read_text() == "VALUE = 1\n"
    assert setup.broken(site) == []
    own.make()  # leaves an environment that works as it is
    assert (site / "small.py").exists()

    (site / "small.py").unlink()  # not the file that it shares with uv's cache
    (site / "small.py").write_text("")
    assert [info.name for info in setup.broken(site)] == ["small-1.0.dist-info"]
    (own.folder / ".unfinished").touch()
    own.mend()
    own.install([pin])
    assert (site / "small.py").read_text() == "VALUE = 1\n"

    own.python.unlink()
    own.python.symlink_to("/nonexistent/python")  # its Python is gone
    own.make()
    assert own.run(own.python, "-c", "print(1)") == "1\n"
    assert (
        own.run(own.python, "-c", "import sys; print(sys.base_prefix)").strip() == sys.base_prefix
    )
