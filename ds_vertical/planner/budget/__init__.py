"""Parts of the memory budget of a plan."""
