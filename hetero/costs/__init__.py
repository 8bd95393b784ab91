"""What a group of mixed GPUs costs and serves: pipelines, phases, transfers."""
