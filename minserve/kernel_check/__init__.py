"""What `minserve cuda-check` does: run a CUDA kernel file on a CPU, and say what is wrong with it and what it costs."""
