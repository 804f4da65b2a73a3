"""Input of batches: queues, slots, pipelines, workers, samplers."""
