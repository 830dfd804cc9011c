"""What several strategies read their evidence with."""
