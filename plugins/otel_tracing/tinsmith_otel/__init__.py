"""Sends traces of a tinsmith server's requests and batches to OpenTelemetry."""
