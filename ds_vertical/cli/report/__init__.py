"""`ds-vertical report`: a run, or two, as one HTML page."""
