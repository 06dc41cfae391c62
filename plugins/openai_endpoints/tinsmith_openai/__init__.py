"""OpenAI-compatible endpoints: any OpenAI client samples from base models and checkpoints."""
