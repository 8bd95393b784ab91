"""Plans as files that real tools read: vLLM, Kubernetes, SkyPilot, and this project's dispatcher.

``service`` says what runs where in terms that every tool shares; ``vllm``, ``kubernetes``,
``skypilot`` and ``routing`` each write one format, and ``files`` writes them to a folder.
What a tool cannot express ends in one sentence that says so; what it merely does differently from
the plan is a note in the file.
"""

from hetero.apps.export.files import TARGETS, write
from hetero.apps.export.service import Part, ServedEngine, Service

__all__ = ["TARGETS", "Part", "ServedEngine", "Service", "write"]
