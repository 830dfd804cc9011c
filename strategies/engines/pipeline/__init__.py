"""Pipeline parallel: each rank has some of the blocks, and micro batches pass from rank to rank."""
