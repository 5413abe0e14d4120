"""`ds-vertical limits --links`: what the links between the ranks of a job carry."""
