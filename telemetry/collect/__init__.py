"""What runs inside of the training step: hooks, reads at the optimizer boundary, and the session that drives them."""
