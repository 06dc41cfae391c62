"""The store by subject: what each of its methods does, and its transactions."""
