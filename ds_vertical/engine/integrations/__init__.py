"""Loops that are not `train_batch`: how their calls of the engine become whole steps; what other libraries save."""
