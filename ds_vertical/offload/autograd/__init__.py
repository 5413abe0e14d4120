"""Gradients as autograd makes them: when each is there, and in which memory."""
