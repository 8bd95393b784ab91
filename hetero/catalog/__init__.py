"""GPUs, language models and links: typed, with units, and each value with its source.

Examples
--------
>>> from hetero.catalog import gpu, llm
>>> gpu("L4").mem_bytes // llm("Llama-3-8B").weight_bytes("fp16")
1
>>> gpu("A100", preset="helix").name
'A100-SXM-40GB'
"""

from hetero.catalog.engines import EngineName, ServingEngine, serving_engine
from hetero.catalog.gpus import Gpu, Link, gpu, gpus, link, links, presets
from hetero.catalog.models import KvFormula, Llm, find_llm, llm, llms
from hetero.catalog.precision import PRECISION_BITS
from hetero.catalog.tables import Records

__all__ = [
    "PRECISION_BITS",
    "EngineName",
    "Gpu",
    "KvFormula",
    "Link",
    "Llm",
    "Records",
    "ServingEngine",
    "find_llm",
    "gpu",
    "gpus",
    "link",
    "links",
    "llm",
    "llms",
    "presets",
    "serving_engine",
]
