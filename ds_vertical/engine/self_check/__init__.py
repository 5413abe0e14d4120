"""Two micro-batches in plain order and in the schedule, compared before the first step."""
