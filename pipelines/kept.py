"""Cases of long runs, a file each: a run that was cut off goes on, and ends with the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed

from hetero import paths
from hetero.files import writing


def folder(
    state: str, code: Mapping[str, str], deciding: Sequence[str], releases: Sequence[str]
) -> Path | None:
    """Folder of the cases of this code and these releases; none where ``state`` is empty.

    Parameters
    ----------
    code
        Hashes of files by name.
    deciding
        Beginnings of the names of those that decide a case.
    """
    own = sorted(item for item in code.items() if item[0].startswith(tuple(deciding)))
    on = repr((own, [version(name) for name in releases])).encode()
    found = paths.root() / state / hashlib.sha256(on).hexdigest()[:12]
    if state:
        found.mkdir(parents=True, exist_ok=True)
    return found if state else None


def file(within: Path | None, name: str, *settings: object) -> Path | None:
    """File of a case that these settings, by what they print, decide; none without a folder."""
    plain, digest = re.sub(r"[^\w.]+", "-", name), hashlib.sha256(repr(settings).encode())
    return within and within / f"{plain}-{digest.hexdigest()[:8]}.json"


def case(path: Path | None, make: Callable[[], Any]) -> Any:
    """What the file of a case holds or, where there is none, what is made now and written whole."""
    if path is not None and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    made = make()
    if path is not None:
        with writing(path, force=True) as part:
            part.write_text(json.dumps(made) + "\n", encoding="utf-8")
    return made


def each(
    cases: Iterable[tuple[Path | None, Callable[[], Any]]],
    jobs: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Any]:
    """Every :func:`case` in its turn, made in so many processes; ``progress`` gets 1 after each."""
    for made in Parallel(n_jobs=jobs, return_as="generator")(delayed(case)(*one) for one in cases):
        progress(1)
        yield made
