from __future__ import annotations

import importlib

from pipelines import walk

PACKAGE = {  # door -> bed -> hall -> sheet (back in up) -> late; what importing runs is not walked
    "walked/door.py": "from walked.up import bed\nclass Key:\n    size = 1\n"
    "def come():\n    from walked import late\n    return bed.lie() + late.go()\n",
    "walked/up/bed.py": "from walked.down import hall\ndef lie(): return hall.hang()\n",
    "walked/up/sheet.py": "def wash(): return (lambda: 1)()\n",
    "walked/down/hall.py": "from walked.up import sheet\ndef hang(): return sheet.wash()\n",
    "walked/late.py": "def early(): return 2\nTWO = early()\ndef go(): return TWO\n",
}


def test_files_folders_functions_and_returns_are_those_that_are_called(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    steps = walk.follow(lambda *_: importlib.import_module("walked.door").come(), tmp_path)
    assert [function for _, function in steps.entered][:4] == ["come", "lie", "hang", "wash"]
    assert steps.counts() == (5, 4, 6, 1)
