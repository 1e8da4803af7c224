"""A run as a whole: how it starts or goes on, saves itself, ends, and is replayed."""
