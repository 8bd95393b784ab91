"""Plans whose names were made to run a command, leave the folder or add a document."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace

import pytest
from ruamel.yaml import YAML

from hetero.apps.cards.card import PlanCard
from hetero.apps.export import (
    Part,
    ServedEngine,
    Service,
    files,
    kubernetes,
    read_back,
    vllm,
    write,
)
from hetero.apps.export.service import placed
from hetero.errors import DataError, ExportError
from tests.hetero.apps.export.export_plans import SMALL, pipeline, whole
from tests.hetero.apps.export.test_cards import card

COMMAND = "b\ntouch PWNED_BY_NAME\n#"
DOCUMENT = "x\n---\napiVersion: v1\nkind: Pwned\nmetadata: {name: p}\n---\n#"
TARGETS = ("vllm", "kubernetes", "skypilot", "routing")


def named(machine="m", engine="e", cluster="c", model=None) -> Service:
    servings = [ServedEngine(engine, "both", (Part(machine, "L4", 2, SMALL.layers),))]
    llm = SMALL if model is None else replace(SMALL, name=model)
    return Service(cluster, llm, placed(servings), routing=engine, weights="org/m")


@pytest.mark.parametrize("where", ["machine", "engine", "cluster"])
@pytest.mark.parametrize(
    "name", [COMMAND, DOCUMENT, "$(touch PWNED_BY_NAME)", "`touch P`", "'; id"]
)
def test_no_name_runs_a_command_or_adds_a_document(where, name, tmp_path, monkeypatch):
    service = named(**{where: name})
    for target in TARGETS:
        found = write(service, target, tmp_path / target)
        assert all(path.parent == tmp_path / target for path in found)
    monkeypatch.chdir(tmp_path)
    [script] = (tmp_path / "vllm").iterdir()
    # What it would start is a function here; nothing else may run.
    around = "vllm() { :; }\n" + script.read_text()
    done = subprocess.run(["sh"], input=around, capture_output=True, text=True, check=True)
    assert "listening on this machine only" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TARGETS)
    [manifest] = (tmp_path / "kubernetes").iterdir()
    kinds = [one["kind"] for one in YAML(typ="safe", pure=True).load_all(manifest.read_text())]
    assert kinds == ["Service", "StatefulSet"]


@pytest.mark.parametrize("name", ["../../trav", "/etc/profile.d/hetero-x", "m" * 300, "a/b"])
def test_no_name_writes_outside_the_folder(name, tmp_path):
    folder = tmp_path / "deep" / "out"
    folder.parent.mkdir()
    [path] = write(named(machine=name), "vllm", folder)
    assert path.parent == folder
    assert [one.name for one in tmp_path.iterdir()] == ["deep"]
    assert [one.name for one in folder.parent.iterdir()] == ["out"]


def test_machines_whose_hosts_would_be_alike_are_told_apart(tmp_path):
    parts = [Part(name, "L4", 1, SMALL.layers) for name in ("rack 1", "rack-1", "rack/1")]
    servings = [ServedEngine(f"e{k}", "both", (part,)) for k, part in enumerate(parts)]
    service = Service("c", SMALL, placed(servings), weights="org/m")
    found = write(service, "vllm", tmp_path / "out")
    assert [path.name for path in found] == ["rack-1-2.sh", "rack-1-3.sh", "rack-1.sh"]
    assert files.addresses(service)["e1"] == "http://rack-1:8000"
    assert len(set(files.addresses(service).values())) == 3


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "deployment-steps").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="outside"):
        write(whole(), "serve", folder)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_kubernetes_puts_no_variable_into_the_name_of_a_model():
    service = replace(named(model="$(HF_TOKEN)"), weights="a$$b$(HF_TOKEN)")
    [pair] = kubernetes.manifests(service).values()
    [container] = pair[1]["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "a$$$$b$$(HF_TOKEN)"
    assert container["args"][2] == "$$(HF_TOKEN)"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a\nb", "'a b' holds a line break"),
        ("--trust-remote-code", "begins with a dash"),
        ("-c", "begins with a dash"),
    ],
)
def test_names_of_several_lines_or_that_engines_take_for_options_are_refused(name, says):
    with pytest.raises(ExportError, match=says):
        named(model=name)
    with pytest.raises(ExportError, match=says):
        replace(named(), weights=name)


def test_an_older_card_with_such_names_is_refused_when_it_is_read():
    question = replace(card().question, cluster=DOCUMENT)
    with pytest.raises(DataError, match=r"question\.cluster.*line break"):
        PlanCard.from_json(card(question=question).to_json())
    with pytest.raises(DataError, match="control characters"):
        PlanCard.from_json(card(plan=replace(card().plan, routing=DOCUMENT)).to_json())
    group = replace(card().groups[0], places=(((COMMAND, "L4", 2, 32),),) * 2)
    with pytest.raises(DataError, match=r"groups\.0\.places.*line break"):
        PlanCard.from_json(card(groups=(group,)).to_json())


def test_a_script_that_runs_anything_else_or_a_manifest_that_says_it_is_not_written():
    good = "#!/bin/sh\n# note\nA=1 vllm serve m --port 1 &\nwait\n"
    words = [("A=1", "vllm", "serve", "m", "--port", "1")]
    assert read_back.script(good, words) == good
    for bad in (
        good + "touch x\n",
        good.replace("--port 1", "--port 1; touch x"),
        good.replace("--port 1", "--port $(touch x)"),
        good.replace("serve m", "serve n"),
        good.replace("# note", "curl x"),
        good + "'",
        good + "if\n",
    ):
        with pytest.raises(ExportError, match="does not read as it was meant"):
            read_back.script(bad, words)
    assert read_back.yaml("a: 1\n", [{"a": 1}])
    for bad in ("a: 1\n---\nb: 2\n", "a: 2\n", "a: [", "a: 1\na: 1\n"):
        with pytest.raises(ExportError, match="does not read as it was meant"):
            read_back.yaml(bad, [{"a": 1}])


@pytest.mark.parametrize(
    ("key", "listen", "address"),
    [("", "", "127.0.0.1"), ("secret", "", "0.0.0.0"), ("", "10.0.0.5", "10.0.0.5")],
)
def test_engines_listen_beyond_their_machine_only_with_a_key(key, listen, address):
    [text] = vllm.scripts(named()).values()
    around = f"vllm() {{ printf '%s\\n' \"$*\"; }}\n{text}"
    done = subprocess.run(
        ["sh"],
        input=around,
        env={"VLLM_API_KEY": key, "LISTEN": listen, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(done.stdout)
    assert words[words.index("--host") + 1] == address
    assert ("VLLM_API_KEY is not set" in done.stderr) is not bool(key)


def test_manifests_give_no_rights_that_engines_do_not_need():
    for service in (whole(), pipeline()):
        for found in kubernetes.manifests(service).values():
            for one in found:
                spec = one["spec"]
                groups = spec.get("leaderWorkerTemplate", {})
                pods = [groups[role]["spec"] for role in groups if role.endswith("Template")]
                pods += [spec["template"]["spec"]] if "template" in spec else []
                for pod in pods:
                    assert pod["automountServiceAccountToken"] is False
                    [container] = pod["containers"]
                    assert container["securityContext"]["allowPrivilegeEscalation"] is False
                    keys = {plan["name"] for plan in container["env"]}
                    assert {"HF_TOKEN", "VLLM_API_KEY"} <= keys
