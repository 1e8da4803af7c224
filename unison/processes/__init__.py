"""Worker processes that can be killed without loss, and signals to this one."""
