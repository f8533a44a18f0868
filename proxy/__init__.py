"""Streams in and out: HTTP and SSE between clients and workers, and the splice where one worker follows another."""
