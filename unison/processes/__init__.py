"""Other processes: workers with deadlines, and signals to this one."""
