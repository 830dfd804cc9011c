"""What this machine has and lacks, and what runs on it."""
