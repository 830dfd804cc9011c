"""One rank of one run: set-up, the loop, what is measured around it, audit and saving."""
