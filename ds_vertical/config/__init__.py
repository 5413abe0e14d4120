"""The "vertical_schedule" section, and what of the rest of the JSON is refused. No torch, no DeepSpeed."""
