"""What runs servers and engines: start, supervision, leases, life signs."""
