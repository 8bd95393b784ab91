"""Phase splitting on mixed GPUs: groups, phases, parallelism and orchestration (ThunderServe)."""
