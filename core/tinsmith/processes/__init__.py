"""The processes of servers and engines: start, supervision, leases and reports."""
