"""From raw results to figures: pure functions that know no rows, and no report."""
