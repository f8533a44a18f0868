"""The process that copies KV between pools and disk, outside every engine."""
