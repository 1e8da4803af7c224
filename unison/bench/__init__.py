"""Measures how fast a workload is answered, by the engine of this process or by an HTTP server."""
