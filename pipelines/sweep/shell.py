"""Papermill engine that runs a notebook in the process it is called in, for warm workers.

Starting a kernel takes seconds and importing the library once more in it as long; a worker that
runs one point after the other pays for both once. Every notebook starts with an empty namespace.
"""

from __future__ import annotations

import gc
import re
import traceback
from typing import Any

import nbformat
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines

from hetero.notebook_engine import strip

NAME = "hetero in process"

_new_output: Any = nbformat.v4.new_output


class InProcessEngine(Engine):  # type: ignore[misc]
    """Engine ``hetero in process``: cells run in an IPython shell of this process."""

    @classmethod
    def execute_notebook(
        cls, nb: nbformat.NotebookNode, kernel_name: str, **options: Any
    ) -> nbformat.NotebookNode:
        """Run ``nb`` and return it without anything that differs between two runs."""
        executed: nbformat.NotebookNode = super().execute_notebook(nb, kernel_name, **options)
        strip(executed)
        return executed

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, **options: Any
    ) -> None:
        """Run every code cell up to the first that fails."""
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output

        shell: Any = InteractiveShell.instance()
        shell.user_ns["__name__"] = "__main__"
        try:
            for index, cell in enumerate(nb_man.nb.cells):
                nb_man.cell_start(cell, index)
                if cell.cell_type == "code" and cell.source.strip():
                    with capture_output() as captured:
                        result = shell.run_cell(cell.source)
                    cell["execution_count"] = result.execution_count
                    cell["outputs"] = _outputs(captured)
                    error = result.error_before_exec or result.error_in_exec
                    if error is not None:
                        cell["outputs"].append(_error(error))
                        nb_man.cell_exception(cell, index, exception=error)
                        return
                nb_man.cell_complete(cell, index)
        finally:
            _tidy(shell)


def _tidy(shell: Any) -> None:
    """Let go of what a notebook made, so that a worker does not grow from point to point."""
    import matplotlib.pyplot as plt

    plt.close("all")
    shell.reset(new_session=True)
    if not gc.get_freeze_count():
        # What is left are libraries; a reset collects garbage, and need not look through them.
        gc.freeze()


def _outputs(captured: Any) -> list[nbformat.NotebookNode]:
    found = [
        _new_output("stream", name=name, text=text)
        for name, text in (("stdout", captured.stdout), ("stderr", captured.stderr))
        if text
    ]
    found += [
        _new_output("display_data", data=rich.data, metadata=rich.metadata or {})
        for rich in captured.outputs
        if rich.data
    ]
    return found


def _error(error: BaseException) -> nbformat.NotebookNode:
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in traceback.format_exception(error)]
    found: nbformat.NotebookNode = _new_output(
        "error", ename=type(error).__name__, evalue=str(error), traceback=plain
    )
    return found


if NAME not in papermill_engines._engines:
    papermill_engines.register(NAME, InProcessEngine)
