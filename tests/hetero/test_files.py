"""Files that appear whole: order of what reaches the disk, rights, links, leftovers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hetero import files


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is asked of the system, in order: inodes that reach the disk, and renames."""
    found: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(file: int) -> None:
        found.append(("sync", os.fstat(file).st_ino))
        fsync(file)

    def moved(self: Path, target: Path) -> Path:
        found.append(("move", self.stat().st_ino))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", moved)
    return found


def test_bytes_are_on_the_disk_before_the_rename_and_the_rename_after(tmp_path, steps):
    with files.writing(tmp_path / "a.txt") as part:
        part.write_text("whole")
    inode = (tmp_path / "a.txt").stat().st_ino
    assert steps == [("sync", inode), ("move", inode), ("sync", tmp_path.stat().st_ino)]


def test_a_folder_is_on_the_disk_with_all_its_files_before_it_is_moved(tmp_path, steps):
    source = tmp_path / "new"
    (source / "below").mkdir(parents=True)
    (source / "below" / "a").write_text("a")
    (source / "b").write_text("b")
    inodes = {path.stat().st_ino for path in (source, *source.rglob("*"))}
    files.move(source, tmp_path / "results")
    assert {inode for step, inode in steps[:4] if step == "sync"} == inodes
    assert steps[4][0] == "move"
    assert steps[5] == ("sync", tmp_path.stat().st_ino)
    assert (tmp_path / "results" / "below" / "a").read_text() == "a"


def test_a_disk_that_is_full_only_when_it_is_asked_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), files.writing(target, force=True) as part:
        part.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert target.read_text() == "old"


def test_rights_and_links_of_an_existing_file_stay(tmp_path):
    target, link = tmp_path / "a.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o660)
    link.symlink_to(target)
    with files.writing(link, force=True) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o660


def test_what_a_killed_process_left_is_removed_once_nobody_can_be_writing_it(tmp_path):
    left, busy, other = (tmp_path / f".{name}" for name in ("00000001.a", "00000002.a", "keep.a"))
    for path in (left, busy, other):
        path.touch()
    day = time.time() - 2 * 86_400
    os.utime(left, (day, day))
    os.utime(other, (day, day))
    with files.writing(tmp_path / "a") as part:
        part.write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".00000002.a", ".keep.a", "a"]
