"""What the steps of one engine keep of forwards for their backwards, and the choice of that where the JSON leaves it open."""
