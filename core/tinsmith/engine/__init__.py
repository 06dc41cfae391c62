"""One engine: it claims operations, plans and runs batches, records results, and recovers models."""
