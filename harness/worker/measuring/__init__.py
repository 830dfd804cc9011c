"""Steps that are measured: memory by phase, time, what the kernel and the GPU say of them."""
