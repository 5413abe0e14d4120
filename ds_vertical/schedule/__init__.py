"""A training step as a list of events, and the loop that walks it. No torch, no DeepSpeed."""
