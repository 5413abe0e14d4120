"""Parts of the memory budget of a real run."""
