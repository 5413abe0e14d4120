"""Checkpoints: saved, loaded, exported."""
