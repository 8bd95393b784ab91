from __future__ import annotations

import pytest

import hetero


def test_public_names_are_completed_and_magics_plan_in_a_cell(capsys) -> None:  # type: ignore[no-untyped-def]
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell.instance()
    modules = {"__version__", "catalog", "cluster", "comparison", "routers", "sweeps", "workload"}
    assert set(dir(hetero)) == {*hetero.LAZY} - {"load_ipython_extension"} | modules
    shell.run_cell("%load_ext hetero")
    machine = "name: mine\nmachines:\n  - {name: a, gpu: L40S, usd_per_h: %s}\n"
    shell.run_cell("%%fleet mine\n" + machine % 2)
    assert shell.user_ns["mine"].usd_per_h == 2
    targets = "--model Llama-3-8B --slo ttft=2s,tpot=100ms --rate 1 --effort quick"
    shell.run_cell(f"card = %plan mine {targets}")
    assert shell.user_ns["card"].plan.gpus == {"L40S": 1}
    capsys.readouterr()
    for cell, said in (
        ("%%fleet a/b\n" + machine % 2, "'a/b' is no name."),
        ("%%fleet mine\n" + machine % "dear", "UsageError: %%fleet"),
        ("%plan mine --rat 3", "No such option: --rat"),
        ("%plan 'mine", "No closing quotation"),
    ):
        shell.run_cell(cell)
        (told,) = "".join(capsys.readouterr()).strip().splitlines()
        assert said in told
