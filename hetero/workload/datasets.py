"""Public raw data: what there is, where it comes from, and how it gets here unharmed.

Files are fetched from their public homes into ``data/raw``, or used in place from a folder of
the same layout that ``HETERO_DATA_MIRROR`` names. Either way their sha256 is checked before use.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from hetero import paths
from hetero.display import Column, Shown, Table
from hetero.errors import DownloadError
from hetero.grouping import grouped
from hetero.rows import read_rows

MIRROR = "HETERO_DATA_MIRROR"
TIMEOUT_S = 30

Place: TypeAlias = Literal["fetched", "mirror", "missing"]
"""Where a file is: in ``data/raw``, in the mirror, or nowhere."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """One file: its place below ``data/raw`` or the mirror, and what makes it that file.

    Attributes
    ----------
    address
        Public address of these very bytes, or None if only a mirror has them.
    """

    path: str
    size_bytes: int
    sha256: str
    address: str | None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A set of files with one source.

    Attributes
    ----------
    made_from
        For data with no public file of the same bytes: what they were made from, and how.
    """

    name: str
    what: str
    licence: str
    citation: str
    home: str
    made_from: str
    files: tuple[RawFile, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def public(self) -> bool:
        """Whether all files have a public address."""
        return all(file.address for file in self.files)

    @property
    def place(self) -> Place:
        """Where the files are; ``missing`` as soon as one of them is."""
        places = {_find(file)[0] for file in self.files}
        return "missing" if "missing" in places else "mirror" if "mirror" in places else "fetched"

    @property
    def source(self) -> str:
        """One line of attribution: what it is, its licence and whom to cite."""
        return f"{self.what}; {self.licence}; {self.citation}"


@lru_cache(maxsize=1)
def registry() -> dict[str, Dataset]:
    """Every dataset by name, as data/specs/datasets.csv and dataset_files.csv list them."""
    sets, listed = (
        read_rows(paths.data("specs", f"{name}.csv")).frame
        for name in ("datasets", "dataset_files")
    )
    files = grouped(
        (name, RawFile(file, int(size_bytes), sha256, address or None))
        for name, file, size_bytes, sha256, address in listed.itertuples(index=False, name=None)
    )
    return {
        name: Dataset(name, what, licence, citation, home, made_from, tuple(files[name]))
        for name, what, licence, citation, home, made_from in sets.itertuples(
            index=False, name=None
        )
    }


def dataset(name: str) -> Dataset:
    """The dataset of that name.

    Raises
    ------
    DownloadError
        If there is none.

    Examples
    --------
    >>> dataset("azure2023_conv").licence
    'CC-BY-4.0'
    """
    found = registry().get(name)
    if found is None:
        raise DownloadError(
            f"No dataset is called '{name}'.", resolve=f"use one of {', '.join(registry())}."
        )
    return found


def available(name: str) -> bool:
    """Whether every file of a dataset is here, fetched or in the mirror (not yet checked)."""
    return dataset(name).place != "missing"


def path(name: str, file: str | None = None) -> Path:
    """Local path of a dataset, its checksums verified.

    Parameters
    ----------
    file
        Name of one of its files; without it the only file, or the folder that holds them all.

    Raises
    ------
    DownloadError
        If it is not here, or a checksum is wrong.
    """
    chosen = dataset(name)
    if file is None:
        found = [_verified(chosen, each) for each in chosen.files]
        return found[0] if len(found) == 1 else Path(os.path.commonpath(found))
    matches = [each for each in chosen.files if f"/{each.path}".endswith(f"/{file}")]
    if len(matches) != 1:
        raise DownloadError(
            f"{len(matches)} files of the dataset {name} are called '{file}'.",
            resolve=f"use one of {', '.join(each.path for each in chosen.files)}.",
        )
    return _verified(chosen, matches[0])


def mirror() -> Path | None:
    """Folder that ``HETERO_DATA_MIRROR`` names, or None.

    A relative path counts from the working directory, or else from the checkout.

    Raises
    ------
    DownloadError
        If it names a folder that does not exist.
    """
    named = os.environ.get(MIRROR)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir() and not folder.is_absolute():
        # Notebooks run in notebooks/, commands in the checkout: one setting has to serve both.
        folder = paths.raw().parents[1] / folder
    if not folder.is_dir():
        raise DownloadError(
            f"{MIRROR} names '{named}', which is no folder.",
            resolve=f"point {MIRROR} at a folder laid out like data/raw, or unset it.",
        )
    return folder


def _find(file: RawFile) -> tuple[Place, Path]:
    """Where a file is and its path; for a missing one the path it would be fetched to."""
    folder = mirror()
    if folder is not None and (folder / file.path).is_file():
        return "mirror", folder / file.path
    fetched = paths.raw() / file.path
    return ("fetched" if fetched.is_file() else "missing"), fetched


def _verified(chosen: Dataset, file: RawFile) -> Path:
    place, local = _find(file)
    if place == "missing":
        raise DownloadError(
            f"{file.path} of the dataset {chosen.name} is not here.", resolve=_how_to_get(chosen)
        )
    if not _matches(local, file):
        raise DownloadError(
            f"{local} has another sha256 than the published {file.sha256[:12]}....",
            resolve=f"run `hetero data fetch {chosen.name}` to replace it."
            if place == "fetched"
            else f"replace it, or unset {MIRROR} and run `hetero data fetch {chosen.name}`.",
        )
    return local


def _how_to_get(chosen: Dataset) -> str:
    if chosen.made_from:
        return (
            f"set {MIRROR} to a folder that has it; it has no public address, being made from "
            f"{chosen.made_from}."
        )
    command = f"hetero data fetch {chosen.name}"
    return f"run `{command}`, or set {MIRROR} to a folder laid out like data/raw."


def _matches(local: Path, file: RawFile) -> bool:
    state = local.stat()
    return state.st_size == file.size_bytes and (
        _sha256(str(local), state.st_mtime_ns, state.st_size) == file.sha256
    )


@lru_cache(maxsize=512)
def _sha256(local: str, changed_ns: int, size_bytes: int) -> str:
    # The time of change and size are arguments so that a changed file is read again.
    import pooch

    return str(pooch.file_hash(local, alg="sha256"))


def fetch(names: Iterable[str]) -> Table:
    """Bring datasets here; files that are here and whole stay as they are.

    A download goes to a temporary file and replaces the final one only after its checksum is
    found right, so a failure leaves earlier files untouched.

    Raises
    ------
    DownloadError
        If an address cannot be reached, a checksum is wrong, or a dataset has no public address.
    """
    chosen = [dataset(name) for name in names]
    rows: list[tuple[object, ...]] = []
    for each in chosen:
        outcome = "was here"
        for file in each.files:
            place, local = _find(file)
            if place == "mirror" or (place == "fetched" and _matches(local, file)):
                _verified(each, file)
                outcome = "in the mirror" if place == "mirror" else outcome
                continue
            _download(each, file)
            outcome = "fetched"
        rows.append((each.name, each.size_bytes, each.licence, each.citation, outcome))
    columns = ("dataset", "size", "licence", "please cite", "outcome")
    return Table("", tuple(Column(c, "bytes" if c == "size" else "") for c in columns), tuple(rows))


def _download(chosen: Dataset, file: RawFile) -> None:
    import pooch
    import requests

    if file.address is None:
        raise DownloadError(
            f"{file.path} of the dataset {chosen.name} is not here.", resolve=_how_to_get(chosen)
        )
    pooch.get_logger().setLevel(logging.WARNING)
    target = paths.raw() / file.path
    bar = sys.stderr.isatty() and file.size_bytes > 1_000_000
    try:
        pooch.retrieve(
            file.address,
            known_hash=f"sha256:{file.sha256}",
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT_S),
        )
    except requests.exceptions.HTTPError as error:
        status = "" if error.response is None else f" ({error.response.status_code})"
        raise DownloadError(
            f"{file.address} does not have the file{status}.",
            resolve=f"look at {chosen.home} for its new address, or set {MIRROR}.",
        ) from None
    except requests.exceptions.RequestException as error:
        raise DownloadError(
            f"{file.address} cannot be reached ({type(error).__name__}).",
            resolve=f"check the network and try again, or set {MIRROR} to a folder that has it.",
        ) from None
    except ValueError:  # pooch found another checksum and threw the file away
        raise DownloadError(
            f"What {file.address} sent has another sha256 than the published "
            f"{file.sha256[:12]}....",
            resolve="try again; if it stays so, the file at that address was changed.",
        ) from None
    except OSError as error:
        raise DownloadError(
            f"{target} cannot be written ({error.strerror or error}).",
            resolve="free some space or mend the rights of the folder, and try again.",
        ) from None


