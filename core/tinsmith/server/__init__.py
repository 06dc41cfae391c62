"""One server: it parses, checks, authenticates, enqueues and answers. It holds no model."""
