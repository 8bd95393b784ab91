"""Reads what was exported with vLLM's own parser and SkyPilot's own schemas.

Run by the Python of an environment that has both: ``PYTHON export_tools.py FOLDER``, where FOLDER
holds ``vllm.json`` (a list of lists of words) and ``skypilot.json`` (a list of tasks). Prints what
was read as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def vllm(commands: list[list[str]]) -> list[dict[str, object]]:
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    # The parser asks for the platform; there is no GPU here.
    platforms._current_platform = CpuPlatform()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    found = []
    for words in commands:
        assert words[:2] == ["vllm", "serve"]
        read = parser.parse_args(words[2:])
        transfer = read.kv_transfer_config
        transfer = json.loads(transfer) if isinstance(transfer, str) else transfer
        if transfer is not None:
            config = transfer if isinstance(transfer, dict) else vars(transfer)
            assert config["kv_connector"] in KVConnectorFactory._registry
        found.append(
            {
                "model": read.model_tag,
                "tensor": read.tensor_parallel_size,
                "copies": read.data_parallel_size,
                "pipeline": read.pipeline_parallel_size,
                "quantization": read.quantization,
                "max_num_seqs": read.max_num_seqs,
                "max_model_len": read.max_model_len,
                "headless": read.headless,
                "nnodes": read.nnodes,
            }
        )
    return found


def skypilot(tasks: list[dict[str, object]]) -> list[dict[str, object]]:
    from sky.serve import service_spec
    from sky.utils import common_utils, schemas

    found = []
    for task in tasks:
        replicas = None
        common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
        common_utils.validate_schema(
            task["resources"], schemas.get_resources_schema(), "resources: "
        )
        if "service" in task:
            common_utils.validate_schema(task["service"], schemas.get_service_schema(), "service: ")
            spec = service_spec.SkyServiceSpec.from_yaml_config(task["service"])
            replicas = spec.min_replicas
        found.append({"name": task["name"], "replicas": replicas})
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    read = {
        "vllm": vllm(json.loads((folder / "vllm.json").read_text())),
        "skypilot": skypilot(json.loads((folder / "skypilot.json").read_text())),
    }
    (folder / "read.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main()