@dataclass(frozen=True, slots=True)
class Listing(Shown):
    """Every dataset, where it is, and (after :func:`check`) whether its files are whole."""

    rows: tuple[tuple[Dataset, str], ...]
    damaged: tuple[Path, ...] = ()

    def table(self) -> Table:
        """One row per dataset."""
        columns = (
            Column("dataset", of=lambda row: row[0].name),
            Column("what", of=lambda row: row[0].what),
            Column("files", of=lambda row: len(row[0].files)),
            Column("size", "kB", 3, of=lambda row: max(1, round(row[0].size_bytes / 1000))),
            Column("licence", of=lambda row: row[0].licence),
            Column("where", of=lambda row: row[1]),
        )
        note = (
            "mirror only: no public file has these bytes; data/specs/datasets.csv says what "
            "they were made from."
        )
        return Table.of("Public raw data", columns, self.rows, note)


def listing() -> Listing:
    """Every dataset and where it is: fetched, mirror, missing, or mirror only (and missing)."""
    return Listing(tuple((each, _where(each)) for each in registry().values()))


def _where(each: Dataset) -> str:
    if each.place == "missing" and each.made_from:
        return "missing (mirror only)"
    return "mirror only, here" if each.made_from and each.place == "mirror" else each.place


def check() -> Listing:
    """Verify the checksum of every file that is here."""
    rows: list[tuple[Dataset, str]] = []
    damaged: list[Path] = []
    for each in registry().values():
        found = [(file, *_find(file)) for file in each.files]
        here = [(file, local) for file, place, local in found if place != "missing"]
        bad = [local for file, local in here if not _matches(local, file)]
        damaged += bad
        if not here:
            rows.append((each, "missing"))
        elif bad:
            rows.append((each, f"{len(bad)} of {len(here)} damaged"))
        elif len(here) < len(found):
            rows.append((each, f"{len(here)} of {len(found)} whole, the rest missing"))
        else:
            rows.append((each, "whole"))
    return Listing(tuple(rows), tuple(damaged))
