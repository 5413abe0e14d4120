"""The command `ds-vertical`."""
