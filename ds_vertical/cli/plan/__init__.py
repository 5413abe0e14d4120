"""`ds-vertical plan`: settings for a model and a machine, before either is there."""
