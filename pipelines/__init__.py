"""The pipeline: what turns traces and spec tables into figures, tables and the report.

Read in this order: ``schema`` (params.yaml), ``source`` (what a stage depends on), ``run`` (one
stage: one notebook with its parameters), ``report``; then ``repro`` and ``status``, which stand
behind the commands ``hetero repro`` and ``hetero status``.
"""
