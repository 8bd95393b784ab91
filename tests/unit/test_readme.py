from __future__ import annotations

import doctest

from hetero import paths


def test_every_example_of_the_readme_gives_what_it_says():
    found = doctest.testfile(str(paths.root() / "README.md"), module_relative=False)
    assert found.attempted > 5
    assert found.failed == 0
