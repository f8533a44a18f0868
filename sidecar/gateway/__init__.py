"""The gateway: the proxy in front of many nodes, off all of them."""
