"""Writing a plan for a tool into a folder."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ruamel.yaml import YAML

from hetero.apps.export import kubernetes, read_back, routing, skypilot, vllm
from hetero.apps.export.service import Service
from hetero.apps.serving import deployment_file
from hetero.errors import ExportError, ParameterError, require
from hetero.latency import storage
from hetero.naming import one_line, slug
from hetero.routers import Builtin

Hosts: TypeAlias = Literal["machines", "kubernetes"]
"""Where engines run: on hosts with the names of the machines, or under the exported manifests."""

Addresses: TypeAlias = Mapping[str, str]

_HEAD = f"# {vllm.MARK}\n"
# Of the texts with comments, of routing tables and of step models.
_MARKS = (vllm.MARK, f'"format": "{routing.FORMAT}"', f'"format": "{storage.FORMAT}"')


def write(
    service: Service,
    target: str,
    folder: Path | str,
    *,
    hosts: Hosts = "machines",
    force: bool = False,
) -> list[Path]:
    """Write a service for a tool; every file appears, or none.

    Parameters
    ----------
    target
        One of :data:`TARGETS`.
    folder
        Made if it does not exist; its parent must.
    hosts
        Where routing tables and deployment files look for the engines.

    Returns
    -------
    list of Path
        The files, in the order of their names.

    Raises
    ------
    ExportError
        If the tool cannot express the plan.

    Examples
    --------
    >>> from hetero import catalog, cluster
    >>> from hetero.engines import replicated
    >>> llm = catalog.llm("Llama-3-8B")
    >>> plan = replicated(cluster.cluster("xiong-8xv100"), llm, {"v100": 4})
    >>> out = Path(tempfile.mkdtemp()) / "plan"
    >>> [path.name for path in write(Service.of_deployment(plan, llm), "kubernetes", out)]
    ['v100-sxm2-32gb-tp4.yaml']
    """
    require(
        target in TARGETS,
        f"No tool is called '{target}'.",
        resolve=f"use one of {', '.join(TARGETS)}.",
    )
    texts = TARGETS[target](
        service, kubernetes.addresses(service) if hosts == "kubernetes" else addresses(service)
    )
    folder = Path(folder)
    require(
        folder.parent.is_dir(),
        f"The folder {folder.parent} of {folder.name} does not exist.",
        resolve="create it first, or choose another folder.",
    )
    if folder.exists() and not folder.is_dir():
        raise _exists(folder, "choose another folder.")
    for path in (folder / name for name in texts):
        require(
            path.resolve().is_relative_to(folder.resolve()),
            f"The file {one_line(path.relative_to(folder).as_posix())} would lie outside {folder}.",
            resolve="choose an empty folder, or rename the machine.",
            error=ExportError,
        )
        if path.exists() and not (force and _ours(path)):
            again = "or say --force (in Python force=True) to replace it."
            ours = "or remove it: --force replaces only what an export wrote."
            raise _exists(path, f"choose another folder, {ours if force else again}")
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in texts.items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (part / name).chmod(0o755)
        folder.mkdir(exist_ok=True)
        for name in texts:
            (folder / name).parent.mkdir(exist_ok=True)
            (part / name).replace(folder / name)
    except OSError as error:
        raise ExportError(
            f"{folder} cannot be written ({error.strerror or type(error).__name__}).",
            resolve="choose another folder, or make room there.",
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [folder / name for name in sorted(texts)]


def _exists(path: Path, resolve: str) -> ParameterError:
    return ParameterError(f"{path} exists already.", resolve=resolve)


def _ours(path: Path) -> bool:
    """Whether an export wrote a file."""
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(200)
    except (OSError, UnicodeDecodeError):
        return False
    return any(mark in start for mark in _MARKS)


def addresses(service: Service) -> dict[str, str]:
    """Address of every engine where machines are hosts of their names."""
    hosts = service.hosts | {"": ""}
    return {
        one.name: f"http://{hosts[one.machines[0]] or slug(one.name)}:{one.port}"
        for one in service.servings
    }


def _vllm(service: Service, at: Addresses) -> dict[str, str]:
    found = {f"{host}.sh": text for host, text in vllm.scripts(service).items()}
    return found | ({vllm.ROUTER: vllm.router(service, at)} if service.disaggregated else {})


def _kubernetes(service: Service, _: Addresses) -> dict[str, str]:
    head = (
        f"{_HEAD}# {one_line(service.llm.name)} on {one_line(service.name)}. "
        f"Routing: {one_line(service.routing) or 'as you like'}.\n"
        "# kubectl apply -f this folder. A secret 'hf-token' with the key 'token' is used if there "
        "is one.\n"
        "# So is 'vllm-api-key' with the key 'key', which engines ask of clients: without it, give "
        "them a NetworkPolicy.\n"
        "# The image is named by its tag, which can be moved: write its digest (@sha256:...) to "
        "pin it.\n"
    )
    own = {
        name: read_back.yaml(head + "---\n".join(map(_yaml, found)), found)
        for name, found in kubernetes.manifests(service).items()
    }
    return {f"{name}.yaml": text for name, text in own.items()}


def _skypilot(service: Service, _: Addresses) -> dict[str, str]:
    found = {}
    for name, task in skypilot.tasks(service).items():
        start = f"sky serve up -n {name}" if "service" in task else f"sky launch -c {name}"
        head = (
            f"{_HEAD}# {start} --secret HF_TOKEN --secret {vllm.KEY} {name}.yaml\n"
            f"# The port is open to the internet: give {vllm.KEY} a value, which engines ask of "
            "clients.\n"
        )
        found[f"{name}.yaml"] = read_back.yaml(head + _yaml(task), [task])
    return found


def _routing(service: Service, at: Addresses) -> dict[str, str]:
    meant = routing.table(service, at)
    text = routing.to_json(meant)
    require(
        routing.from_json(text) == meant,
        "The routing table does not read as it was meant.",
        resolve="rename machines and models plainly, with letters, digits and hyphens.",
        error=ExportError,
    )
    return {"routing.json": text}


def _serve(service: Service, at: Addresses) -> dict[str, str]:
    deployment, router = service.deployment, service.router
    if deployment is None:
        raise ExportError(
            f"The plan of {service.name} has no step times, by which `hetero serve` looks ahead.",
            resolve="export the cluster itself, so that it is planned anew, or profile the engines "
            "with `hetero profile URL --fit`.",
        )
    apart = [one.name for one in service.servings if one.phase != "both"]
    if not apart and router is not None and routing.named(service)[0] is None:
        raise ExportError(
            f"`hetero serve` has no router '{router.name}'.",
            resolve="choose another with --router (in Python replace the service's router), or "
            "give the routing table to your own dispatcher.",
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.yaml"
        model, urls = service.llm.name, dict(at)
        # A key that is not set is none.
        keys = {one.name: vllm.KEY for one in service.servings}
        chosen: Builtin | str = router if isinstance(router, Builtin) else "hetero"
        deployment_file.write(deployment, file, model=model, urls=urls, keys=keys, router=chosen)
        return {
            path.relative_to(folder).as_posix(): (_HEAD if path == file else "")
            + path.read_text(encoding="utf-8")
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }


def _yaml(value: Mapping[str, Any]) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 10_000  # commands stay on one line
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(str, _text)
    yaml.representer.ignore_aliases = lambda _: True
    stream = io.StringIO()
    yaml.dump(dict(value), stream)
    return stream.getvalue()


def _text(representer: Any, value: str) -> Any:
    return representer.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


TARGETS: Mapping[str, Callable[[Service, Addresses], dict[str, str]]] = {
    "vllm": _vllm,
    "kubernetes": _kubernetes,
    "k8s": _kubernetes,
    "skypilot": _skypilot,
    "routing": _routing,
    "serve": _serve,
}
"""Tools that a plan is written for, with the makers of their files: text by file name."""
