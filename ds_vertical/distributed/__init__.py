"""Ranks, and what they tell each other."""
