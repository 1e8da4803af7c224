"""Worker processes that run foreign code under a deadline and a memory limit, and can be killed without loss."""
