"""`ds-vertical doctor`: what of the machine and the JSON will not work."""
