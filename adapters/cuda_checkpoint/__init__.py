"""Whole CUDA processes, checkpointed by their driver: the contract, its fulfilment, the states, and what is refused."""
