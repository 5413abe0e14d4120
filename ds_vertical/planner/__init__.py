"""Predicted seconds and bytes of a schedule, and the choice of settings. No torch, no DeepSpeed."""
