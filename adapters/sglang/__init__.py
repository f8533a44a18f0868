"""SGLang behind the contract: its plugin, and how it is started."""
