"""The store by subject: what each of its methods does to a `Memory`, as one transaction."""
