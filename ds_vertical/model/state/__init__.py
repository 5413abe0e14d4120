"""State that forwards keep in modules and objects: found, and kept apart by micro-batch."""
