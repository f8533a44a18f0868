"""The daemon: CLI, configuration, supervision, coordinator, holder, mover, metrics."""
