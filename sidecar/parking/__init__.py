"""Parks workers and other CUDA processes in memory of the host, brings them back, and says what became of them."""
