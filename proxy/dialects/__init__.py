"""One module per wire format: what a chunk delivers, how an end looks, what must stay hidden."""
