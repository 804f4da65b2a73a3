"""Batches on their way to a machine: queues, slots, pipelines, workers, samplers."""
