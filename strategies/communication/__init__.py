"""What replicas send one another."""
