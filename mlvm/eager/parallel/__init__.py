"""Collectives on tensors, data parallelism and shards."""
