"""One engine: it claims operations, plans batches, runs them, records results, and recovers models."""
