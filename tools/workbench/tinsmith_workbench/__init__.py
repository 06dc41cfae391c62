"""What computes instead of serving. It may import all of tinsmith and its plugins; nothing of them imports it."""
