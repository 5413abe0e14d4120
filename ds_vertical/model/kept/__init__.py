"""What a block's forward keeps for its backward, and the backward that computes only the rest again."""
