"""The user's model, run one layer and one micro-batch at a time. No DeepSpeed."""
