"""Steps of two halves: one half computes with predicted weights while the other one's step is taken."""
