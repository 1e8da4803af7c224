"""What other systems call a setting, one file for each system."""
