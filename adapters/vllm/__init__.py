"""vLLM: the plugin that runs inside it, and the adapter that starts and addresses it."""
