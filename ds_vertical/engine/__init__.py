"""The DeepSpeed engine that runs a vertical schedule."""
