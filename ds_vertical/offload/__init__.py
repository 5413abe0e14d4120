"""Where parameters, gradients, activations and optimizer state rest, and how they get there."""
